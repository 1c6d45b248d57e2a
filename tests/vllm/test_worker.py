"""The worker's half on torch tensors, with real agents and a real producer engine beside it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))

from agent_engines import BLOCK, HEAD, LAYERS, Engine, Engines, eventually, request_for

from kvferry import records
from kvferry.control.addresses import host_id
from kvferry.records import EngineRecord
from kvferry.transport.local import LocalTransport
from kvferry.vllm import attention, config, specs
from kvferry.vllm.attention import Backend
from kvferry.vllm.groups import UnsupportedCache
from kvferry.vllm.metadata import StepMetadata
from kvferry.vllm.worker import MAX_WAIT_S, WorkerSide

NUM_BLOCKS, HEADS = 16, 4
NAMES = [f"layer.{index}" for index in range(LAYERS)]


def kv_caches() -> dict[str, torch.Tensor]:
    whole = torch.zeros(LAYERS, NUM_BLOCKS, HEADS, BLOCK, 2 * HEAD)
    return dict(zip(NAMES, whole.unbind(0), strict=True))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerSide]:
    """One worker of a TP 1 engine with the caches of the `agent` tests; vLLM's process groups are not started."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(attention, "backends_of", lambda *_: dict.fromkeys(NAMES, Backend("FLASH_ATTN")))
    monkeypatch.setattr(specs, "fingerprint", lambda *_: {"model": "m"})
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32)
    cache_config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[KVCacheTensor(size=1, layers=NAMES, layer_stride=1, block_stride=1)],
        kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)],
    )
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_index=0,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
    )
    half = WorkerSide(vllm_config, cache_config, config.parse({"model_id": "m", "transports": ["local"]}))
    yield half
    half.shutdown()


@pytest.fixture
def producer() -> Iterator[Engine]:
    engines = Engines()
    yield engines.make()
    engines.stop()


class Steps:
    """What vLLM's model runner does with the half, step by step."""

    def __init__(self, half: WorkerSide, engine: Engine) -> None:
        self.half = half
        self.engine = engine
        self.finished: list[str] = []
        self.failed: list[str] = []
        self.records: dict[int, bytes] = {}

    def step(self, *loads, cancels=(), computes_nothing: bool = False) -> None:
        agent = self.engine.agent
        step = StepMetadata(
            agent.engine_id,
            agent.incarnation,
            agent.endpoint.address,
            agent.home,
            list(loads),
            list(cancels),
            computes_nothing=computes_nothing,
        )
        self.half.begin_step(step)
        self.half.start_load_kv(step)
        results = self.half.get_transfer_results()
        assert not results.finished_sending
        self.finished += results.finished_recving
        self.failed += results.failed_recving
        metadata = self.half.build_connector_worker_meta()
        if metadata is None:
            assert not results.finished_recving
            return
        assert {result.request_id for result in metadata.results} == results.finished_recving
        self.records.update(metadata.records)

    def until(self, condition: Callable[[], object], what: str) -> None:
        def stepped() -> object:
            self.step()
            return condition()

        eventually(stepped, what)


@pytest.fixture
def steps(worker: WorkerSide) -> Iterator[Steps]:
    engines = Engines()
    yield Steps(worker, engines.make())
    engines.stop()


def load_of(producer: Engine, name: str, blocks: list[int]):
    ref = producer.hold([1, 2], 8)
    return request_for(producer, ref, [1, 2], blocks, 8, request_id=name)


def test_a_load_is_reported_once(worker: WorkerSide, steps: Steps, producer: Engine) -> None:
    caches = kv_caches()
    worker.register_kv_caches(caches)
    producer.fill([1, 2], 8)
    steps.step(load_of(producer, "a", [3, 4]), load_of(producer, "b", [5, 6]))
    steps.until(lambda: len(steps.finished) == 2, "both loads")
    steps.step()
    assert (sorted(steps.finished), steps.failed) == (["a", "b"], [])
    source = torch.from_numpy(producer.workers[0].cache)
    for index, name in enumerate(NAMES):
        assert torch.equal(caches[name][[3, 4]], source[index, [1, 2]])
        assert torch.equal(caches[name][[5, 6]], source[index, [1, 2]])
        assert not caches[name][7:].any()


