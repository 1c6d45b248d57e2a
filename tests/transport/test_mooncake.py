"""What only the Mooncake transport has: who its peer is, what may still land, and what it needs to be there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import verbs_stand_in
from transport_harness import (
    SIZES,
    Kit,
    PeerProcess,
    Side,
    batch,
    changed,
    digest,
    finish,
    give_back,
    pattern,
    settle,
    waiting,
)

from kvferry.layout import Region
from kvferry.transport import mooncake, mooncake_library, mooncake_queue
from kvferry.transport.base import BadTransfer, PeerLost, State, Status, TransportError, TransportUnavailable
from kvferry.transport.mooncake_data import Step
from kvferry.transport.mooncake_library import LATE, MOVED, PENDING
from kvferry.transport.mooncake_queue import Job, Queue
from kvferry.transport.registry import make

TCP = Kit("mooncake", "mooncake", {"host": "127.0.0.1"}, environment=verbs_stand_in.environment)
WINDOW = mooncake_queue.window()
PIECE = 16 << 10
BIG = 2 * WINDOW * PIECE
LOST = -1


@pytest.fixture(scope="module", autouse=True)
def loadable() -> None:
    verbs_stand_in.environment()


@pytest.fixture
def spawn() -> Iterator[Callable[[], PeerProcess]]:
    started: list[PeerProcess] = []

    def start() -> PeerProcess:
        started.append(PeerProcess(TCP))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture
def side() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def build(sizes: tuple[int, ...] = SIZES, **more: Any) -> Side:
        made.append(Side(TCP, sizes, **more))
        return made[-1]

    yield build
    for one in made:
        one.transport.close()


def fields_of(record: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(record)  # type: ignore[no-any-return]


def half_way(here: Side, peer: PeerProcess, operation: str = "read") -> tuple[Any, Any]:
    """A transfer of which one half has moved, when its target was stopped: (connected peer, handle).

    There are twice as many pieces as may be with the library, and it gets the second half only when it is polled.
    """
    connected = here.transport.connect(peer.start((BIG,)))
    here.buffers[0][:] = pattern(2, BIG)
    peer.call("fill", region=0, seed=1)
    starts = np.arange(0, BIG, PIECE)
    handle = getattr(here.transport, operation)(connected, [batch(starts, starts, np.full(len(starts), PIECE))])
    mixed = {"read": (1, 2), "write": (2, 1)}[operation]
    half = np.concatenate([pattern(mixed[0], BIG)[: BIG // 2], pattern(mixed[1], BIG)[BIG // 2 :]])
    for _ in waiting("nothing is posted"):
        if handle.job.in_flight == WINDOW:
            break
        assert here.transport.poll(handle).state is State.PENDING
    for _ in waiting("the first half does not arrive"):
        if (digest(here.buffers[0]) if operation == "read" else peer.digest(0)) == digest(half):
            break
    peer.stop()
    assert here.transport.poll(handle).state is State.PENDING
    return connected, handle


# Who the peer is.


@pytest.mark.parametrize("operation", ["read", "write"])
def test_another_process_at_its_address_is_noticed(side: Any, spawn: Any, operation: str) -> None:
    """As after a restart that was given the same port: what was said of the old process leads to the new one."""
    here, old, new = side(), spawn(), spawn()
    here.buffers[0][:] = pattern(3, SIZES[0])
    gone, there = fields_of(old.start()), fields_of(new.start())
    new.call("fill", region=0, seed=2)
    forged = {**there, "token": gone["token"]}
    connected = here.transport.connect(msgspec.msgpack.encode(forged))
    handle = getattr(here.transport, operation)(connected, [batch([0], [0], [100])])
    status = settle(here.transport, handle)
    assert status.state is State.FAILED
    assert "another process answers at its address" in status.detail
    assert here.transport.release(handle)
    # Nothing was written there: a write asks first.
    finish(here.transport, here.transport.read(here.transport.connect(new.record), [batch([0], [0], [SIZES[0]])]))
    assert np.array_equal(here.buffers[0], pattern(2, SIZES[0]))


def test_a_name_that_meant_another_process_gets_an_engine_of_its_own(side: Any, spawn: Any) -> None:
    """Mooncake remembers what a name once said, so a new process of that name would be read at the old one's places."""
    here, peer = side(), spawn()
    record = peer.start()
    peer.call("fill", region=0, seed=1)
    first = here.transport._engines[0]
    first.sessions[f"127.0.0.1:{fields_of(record)['port']}"] = b"another process "
    connected = here.transport.connect(record)
    assert len(here.transport._engines) == 2
    finish(here.transport, here.transport.read(connected, [batch([0], [0], [SIZES[0]])]))
    assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))
    assert here.transport._engines[0] is first
    here.transport.connect(record)
    assert len(here.transport._engines) == 2


