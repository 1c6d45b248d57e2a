"""What only the NIXL transport has: records that must agree, and being honest about what may still land."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transport_harness import (
    Kit,
    PeerProcess,
    Side,
    batch,
    changed,
    finish,
    give_back,
    open_files,
    pattern,
    settle,
    waiting,
)

from kvferry.layout import Region
from kvferry.transport import nixl, nixl_remotes
from kvferry.transport.base import PeerLost, State, TransportError, TransportUnavailable
from kvferry.transport.nixl_data import by_memory, decode
from kvferry.transport.registry import make

TCP = Kit("nixl-tcp", "nixl", {"backend_params": {"engine_config": "TLS=tcp"}})
BIG = 64 << 20


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
def big() -> Iterator[Side]:
    side = Side(TCP, (BIG,))
    yield side
    side.transport.close()


def half_way(here: Side, peer: PeerProcess) -> tuple[Any, Any]:
    """A read that is stopped with some of its bytes here and some not: (connected peer, handle)."""
    connected = here.transport.connect(peer.start((BIG,)))
    peer.call("fill", region=0, seed=1)
    peer.call("progress", on=True)
    finish(here.transport, here.transport.read(connected, [batch([0], [0], [1])]))
    want = pattern(1, BIG)
    starts = np.arange(0, BIG, 1 << 20)
    for _ in waiting("all of it always arrives at once"):  # as it may on a busy machine
        here.reset()
        handle = here.transport.read(connected, [batch(starts, starts, np.full(len(starts), 1 << 20))])
        for _ in waiting("nothing arrives"):
            if here.transport.poll(handle).state is not State.PENDING or here.buffers[0][1] == want[1]:
                break
        peer.stop()
        if not np.array_equal(here.buffers[0], want):
            break
        peer.resume()
        finish(here.transport, handle)
    return connected, handle


def test_a_peer_killed_half_way(big: Side, spawn: Any) -> None:
    """Nothing lands after `release` has said True, in a buffer that is watched for it."""
    peer = spawn()
    connected, handle = half_way(big, peer)
    peer.kill()
    assert settle(big.transport, handle).state is State.FAILED
    give_back(big.transport, handle)
    assert big.transport.live_handles == 0
    big.reset()
    before = big.snapshot()
    for _ in range(300):
        big.transport.progress()
    assert big.snapshot() == before
    with pytest.raises(PeerLost):
        big.transport.read(connected, [batch([0], [0], [1])])


def test_a_stopped_peer_is_not_quiet_and_goes_on(big: Side, spawn: Any) -> None:
    peer = spawn()
    _, handle = half_way(big, peer)
    for _ in range(100):
        assert not big.transport.release(handle)
    peer.resume()
    give_back(big.transport, handle)
    assert np.array_equal(big.buffers[0], pattern(1, BIG))


def test_with_an_rdma_device_a_failed_read_is_not_quiet(
    big: Side, spawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(nixl, "_RDMA_DEVICES", tmp_path)
    peer = spawn()
    _, handle = half_way(big, peer)
    peer.kill()
    assert settle(big.transport, handle).state is State.FAILED
    # Until the library has noticed as well, it would be False anyway.
    for _ in waiting("the library does not notice"):
        assert not big.transport.release(handle)
        if not handle.pending:
            break
    for _ in range(20):
        assert not big.transport.release(handle)
    big.transport.close()
    assert big.transport.release(handle)


def test_a_failed_write_to_another_host_is_never_quiet(big: Side, spawn: Any) -> None:
    peer = spawn()
    peer.start((BIG,))
    connected = big.transport.connect(changed(peer.record, process={"host": "elsewhere"}))
    handle = big.transport.write(connected, [batch([0], [0], [BIG])])
    assert big.transport.poll(handle).state is State.PENDING
    peer.kill()
    assert settle(big.transport, handle).state is State.FAILED
    assert not big.transport.release(handle)
    big.transport.close()
    assert not big.transport.release(handle)
    assert big.transport.poll(handle).state is State.FAILED


def test_a_lost_peer_is_connected_again_after_disconnect(big: Side, spawn: Any) -> None:
    peer = spawn()
    peer.start((BIG,))
    peer.call("progress", on=True)
    connected = big.transport.connect(peer.record)
    finish(big.transport, big.transport.read(connected, [batch([0], [0], [1])]))
    connected.remote.lost = True
    with pytest.raises(PeerLost, match="connect again"):
        big.transport.read(connected, [batch([0], [0], [1])])
    # While NIXL is at work on what names it, it can't be known anew.
    connected.remote.pending += 1
    with pytest.raises(PeerLost, match="reported it disconnected, with 1 transfers to end"):
        big.transport.connect(peer.record)
    connected.remote.pending -= 1
    again = big.transport.connect(peer.record)
    finish(big.transport, big.transport.read(again, [batch([0], [0], [1])]))
    big.transport.disconnect(connected)
    with pytest.raises(PeerLost, match="disconnected"):
        big.transport.read(connected, [batch([0], [0], [1])])
    finish(big.transport, big.transport.read(again, [batch([0], [0], [1])]))


def test_connecting_again_and_again_leaves_no_files_open(big: Side, spawn: Any) -> None:
    """On either side: to make a worker known to NIXL and to forget it leaves sockets behind."""
    peer = spawn()
    peer.start((BIG,))
    peer.call("progress", on=True)

    def used() -> tuple[int, int]:
        connected = big.transport.connect(peer.record)
        finish(big.transport, big.transport.read(connected, [batch([0], [0], [1])]))
        big.transport.disconnect(connected)
        return open_files(), len(os.listdir(f"/proc/{peer.pid}/fd"))

    before = used()
    for _ in range(10):
        assert used() == before


class KnownWorkers:
    """Stands in for NIXL's agent, for which workers it knows."""

    def __init__(self) -> None:
        self.known: list[bytes] = []

    def add_remote_agent(self, metadata: bytes) -> None:
        self.known.append(metadata)

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name.encode())


