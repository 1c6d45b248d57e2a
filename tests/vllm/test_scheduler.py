"""The scheduler's half with vLLM's own block pool and requests, and real rendezvous on both sides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvferry.agent import LoadQuiet, LoadResult
from kvferry.vllm import config
from kvferry.vllm.fetches import Stage
from kvferry.vllm.metadata import WorkerMetadata
from kvferry.vllm.scheduler import SchedulerSide

BLOCK = 16
NUM_BLOCKS = 33  # one of them is the null block


def step_of(*computes: tuple[str, int], finished: Sequence[str] = (), preempted: Sequence[str] | None = None) -> Any:
    """What vLLM's scheduler decided for a step: (request id, tokens) that it computes."""
    return SimpleNamespace(
        num_scheduled_tokens=dict(computes),
        finished_req_ids=set(finished),
        preempted_req_ids=None if preempted is None else set(preempted),
    )


NOTHING = step_of()
"""A step that computes nothing."""


def full_attention() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)


def state_of_a_mamba() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=1024, shapes=((3, 8), (2, 2, 2)), dtypes=(torch.float32,) * 2)


class Side:
    """One engine core: the half under test, and what vLLM's scheduler does around it."""

    def __init__(self, role: str, policy: str = "recompute", state: bool = False, **extra: Any) -> None:
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=False, hash_block_size=BLOCK)
        self.tables: dict[str, tuple[list[Any], ...]] = {}
        self.keeps_state = state
        transfer = SimpleNamespace(
            engine_id=role,
            is_kv_producer=role == "producer",
            is_kv_consumer=role == "consumer",
            kv_load_failure_policy=policy,
        )
        parallel = SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_size=1,
            data_parallel_index=0,
        )
        vllm_config = SimpleNamespace(
            kv_transfer_config=transfer, parallel_config=parallel, num_prefill_lookahead_tokens=0
        )
        groups = [KVCacheGroupSpec(["layer"], full_attention())]
        if state:
            groups.append(KVCacheGroupSpec(["mixer"], state_of_a_mamba()))
        self.half = SchedulerSide(
            vllm_config,
            KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            config.parse({"model_id": "m", **extra}),
        )
        manager = SimpleNamespace(
            block_pool=self.pool,
            get_blocks=lambda request_id: KVCacheBlocks(self.tables[request_id]),
            get_block_ids_for_computed_tokens=self.block_ids,
        )
        self.half.bind_kv_cache_manager(manager)

    @property
    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def allocate(self, request: Request, num_tokens: int) -> KVCacheBlocks:
        sizes = [-(-num_tokens // BLOCK), *([1] if self.keeps_state else [])]
        self.tables[request.request_id] = tuple(self.pool.get_new_blocks(size) for size in sizes)
        return KVCacheBlocks(self.tables[request.request_id])

    def block_ids(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """As vLLM's manager clips them: attention by tokens, a state's not at all."""
        ids = [[block.block_id for block in group] for group in self.tables[request_id]]
        return (ids[0][: -(-num_computed_tokens // BLOCK)], *ids[1:])

    def step(self, request: Request, num_tokens: int) -> Any:
        """One engine step that computes so many tokens of the request; what its workers are told."""
        told = self.half.build_connector_meta(step_of((request.request_id, num_tokens)))
        request.num_computed_tokens += num_tokens
        return told

    def free_blocks(self, request: Request) -> None:
        for group in self.tables.pop(request.request_id):
            self.pool.free_blocks(reversed(group))

    def finish(self, request: Request, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
        request.status = status
        groups = self.tables.get(request.request_id, ([],))
        ids = [[block.block_id for block in group] for group in groups]
        delayed, params = self.half.request_finished(request, ids)
        assert delayed is False  # vLLM is never asked to wait
        return params

    def report(self, request: Request, *results: LoadResult) -> None:
        """What one engine step brings: the workers' figures, and the request once all ranks have reported."""
        failed = {request.request_id} if any(not result.ok for result in results) else set()
        self.half.update_connector_output(
            KVConnectorOutput(
                finished_recving={request.request_id},
                failed_recving=failed,
                kv_connector_worker_meta=WorkerMetadata(list(results)),
            )
        )


def request_of(request_id: str, num_tokens: int, params: dict[str, Any] | None, first: int = 0) -> Request:
    extra = {"kv_transfer_params": params} if params is not None else None
    sampling = SamplingParams(max_tokens=4, extra_args=extra)
    return Request(request_id, [first, *range(1, num_tokens)], sampling, None)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "not within 30 s"
        time.sleep(0.002)


@pytest.fixture
def make_side() -> Iterator[Callable[..., Side]]:
    sides: list[Side] = []

    def make(*args: Any, **kwargs: Any) -> Side:
        sides.append(Side(*args, **kwargs))
        return sides[-1]

    yield make
    for side in sides:
        side.half.shutdown()


def offer(producer: Side, num_tokens: int = 40) -> dict[str, Any]:
    """A first leg, whole: its blocks stay held when vLLM has freed its own references."""
    request = request_of(f"first-{num_tokens}-{producer.free}", num_tokens, {"do_remote_decode": True})
    producer.half.on_new_request(request)
    assert producer.half.get_num_new_matched_tokens(request, 0) == (0, False)
    producer.allocate(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    params = producer.finish(request)
    producer.free_blocks(request)
    return params


def begin(consumer: Side, params: dict[str, Any] | None, num_tokens: int = 40) -> tuple[Request, Any]:
    """A second leg up to the load that the workers get."""
    request = request_of(f"second-{num_tokens}-{time.monotonic_ns()}", num_tokens, params)
    consumer.half.on_new_request(request)
    tokens, is_async = consumer.half.get_num_new_matched_tokens(request, 0)
    assert is_async == (tokens > 0)
    blocks = consumer.allocate(request, tokens or num_tokens)
    consumer.half.update_state_after_alloc(request, blocks, tokens)
    loads = consumer.half.build_connector_meta(NOTHING).loads
    return request, (loads[0] if loads else None)


def result(load: Any, rank: int, *, ok: bool = True, quiet: bool = True, reason: str = "") -> LoadResult:
    return LoadResult(load.request_id, load.load_id, rank, ok, quiet, reason, "local", 64, 2, 0.01, 0.001)


def test_a_whole_transfer(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer")
    params = offer(producer)
    assert producer.free == NUM_BLOCKS - 1 - 3
    request, load = begin(consumer, params)
    assert (load.first_token, load.end_token, load.refused) == (0, 39, "")
    assert load.consumer_block_ids == (tuple(block.block_id for block in consumer.tables[request.request_id][0]),)
    assert load.producer_block_ids == (tuple(params["remote_block_ids"][0]),)
    consumer.report(request, result(load, 0), result(load, 1))
    eventually(lambda: producer.half.drain() > 0)
    assert producer.free == NUM_BLOCKS - 1
    answer = consumer.finish(request)
    assert answer["kvferry"] == {
        "path": "remote",
        "transport": "local",
        "bytes": 128,
        "descriptors": 4,
        "transfer_ms": 10.0,
        "reason": "",
    }


def test_a_failed_load_that_is_not_quiet_is_quarantined(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer")
    request, load = begin(consumer, offer(producer))
    consumer.report(request, result(load, 0), result(load, 1, ok=False, quiet=False, reason="wire cut"))
    consumer.free_blocks(request)  # vLLM frees a failed load at once
    assert consumer.free == NUM_BLOCKS - 1 - 3
    consumer.half._agent._inbox.append(LoadQuiet(load.load_id, 1))
    assert consumer.half.has_pending_block_frees()
    assert consumer.free == NUM_BLOCKS - 1
    assert not consumer.half.has_pending_block_frees()
    assert consumer.half.get_num_new_matched_tokens(request, 0) == (0, False)  # recomputed, not asked for again
    assert consumer.finish(request)["kvferry"]["reason"] == "wire cut"


def test_news_of_quiet_may_overtake_the_report(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer")
    request, load = begin(consumer, offer(producer))
    consumer.half._agent._inbox.append(LoadQuiet(load.load_id, 1))
    consumer.half.drain()
    consumer.report(request, result(load, 0), result(load, 1, ok=False, quiet=False, reason="wire cut"))
    consumer.free_blocks(request)
    assert consumer.free == NUM_BLOCKS - 1


def test_a_full_quarantine_stops_new_loads(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer", max_quarantined=0.1)
    request, load = begin(consumer, offer(producer))
    consumer.report(request, *(result(load, rank, ok=False, quiet=False, reason="wire cut") for rank in (0, 1)))
    consumer.free_blocks(request)
    second, nothing = begin(consumer, offer(producer))
    assert nothing is None
    assert "quarantine" in consumer.finish(second)["kvferry"]["reason"]


def test_an_abort_while_loading_cancels_and_waits_for_the_workers(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer")
    request, load = begin(consumer, offer(producer))
    consumer.finish(request, RequestStatus.FINISHED_ABORTED)
    assert [load_id for load_id, _ in consumer.half.build_connector_meta(NOTHING).cancels] == [load.load_id]
    assert consumer.half.fetches._fetches[request.request_id].stage is Stage.LOADING
    consumer.report(request, *(result(load, rank, ok=False, reason="cancelled") for rank in (0, 1)))
    assert len(consumer.half.fetches) == 0
    eventually(lambda: producer.half.drain() > 0)


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_request_that_ends_before_its_load_releases(make_side: Callable[..., Side], status: RequestStatus) -> None:
    producer, consumer = make_side("producer"), make_side("consumer")
    params = offer(producer)
    request = request_of("second", 40, params)
    consumer.half.on_new_request(request)
    consumer.finish(request, status)
    eventually(lambda: producer.half.drain() > 0)
    assert len(consumer.half.fetches) == 0


def test_a_first_leg_that_did_not_finish_offers_nothing(make_side: Callable[..., Side]) -> None:
    producer = make_side("producer")
    request = request_of("first", 40, {"do_remote_decode": True})
    producer.allocate(request, 40)
    request.num_computed_tokens = 32
    assert producer.finish(request, RequestStatus.FINISHED_ABORTED) is None
    producer.free_blocks(request)
    assert producer.free == NUM_BLOCKS - 1


def test_beyond_the_cap_a_prompt_is_not_offered_and_the_reason_travels(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer", max_held=0.1), make_side("consumer")
    assert offer(producer)["do_remote_prefill"] is True
    params = offer(producer, num_tokens=41)
    assert params["do_remote_prefill"] is False
    request, load = begin(consumer, params)
    assert load is None
    report = consumer.finish(request)["kvferry"]
    assert (report["path"], "max_held" in report["reason"]) == ("recomputed", True)


@pytest.mark.parametrize(("policy", "loads"), [("recompute", False), ("fail", True)])
def test_unusable_parameters_follow_the_policy(make_side: Callable[..., Side], policy: str, loads: bool) -> None:
    consumer = make_side("consumer", policy)
    request, load = begin(consumer, {"do_remote_prefill": True, "remote_host": "10.0.0.1"})
    assert (load is not None) == loads
    if load is not None:
        assert "does not run kvferry" in load.refused
        consumer.report(request, *(result(load, rank, ok=False, reason=load.refused) for rank in (0, 1)))
    assert "does not run kvferry" in consumer.finish(request)["kvferry"]["reason"]
    assert len(consumer.half.fetches) == 0


def test_a_transfer_used_before_is_computed_not_failed(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer", "fail")
    params = offer(producer)
    request, load = begin(consumer, params)
    consumer.report(request, result(load, 0), result(load, 1))
    again, nothing = begin(consumer, params)
    assert nothing is None
    assert consumer.finish(again)["kvferry"]["path"] == "recomputed"


def test_a_local_hit_of_all_that_matters_loads_nothing(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer")
    request = request_of("second", 33, offer(producer, num_tokens=33))
    consumer.half.on_new_request(request)
    assert consumer.half.get_num_new_matched_tokens(request, 32) == (0, False)  # token 33 is computed anyway
    consumer.half.update_state_after_alloc(request, consumer.allocate(request, 33), 0)
    assert consumer.finish(request)["kvferry"]["path"] == "local"
    eventually(lambda: producer.half.drain() > 0)


def test_what_the_local_cache_has_is_left_out_of_the_load(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer")
    request = request_of("second", 40, offer(producer))
    consumer.half.on_new_request(request)
    assert consumer.half.get_num_new_matched_tokens(request, 16) == (23, True)
    blocks = consumer.allocate(request, 39)
    blocks.blocks[0][0]._block_hash = b"a local hit has a hash"
    consumer.half.update_state_after_alloc(request, blocks, 23)
    (load,) = consumer.half.build_connector_meta(NOTHING).loads
    assert (load.first_token, load.end_token) == (16, 39)
    assert load.consumer_block_ids[0][0] == -1
    assert -1 not in load.consumer_block_ids[0][1:]


def test_a_reset_gives_back_what_nobody_claimed(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer")
    offer(producer)
    assert producer.pool.reset_prefix_cache() is True
    assert producer.free == NUM_BLOCKS - 1
    request, load = begin(consumer, offer(producer))
    eventually(lambda: producer.half._agent._producer.num_open_claims > 0)
    assert producer.pool.reset_prefix_cache() is False  # somebody reads
    consumer.report(request, result(load, 0), result(load, 1))
    eventually(lambda: producer.half.drain() > 0)
    assert producer.pool.reset_prefix_cache() is True


def test_a_terminating_engine_stays_while_blocks_are_held(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer"), make_side("consumer")
    request, load = begin(consumer, offer(producer))
    assert not producer.half.has_pending_push_work()
    producer.half._closing = True
    assert producer.half.has_pending_push_work()
    consumer.report(request, result(load, 0), result(load, 1))
    eventually(lambda: not producer.half.has_pending_push_work())


def test_a_state_is_offered_after_all_but_the_last_token(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer", state=True), make_side("consumer", state=True)
    params = offer(producer, num_tokens=40)
    assert params["remote_num_tokens"] == 39
    assert [len(group) for group in params["remote_block_ids"]] == [3, 1]
    assert producer.free == NUM_BLOCKS - 1 - 4
    request, load = begin(consumer, params)
    assert (load.first_token, load.end_token, load.refused) == (0, 39, "")
    slot = consumer.tables[request.request_id][1][0]
    assert (load.consumer_block_ids[1], load.producer_block_ids[1]) == (
        (slot.block_id,),
        tuple(params["remote_block_ids"][1]),
    )
    consumer.report(request, result(load, 0), result(load, 1))
    eventually(lambda: producer.half.drain() > 0)
    assert producer.free == NUM_BLOCKS - 1


def test_what_a_first_leg_computes_ends_before_its_last_token(make_side: Callable[..., Side]) -> None:
    producer = make_side("producer", state=True)
    request = request_of("first", 40, {"do_remote_decode": True})
    producer.half.on_new_request(request)
    assert (request.num_tokens, request.num_prompt_tokens, request.max_tokens) == (39, 39, 1)
    assert request.prompt_token_ids == list(range(39))
    plain = request_of("plain", 40, None)
    producer.half.on_new_request(plain)
    assert (plain.num_tokens, plain.max_tokens) == (40, 4)


def test_a_prompt_too_short_to_leave_a_token_is_not_offered(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer", state=True), make_side("consumer", "fail", state=True)
    params = offer(producer, num_tokens=1)
    assert params["do_remote_prefill"] is False
    request, load = begin(consumer, params, num_tokens=1)
    assert load is None
    report = consumer.finish(request)["kvferry"]
    assert (report["path"], report["reason"]) == ("recomputed", "the prompt has 1 tokens, 1 are left to the consumer")


def test_a_state_after_the_whole_prompt_is_refused(make_side: Callable[..., Side]) -> None:
    """A client cut the prompt of the second leg: its state would have seen a token too many."""
    producer, consumer = make_side("producer", state=True), make_side("consumer", state=True)
    request, load = begin(consumer, offer(producer, num_tokens=40), num_tokens=39)
    assert load is None
    assert "after all 39 tokens" in consumer.finish(request)["kvferry"]["reason"]
    eventually(lambda: producer.half.drain() > 0)


def test_a_state_without_a_slot_of_its_own_fails_the_load(make_side: Callable[..., Side]) -> None:
    producer, consumer = make_side("producer", state=True), make_side("consumer", state=True)
    request = request_of("second", 40, offer(producer))
    consumer.half.on_new_request(request)
    tokens, _ = consumer.half.get_num_new_matched_tokens(request, 0)
    blocks = consumer.allocate(request, tokens)
    blocks.blocks[1][0]._block_hash = b"another request's"
    consumer.half.update_state_after_alloc(request, blocks, tokens)
    (load,) = consumer.half.build_connector_meta(NOTHING).loads
    assert "not this request's own" in load.refused


NAMED = {"do_remote_decode": True, "transfer_id": "tx-1"}


def first_leg_under_a_name(producer: Side, num_tokens: int = 40, name: str = "tx-1") -> Request:
    request = request_of(f"first-{name}", num_tokens, {**NAMED, "transfer_id": name})
    producer.half.on_new_request(request)
    return request


def to_come(producer: Side, **changes: Any) -> dict[str, Any]:
    """A second leg's parameters as a router of the concurrent contract makes them."""
    host, port = producer.half._agent.endpoint.address.removeprefix("tcp://").split(":")
    params = {"do_remote_prefill": True, "transfer_id": "tx-1", "remote_host": host, "remote_port": int(port)}
    return {**params, **changes}


def test_each_step_tells_what_it_computes_of_a_promised_prompt(make_side) -> None:
    producer = make_side("producer")
    request = first_leg_under_a_name(producer)
    producer.allocate(request, 40)
    ids = producer.block_ids(request.request_id, 40)
    (first,) = producer.step(request, 17).computes
    (second,) = producer.step(request, 23).computes
    assert (first.num_tokens, first.is_last, first.block_ids) == (17, False, (tuple(ids[0][:2]),))
    assert (second.num_tokens, second.is_last, second.block_ids) == (40, True, (tuple(ids[0]),))
    assert first.transfer_id == second.transfer_id
    assert producer.step(request, 1).computes == []  # what is generated is nobody's prompt
    # It may be preempted now: the ledger has references of its own, from before the last step was run.
    free = producer.free
    producer.free_blocks(request)
    assert producer.free == free
    request.num_computed_tokens = 40
    producer.tables[request.request_id] = ()
    params = producer.finish(request)
    assert params["kvferry"]["transfer_id"] == first.transfer_id
    assert params["remote_block_ids"] == [list(ids[0])]


def test_a_promise_whose_request_ends_early_gives_its_blocks_back(make_side) -> None:
    producer = make_side("producer")
    free = producer.free
    request = first_leg_under_a_name(producer)
    producer.allocate(request, 40)
    producer.step(request, 17)
    assert producer.finish(request, RequestStatus.FINISHED_ABORTED) is None
    producer.free_blocks(request)
    eventually(lambda: producer.half.drain() >= 0 and producer.free == free)


def test_a_name_is_promised_once(make_side) -> None:
    producer = make_side("producer")
    first, second = (request_of(one, 40, NAMED) for one in ("0_cmpl", "1_cmpl"))
    for request in (first, second):
        producer.half.on_new_request(request)
        producer.allocate(request, 40)
    assert len(producer.half.offers.promises) == 1
    assert len(producer.step(first, 40).computes) == 1
    assert producer.step(second, 40).computes == []
    # Both are offered, each under a name of its own.
    offered = [producer.finish(request)["kvferry"]["transfer_id"] for request in (first, second)]
    assert len(set(offered)) == 2


def test_a_promised_prompt_that_the_ledger_cannot_hold_is_not_offered(make_side) -> None:
    producer = make_side("producer", max_held=0.05)
    request = first_leg_under_a_name(producer)
    producer.allocate(request, 40)
    assert producer.step(request, 40).computes == []
    assert "max_held" in producer.finish(request)["kvferry"]["refused"]


def test_a_state_that_is_not_cut_is_promised_to_nobody(make_side) -> None:
    producer, consumer = make_side("producer", state=True), make_side("consumer", state=True)
    request = first_leg_under_a_name(producer, num_tokens=1)
    assert len(producer.half.offers.promises) == 0
    producer.allocate(request, 1)
    assert producer.step(request, 1).computes == []
    _, load = begin(consumer, to_come(producer), num_tokens=1)
    assert load is None


def test_held_blocks_that_keep_prompts_waiting_are_let_go(make_side) -> None:
    """The consumer may wait for the very prompts that they keep out."""
    producer, consumer = make_side("producer", claim_reply_s=0.05), make_side("consumer")
    waiting = request_of("second-held", 40, to_come(producer, transfer_id="tx-held"))
    consumer.half.on_new_request(waiting)
    held = first_leg_under_a_name(producer, name="tx-held")
    producer.allocate(held, 40)
    producer.step(held, 40)
    producer.finish(held)
    producer.free_blocks(held)
    free = producer.free
    first_leg_under_a_name(producer, name="tx-waiting")

    def let_go() -> bool:
        producer.half.build_connector_meta(NOTHING)
        return producer.free > free

    eventually(let_go)


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_second_leg_that_comes_with_its_first_is_written(make_side, mode: str) -> None:
    producer, consumer = make_side("producer"), make_side("consumer", mode=mode)
    _, load = begin(consumer, to_come(producer))
    assert (load.write, load.ref.transfer_id, load.ref.is_routers) == (True, "tx-1", True)
    assert (load.num_tokens, load.first_token, load.end_token, load.producer_block_ids) == (40, 0, 39, ())


@pytest.mark.parametrize(("mode", "asked", "written"), [("read", None, 0), ("write", None, 1), ("read", "write", 1)])
def test_a_later_second_leg_goes_by_the_settings_or_its_own_word(make_side, mode, asked, written) -> None:
    producer, consumer = make_side("producer"), make_side("consumer", mode=mode)
    _, load = begin(consumer, {**offer(producer), **({"mode": asked} if asked else {})})
    assert (load.write, bool(load.producer_block_ids[0])) == (bool(written), True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mode": "push"}, "mode"),
        ({"mode": "read"}, "yet to be computed"),
        ({"remote_host": None, "remote_port": None}, "address"),
        ({"transfer_id": 7}, "transfer_id"),
        ({"remote_dp_size": 2}, "remote_dp_size"),
    ],
)
def test_parameters_that_name_no_transfer_to_come(make_side, change: dict[str, Any], named: str) -> None:
    producer, consumer = make_side("producer"), make_side("consumer", policy="fail")
    _, load = begin(consumer, to_come(producer, **change))
    assert named in load.refused


def test_workers_learn_when_nothing_runs(make_side: Callable[..., Side]) -> None:
    """A step without tokens may stand between two that have some: then its workers must not wait for loads."""
    half = make_side("consumer").half
    steps = [
        step_of(),
        step_of(("a", 5), ("b", 1)),
        step_of(),  # what was scheduled before may still run
        step_of(("a", 1), finished=["b"]),
        step_of(preempted=["a"]),
        step_of(("a", 6)),
        step_of(finished=["a"]),
    ]
    told = [half.build_connector_meta(step).computes_nothing for step in steps]
    assert told == [True, False, False, False, True, False, True]


def test_work_that_was_taken_gets_to_the_workers_whatever_fails(
    make_side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook of ours that fails must not end the step, and the loads that it would have told of must not be lost."""
    producer, consumer = make_side("producer"), make_side("consumer")
    request = request_of("second", 40, offer(producer))
    consumer.half.on_new_request(request)
    tokens, _ = consumer.half.get_num_new_matched_tokens(request, 0)
    consumer.half.update_state_after_alloc(request, consumer.allocate(request, tokens), tokens)
    promises = consumer.half.offers.promises
    with monkeypatch.context() as broken:
        broken.setattr(promises, "steps", lambda scheduled: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            consumer.half.build_connector_meta(NOTHING)
    assert [load.request_id for load in consumer.half.build_connector_meta(NOTHING).loads] == ["second"]