def test_done_is_not_said_of_a_peer_that_lost_its_token(side: Any) -> None:
    here, there = side(), side()
    connected = here.transport.connect(there.transport.record())
    finish(here.transport, here.transport.read(connected, [batch([0], [0], [10])]))
    there.transport._slots._memory[0] ^= 1
    handle = here.transport.read(connected, [batch([0], [0], [10])])
    assert settle(here.transport, handle).state is State.FAILED
    give_back(here.transport, handle)


def test_a_stopped_peer_does_not_hold_connect_or_others_up(
    side: Any, spawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake itself would wait a minute for its answer, and let nothing else be posted meanwhile."""
    monkeypatch.setattr(mooncake, "_CONNECT_S", 0.2)
    here, stopped = side(), spawn()
    record = stopped.start()
    stopped.call("fill", region=0, seed=1)
    stopped.stop()
    with pytest.raises(PeerLost, match="does not answer"):
        here.transport.connect(record)
    monkeypatch.undo()
    stopped.resume()
    finish(here.transport, here.transport.read(here.transport.connect(record), [batch([0], [0], [SIZES[0]])]))
    assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))


def test_records_must_agree(side: Any) -> None:
    here = side()
    record = here.transport.record()
    version = fields_of(record)["version"]
    for wrong, text in (
        ({"version": "0.3.12"}, f"version of the peer is 0.3.12, here {version}"),
        ({"protocol": "rdma"}, "protocol of the peer is 'rdma', here 'tcp'"),
        ({"process": {"host": "elsewhere"}}, "loopback address, 127.0.0.1, and is on another host"),
        ({"host": "example.org"}, "host 'example.org' is no IPv4 address"),
        ({"host": "0.0.0.0"}, "host '0.0.0.0' is no IPv4 address of one machine"),
    ):
        assert not here.transport.reaches(changed(record, **wrong))
        with pytest.raises(TransportError, match=text):
            here.transport.connect(changed(record, **wrong))
    elsewhere = changed(record, host="192.0.2.7", process={"host": "elsewhere"}, version=f"{version}.dev1")
    assert here.transport.reaches(elsewhere)


# What may still land.


def test_a_peer_killed_half_way(side: Any, spawn: Any) -> None:
    """Nothing lands after `release` has said True, in a buffer that is watched for it."""
    here, peer = side((BIG,)), spawn()
    _, handle = half_way(here, peer)
    peer.kill()
    assert settle(here.transport, handle).state is State.FAILED
    give_back(here.transport, handle)
    assert here.transport.live_handles == 0
    here.reset()
    before = here.snapshot()
    for _ in range(100):
        here.transport.progress()
    assert here.snapshot() == before


def test_a_stopped_peer_is_not_quiet(side: Any, spawn: Any) -> None:
    """What the library has is waited for; what waits in kvferry's own queue never moves."""
    here, peer = side((BIG,)), spawn()
    connected = here.transport.connect(peer.start((BIG,)))
    peer.call("fill", region=0, seed=1)
    peer.stop()
    count = 2 * WINDOW
    starts = np.arange(count) * 1000
    handle = here.transport.read(connected, [batch(starts, starts, np.full(count, 1000))])
    for _ in range(100):
        assert not here.transport.release(handle)
        assert here.transport.poll(handle).state is State.PENDING
    peer.resume()
    give_back(here.transport, handle)
    moved = WINDOW * 1000
    assert np.array_equal(here.buffers[0][:moved], pattern(1, BIG)[:moved])
    assert (here.buffers[0][moved:] == 0xA5).all()


def test_a_failed_write_to_another_host_is_never_quiet(side: Any, spawn: Any) -> None:
    here, peer = side((BIG,)), spawn()
    connected, handle = half_way(here, peer, "write")
    process = connected.process
    connected.process = msgspec.structs.replace(process, host="elsewhere")
    peer.kill()
    assert settle(here.transport, handle).state is State.FAILED
    # Until the library has seen the end of each as well, it would be False anyway.
    for _ in waiting("the library does not notice"):
        assert not here.transport.release(handle)
        if not handle.job.in_flight:
            break
    assert not here.transport.release(handle)
    here.transport.close()
    assert not here.transport.release(handle)
    assert here.transport.poll(handle).state is State.FAILED
    connected.process = process
    assert here.transport.release(handle)


def test_close_with_a_write_under_way(side: Any, spawn: Any) -> None:
    """The peer may still take what was sent, until it is gone."""
    here, peer = side((BIG,)), spawn()
    _, handle = half_way(here, peer, "write")
    here.transport.close()
    assert here.transport.poll(handle) == Status(State.FAILED, f"{handle.peer.name}: the transport was closed")
    assert not here.transport.release(handle)
    peer.kill()
    assert here.transport.release(handle)
    assert here.transport.live_handles == 0


# The queue, with a library whose answers are in the test's hands.


class ScriptedEngine:
    """Stands in for an engine where descriptors must end in a given order. codes: what `check` says, by number."""

    def __init__(self) -> None:
        self.posted: list[int] = []
        self.codes: dict[int, int] = {}
        self.refuse_after = 1 << 30
        self.raise_after = 1 << 30

    def post(self, session: str, write: bool, local: int, remote: int, length: int) -> int:
        if len(self.posted) >= self.raise_after:
            raise RuntimeError("no memory")
        if len(self.posted) >= self.refuse_after:
            return 0
        self.posted.append(local)
        return len(self.posted)

    def check(self, batch_id: int) -> int:
        return self.codes.get(batch_id, PENDING)


def job_of(count: int, first: int = 0, *, write: bool = False, quiet_reads: bool = True) -> Job:
    numbers = np.arange(first, first + count, dtype=np.int64)
    return Job("peer", [Step(write, numbers, numbers, np.ones(count, dtype=np.int64))], quiet_reads=quiet_reads)


def test_only_so_many_are_with_the_library_and_in_order() -> None:
    engine = ScriptedEngine()
    queue, first, second = Queue(engine, "s", 4), job_of(6), job_of(3, 100)  # type: ignore[arg-type]
    queue.add(first)
    queue.add(second)
    assert engine.posted == [0, 1, 2, 3]
    engine.codes = {2: MOVED, 3: MOVED}
    queue.drive()
    assert engine.posted == [0, 1, 2, 3, 4, 5]
    engine.codes |= {1: MOVED, 4: MOVED, 5: MOVED, 6: MOVED}
    queue.drive()
    assert (first.done, second.done) == (True, False)
    assert engine.posted[6:] == [100, 101, 102]
    engine.codes |= {7: MOVED, 8: MOVED, 9: MOVED}
    queue.drive()
    assert second.done


def test_one_failure_among_others_under_way() -> None:
    """Failed at once, nothing more is posted, and ended only with the last that the library has."""
    engine = ScriptedEngine()
    queue, job = Queue(engine, "s", 4), job_of(6)  # type: ignore[arg-type]
    queue.add(job)
    engine.codes = {2: LOST}
    queue.drive()
    assert "a read of 1 bytes at 0x1 failed" in job.failure
    assert (job.ended, job.in_flight, len(engine.posted)) == (False, 3, 4)
    engine.codes |= {1: MOVED, 3: MOVED, 4: MOVED}
    queue.drive()
    assert (job.ended, job.done, job.late, len(engine.posted)) == (True, False, False, 4)


@pytest.mark.parametrize(("write", "quiet_reads"), [(True, True), (False, False)])
def test_what_is_not_known_to_be_quiet(write: bool, quiet_reads: bool) -> None:
    engine = ScriptedEngine()
    queue, job = Queue(engine, "s", 4), job_of(2, write=write, quiet_reads=quiet_reads)  # type: ignore[arg-type]
    queue.add(job)
    engine.codes = {1: LATE}
    queue.drive()
    queue.drive()
    assert "has not ended in time" in job.failure
    assert (job.in_flight, job.late) == (2, True)
    engine.codes = {1: MOVED, 2: MOVED}
    queue.drive()
    assert (job.ended, job.late) == (True, True)


def test_the_library_refuses_one_in_the_middle() -> None:
    engine = ScriptedEngine()
    engine.refuse_after = 2
    queue, job, other = Queue(engine, "s", 8), job_of(5), job_of(1, 100)  # type: ignore[arg-type]
    queue.add(job)
    assert "takes no transfer of 1 bytes at 0x2" in job.failure
    assert (job.in_flight, job.ended) == (2, False)
    engine.codes, engine.refuse_after = {1: MOVED, 2: MOVED}, 8
    queue.add(other)
    queue.drive()
    assert (job.ended, job.done, other.in_flight) == (True, False, 1)


def test_the_library_raises_in_the_middle() -> None:
    """That is no matter of whoever posts or polls at that moment: here the next transfer's."""
    engine = ScriptedEngine()
    engine.raise_after = 2
    queue, job, other = Queue(engine, "s", 3), job_of(3), job_of(1, 100)  # type: ignore[arg-type]
    queue.add(job)
    assert "Mooncake raised RuntimeError for 1 bytes at 0x2: no memory" in job.failure
    assert (job.in_flight, job.ended) == (2, False)
    engine.codes, engine.raise_after = {1: MOVED, 2: MOVED}, 8
    queue.add(other)
    queue.drive()
    assert (job.ended, job.done, other.in_flight) == (True, False, 1)
    # Whether the library has the third nobody can say.
    assert (job.late, job.lost) == (True, True)


class Raising:
    """Raises instead of one of the library's calls, which all others reach."""

    def __init__(self, library: Any, call: str) -> None:
        self._library, self._call = library, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            raise RuntimeError("not today")
        return getattr(self._library, name)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_post_for_which_the_library_raises(side: Any, spawn: Any, operation: str) -> None:
    """It is a failed transfer, which may yet move bytes; all that was taken for it is accounted for by its handle."""
    here, peer = side(max_inflight=2), spawn()
    connected = here.transport.connect(peer.start())
    engine = here.transport._engines[0]
    library = engine._engine
    engine._engine = Raising(library, "batch_transfer_async_read")
    handle = getattr(here.transport, operation)(connected, [batch([0], [0], [10])])
    status = here.transport.poll(handle)
    assert status.state is State.FAILED
    assert "Mooncake raised RuntimeError" in status.detail
    assert not here.transport.release(handle)
    engine._engine = library
    # The place for the peer's token may yet be read into, so nobody else gets it.
    assert here.transport._slots.free == 1
    finish(here.transport, here.transport.read(connected, [batch([0], [0], [10])]))
    peer.kill()
    # A write's target is gone now; where a read would land is here.
    assert here.transport.release(handle) is (operation == "write")
    here.transport.close()
    assert here.transport.release(handle)
    assert here.transport.live_handles == 0


def test_a_library_that_does_not_tell_how_one_stands(side: Any, spawn: Any) -> None:
    here, peer = side(), spawn()
    connected = here.transport.connect(peer.start())
    engine = here.transport._engines[0]
    library = engine._engine
    handle = here.transport.read(connected, [batch([0], [0], [10])])
    engine._engine = Raising(library, "transfer_check_status")
    assert here.transport.poll(handle).state is State.FAILED
    assert not here.transport.release(handle)
    engine._engine = library
    give_back(here.transport, handle)


def test_a_transfer_that_nobody_polls_does_not_hold_up_the_next(side: Any, spawn: Any) -> None:
    here, peer = side(), spawn()
    connected = here.transport.connect(peer.start())
    peer.call("fill", region=0, seed=1)
    starts = np.arange(2000) * 1000
    forgotten = here.transport.read(connected, [batch(starts, starts, np.full(2000, 1000))])
    finish(here.transport, here.transport.read(connected, [batch([0], [SIZES[0] - 9], [9], (1, 0))]))
    finish(here.transport, forgotten)
    assert np.array_equal(here.buffers[0][:2_000_000], pattern(1, SIZES[0])[:2_000_000])


def test_the_window_stays_below_the_librarys_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in ((None, 512), ("64", 64), ("65535", 512), ("0", 512), ("many", 512)):
        if value is None:
            monkeypatch.delenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", raising=False)
        else:
            monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", value)
        assert mooncake_queue.window() == expected


# What it needs, and what it refuses.


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1 libnuma1 libcurl4"),
        (
            "No module named 'mooncake'",
            "pip install 'mooncake-transfer-engine-non-cuda>=0.3.13,<0.3.14'; its system libraries: "
            "apt-get install libibverbs1 libnuma1 libcurl4",
        ),
    ],
)
def test_what_is_missing_is_named(error: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        raise ImportError(error)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(TransportUnavailable) as raised:
        mooncake.MooncakeTransport()
    assert str(raised.value) == f"mooncake: {error}. Install it: {remedy}"


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_library, "version", lambda: "0.3.12.post4")
    with pytest.raises(TransportUnavailable, match=r"version '0\.3\.12\.post4' is installed, 0\.3\.13 is the oldest"):
        make("mooncake")