def test_idle_workers_are_forgotten_when_they_are_gone_or_too_many(big: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_remotes, "MAX_IDLE", 2)
    own, remotes = KnownWorkers(), nixl_remotes.Remotes()
    record = decode(big.transport.record())

    def open_one(name: str, **process: int) -> nixl_remotes.Remote:
        of = msgspec.structs.replace(record.process, **process)
        remote = remotes.open(own, msgspec.structs.replace(record, agent=name, metadata=name.encode(), process=of))
        remote.peers += 1
        return remote

    def close_one(remote: nixl_remotes.Remote) -> None:
        remote.peers -= 1
        remotes.leave(own, remote)

    first, second, gone = open_one("first"), open_one("second"), open_one("gone", start_time=1)
    for remote in (first, second, gone):
        close_one(remote)
    assert own.known == [b"first", b"second"]
    first = open_one("first")
    close_one(first)
    third = open_one("third")
    assert own.known == [b"first", b"third"]
    close_one(third)
    first.lost = True
    assert open_one("first") is not first
    assert own.known == [b"third", b"first"]
    remotes.clear(own)
    assert own.known == []


class ScriptedAgent:
    """Stands in for NIXL's agent where two requests of one transfer must end in a given order."""

    def __init__(self, states: dict[str, list[str]]) -> None:
        self.states = states
        self.removed: list[str] = []

    def check_xfer_state(self, request: Any) -> str:
        state = self.states[request.name].pop(0)
        if state == "raise":
            raise RuntimeError("link down")
        return state

    def remove_remote_agent(self, name: str) -> None:
        self.removed.append(name)

    def get_new_notifs(self) -> None: ...


class ScriptedRequest:
    def __init__(self, name: str) -> None:
        self.name = name
        self.released = 0

    def release(self) -> None:
        self.released += 1


@pytest.mark.parametrize("how", ["raise", "ERR"])
def test_one_request_fails_while_its_sibling_goes_on(big: Side, spawn: Any, how: str) -> None:
    """FAILED at once, with the reason; not quiet before the sibling's end; each request given back once."""
    peer = spawn()
    connected = big.transport.connect(peer.start((BIG,)))
    handle = big.transport.read(connected, [])
    first, second = ScriptedRequest("first"), ScriptedRequest("second")
    real, big.transport._agent = (
        big.transport._agent,
        ScriptedAgent({"first": [how], "second": ["PROC"] * 4 + ["DONE"]}),
    )
    try:
        handle.pending = [first, second]
        connected.remote.pending += 1
        status = big.transport.poll(handle)
        assert status.state is State.FAILED
        assert ("link down" if how == "raise" else "NIXL says ERR") in status.detail
        assert (first.released, second.released) == (1, 0)
        assert [big.transport.release(handle) for _ in range(3)] == [False] * 3
        assert big.transport.poll(handle).state is State.FAILED
        # The sibling is done; of the failed one it is not known what still moves while its peer lives.
        assert not big.transport.release(handle)
        assert second.released == 1
        peer.kill()
        assert big.transport.release(handle)
        assert (first.released, second.released) == (1, 1)
    finally:
        big.transport._agent = real


def test_records_must_agree(big: Side) -> None:
    record = big.transport.record()
    version = msgspec.msgpack.decode(record)["version"]
    for wrong, text in (
        ({"backend": "LIBFABRIC"}, "'LIBFABRIC', here 'UCX'"),
        ({"version": "0.9.1"}, f"0.9.1, here {version}"),
    ):
        assert not big.transport.reaches(changed(record, **wrong))
        with pytest.raises(TransportError, match=text):
            big.transport.connect(changed(record, **wrong))
    assert big.transport.reaches(changed(record, version=".".join([*version.split(".")[:2], "999"])))
    with pytest.raises(TransportError, match="digest"):
        big.transport.connect(changed(record, metadata=b"nixlSerDes|"))


def test_names_are_of_one_incarnation() -> None:
    first, second = make("nixl"), make("nixl")
    names = {transport._agent_name for transport in (first, second)}
    assert len(names) == 2
    first.close()
    second.close()


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(TransportUnavailable, match=r"no backend 'CARRIER_PIGEON'; this wheel has .*UCX"):
        make("nixl", {"backend": "CARRIER_PIGEON"})


def test_descriptors_by_kind_of_memory() -> None:
    local = [Region(1000, 100), Region(5000, 100, "cuda:1")]
    remote = [Region(2000, 100, "cuda"), Region(3000, 100, "cpu")]
    batches = [
        batch([1, 2], [3, 4], [5, 6], (0, 1)),
        batch([7], [8], [9], (1, 0)),
        batch([10], [20], [30], (0, 1)),
    ]
    rows = by_memory(batches, local, remote)
    assert {kinds: [side.tolist() for side in sides] for kinds, sides in rows.items()} == {
        ("DRAM", "DRAM"): [
            [[1001, 5, 0], [1002, 6, 0], [1010, 30, 0]],
            [[3003, 5, 0], [3004, 6, 0], [3020, 30, 0]],
        ],
        ("VRAM", "VRAM"): [[[5007, 9, 1]], [[2008, 9, 0]]],
    }
