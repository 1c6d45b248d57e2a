"""Figures: collected per process, merged by vLLM, shown once."""

from kvferry.agent import LoadResult
from kvferry.vllm.metrics import HOOK_SAMPLES_KEPT, FerryStats, KVFerryStats, reason_kind


def loaded(ok: bool = True, reason: str = "") -> LoadResult:
    return LoadResult("r", "l", 0, ok, True, reason, "local", 2_000_000, 4, 0.02, 0.001)


def test_loads_and_failures_are_counted_and_taken_once() -> None:
    stats = FerryStats()
    assert stats.take() is None
    stats.add_result(loaded())
    stats.add_result(loaded(ok=False, reason="handshake with tcp://10.0.0.1:5: no answer"))
    taken = stats.take()
    assert taken is not None
    line = taken.reduce()
    assert (line["loads"], line["MB"], line["failed"], line["failures:handshake"]) == (1, 2.0, 1, 1)
    assert line["load ms p50"] == 20.0
    assert stats.take() is None


def test_halves_are_merged_and_gauges_keep_the_latest() -> None:
    worker, scheduler = FerryStats(), FerryStats()
    worker.add_result(loaded())
    scheduler.count_hold("released")
    scheduler.count_hold("released")
    scheduler.set_gauges(held_blocks=3, quarantined_blocks=0, oldest_s=1.5)
    merged = KVFerryStats()
    for one in (worker.take(), scheduler.take()):
        assert one is not None
        merged.aggregate(KVFerryStats(data=one.to_dict()))
    line = merged.reduce()
    assert (line["loads"], line["holds:released"], line["held blocks"]) == (1, 2, 3)


def test_an_idle_engine_sends_nothing_but_its_hook_times_do_not_get_lost() -> None:
    stats = FerryStats()
    for _ in range(HOOK_SAMPLES_KEPT - 1):
        with stats.in_hook():
            pass
        stats.end_step()
    assert stats.take() is None
    stats.end_step()
    taken = stats.take()
    assert taken is not None
    assert len(taken.data["hook_s"]) == HOOK_SAMPLES_KEPT


def test_an_age_alone_is_no_news() -> None:
    stats = FerryStats()
    stats.set_gauges(held_blocks=0, quarantined_blocks=0, oldest_s=0.0)
    stats.take()
    stats.set_gauges(held_blocks=0, quarantined_blocks=0, oldest_s=5.0)
    assert stats.take() is None


def test_reasons_become_few_labels() -> None:
    assert reason_kind("Refusal: model: consumer a, producer b") == "mismatch"
    assert reason_kind("connection to tcp://10.0.0.1:5 lost: refused") == "connection"
    assert reason_kind("digest: the consumer's prompt is another") == "digest"
    assert reason_kind("something nobody thought of") == "other"