def test_rdma_without_a_device_is_not_taken_for_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_library, "_RDMA_DEVICES", tmp_path)
    with pytest.raises(TransportUnavailable, match=r"protocol is 'rdma', but .* shows no device"):
        make("mooncake", {"protocol": "rdma"})


def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, text in (
        ({"protocol": "carrier-pigeon"}, "protocol 'carrier-pigeon' is none of tcp, rdma"),
        ({"max_inflight": 0}, "max_inflight is 0"),
        ({"max_inflight": 2**40}, "max_inflight is 1099511627776, it must be from 1 to 1048576"),
        ({"max_inflight": "5"}, "mooncake: option max_inflight: Expected `int`, got `str`: '5'"),
        ({"max_inflight": 1.5}, "mooncake: option max_inflight: Expected `int`, got `float`: 1.5"),
        ({"device": 5}, "mooncake: option device: Expected `str`, got `int`: 5"),
        ({"host": "0.0.0.0"}, "host '0.0.0.0' is 0.0.0.0, which peers can't dial"),
        ({"host": "255.255.255.255"}, "is 255.255.255.255, which peers can't dial"),
    ):
        with pytest.raises(TransportError, match=text):
            make("mooncake", options)
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(TransportError, match="MC_TCP_PROTO is '1', with which writes are not acknowledged"):
        make("mooncake")