def test_a_step_that_computes_nothing_ends_with_the_next_result(
    worker: WorkerSide, steps: Steps, producer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.vllm.worker.MAX_WAIT_S", 60.0)
    monkeypatch.setattr("kvferry.vllm.worker.SHARE_OF_WAIT", 1e9)
    worker.register_kv_caches(kv_caches())
    for name in ("a", "b"):
        steps.step(load_of(producer, name, [3, 4]), computes_nothing=True)
        assert steps.finished[-1:] == [name]


def test_no_step_waits_that_computes_or_has_no_load(
    worker: WorkerSide, steps: Steps, producer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.vllm.worker.SHARE_OF_WAIT", 1e9)
    worker.register_kv_caches(kv_caches())
    waits: list[float] = []
    collect = worker._agent.collect
    monkeypatch.setattr(worker._agent, "collect", lambda wait_s: waits.append(wait_s) or collect())
    steps.step(computes_nothing=True)
    steps.step(load_of(producer, "a", [3, 4]))
    assert waits == [0.0, 0.0]
    steps.step(load_of(producer, "b", [5, 6]), computes_nothing=True)
    assert waits[2] == MAX_WAIT_S


def test_a_dead_agent_fails_what_runs_and_what_comes(worker: WorkerSide, steps: Steps, producer: Engine) -> None:
    worker.register_kv_caches(kv_caches())
    worker._agent.stop()
    steps.step(load_of(producer, "a", [3, 4]))
    steps.step(load_of(producer, "b", [5, 6]))
    assert (steps.finished, steps.failed) == (["a", "b"], ["a", "b"])


def test_memory_is_not_given_up_while_a_transport_may_touch_it(
    worker: WorkerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, close = threading.Event(), LocalTransport.close
    monkeypatch.setattr(LocalTransport, "close", lambda transport: (go_on.wait(60), close(transport)))
    monkeypatch.setattr("kvferry.vllm.worker.STOP_S", 0.0)
    worker.register_kv_caches(kv_caches())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="its memory can't be given up"):
            worker.unregister_kv_caches()
    go_on.set()
    monkeypatch.setattr("kvferry.vllm.worker.STOP_S", 60.0)
    worker.unregister_kv_caches()
    assert worker.get_handshake_metadata() is None


def test_sleep_takes_the_memory_and_waking_publishes_it_anew(
    worker: WorkerSide, steps: Steps, producer: Engine
) -> None:
    worker.register_kv_caches(kv_caches())
    before = records.decode_worker(worker.get_handshake_metadata().record)
    worker.unregister_kv_caches()
    assert worker.get_handshake_metadata() is None
    steps.step(load_of(producer, "asleep", [3, 4]))
    assert steps.failed == ["asleep"]

    caches = kv_caches()
    worker.restore_kv_caches(caches)
    steps.step()
    after = records.decode_worker(steps.records[0])
    assert after.layout.regions[0].address == caches[NAMES[0]].untyped_storage().data_ptr()
    assert after.control_address != before.control_address
    producer.fill([1, 2], 8)
    steps.step(load_of(producer, "awake", [3, 4]))
    steps.until(lambda: "awake" in steps.finished, "the load after waking")
    assert steps.failed == ["asleep"]


def test_peers_read_the_memory_that_is_registered_now(worker: WorkerSide, steps: Steps, producer: Engine) -> None:
    """The other direction: the woken worker as a producer, published by its engine's record."""
    worker.register_kv_caches(kv_caches())
    worker.unregister_kv_caches()
    caches = kv_caches()
    worker.restore_kv_caches(caches)
    steps.step()
    for name in NAMES:
        caches[name][7] = 7.0
    agent = steps.engine.agent
    record = EngineRecord(
        agent.engine_id,
        agent.incarnation,
        host_id(),
        {"model": "m"},
        ("FullAttentionSpec",),
        (records.decode_worker(steps.records[0]),),
    )
    agent.set_record(record)
    ref = steps.engine.hold([7], 4)
    (result,) = producer.load(request_for(steps.engine, ref, [7], [9], 4))
    assert (result.ok, result.reason) == (True, "")
    assert (producer.workers[0].cache[:, 9] == 7.0).all()


def test_a_cache_that_cannot_be_moved_ends_the_start(worker: WorkerSide) -> None:
    short = {name: tensor[..., :HEAD] for name, tensor in kv_caches().items()}
    with pytest.raises(UnsupportedCache, match="its blocks have gaps"):
        worker.register_kv_caches(short)