def test_a_host_without_an_ipv4_address_leaves_the_next_transport() -> None:
    """As where the whole worker has an IPv6 address."""
    for host in ("::1", "a" * 64):
        with pytest.raises(TransportUnavailable, match=f"mooncake: host '{host}' has no IPv4 address"):
            make("mooncake", {"host": host})


def test_memory_that_it_does_not_take(side: Any) -> None:
    fresh = make("mooncake", TCP.options)
    memory = np.zeros(100, dtype=np.uint8).ctypes.data
    with pytest.raises(TransportError, match="region 0 is on 'cuda:1', and this wheel of Mooncake moves CPU memory"):
        fresh.register([Region(memory, 100, "cuda:1")])
    with pytest.raises(TransportError, match=r"region 1 at 0x[0-9a-f]+ of 50 bytes can't be registered: it overlaps"):
        fresh.register([Region(memory, 100), Region(memory + 50, 50)])
    fresh.close()


def test_a_peer_of_another_transport_is_refused(side: Any) -> None:
    with pytest.raises(BadTransfer, match="object is no peer of this transport"):
        side().transport.read(object(), [])


@pytest.mark.parametrize(("level", "says"), [(None, False), ("INFO", True)])
def test_the_library_is_quiet_unless_asked(level: str | None, says: bool) -> None:
    """And the environment is left as it was."""
    program = (
        "import os; before = dict(os.environ)\n"
        "from kvferry.transport.registry import make\n"
        "make('mooncake', {'host': '127.0.0.1'}).close()\n"
        "assert dict(os.environ) == before\n"
    )
    environment = {**os.environ, **TCP.environment(), **({"MC_LOG_LEVEL": level} if level else {})}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("Transfer Engine" in done.stderr) is says
    assert says or not done.stderr
    assert not done.stdout
