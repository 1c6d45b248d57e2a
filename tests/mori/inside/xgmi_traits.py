"""What only MoRI-IO's XGMI has: GPU memory, completion by polling, and copies that nothing tells the end of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from stand_ins import copies, fail_copy, gpu_held, imported
from steps import OUTSIDE, UNEQUAL, connect, landed, spread
from transport_harness import (
    SIZES,
    Kit,
    PeerProcess,
    Side,
    allocate,
    batch,
    changed,
    digest,
    finish,
    give_back,
    moved,
    pattern,
)

from kvferry.layout import Region
from kvferry.transport import mori
from kvferry.transport.base import BadTransfer, State, TransportError
from kvferry.transport.registry import make

KIT = Kit("mori-xgmi", "mori", {"backend": "xgmi"}, memory="device")
Spawn = Callable[[], PeerProcess]
MakeSide = Callable[..., Side]
WHOLE = batch([0], [0], [SIZES[0]])


def test_a_transfer_ends_when_it_is_polled(side: MakeSide, spawn: Spawn) -> None:
    here = side()
    connected = connect(here, spawn())
    with gpu_held():
        handle = here.transport.read(connected, [WHOLE])
        assert {here.transport.poll(handle).state for _ in range(20)} == {State.PENDING}
        assert not here.transport.release(handle)
    finish(here.transport, handle)
    assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))


def test_no_host_is_asked_for() -> None:
    """It listens nowhere; the worker's address may be one that RDMA would refuse."""
    for host in ("192.0.2.7", "::1"):
        make("mori", {"backend": "xgmi", "host": host}).close()


def test_a_copy_that_fails_in_mid_batch(side: MakeSide, spawn: Spawn) -> None:
    """What was started before it may land after the failure is reported, so the read is never quiet."""
    here = side()
    connected = connect(here, spawn())
    with gpu_held():
        fail_copy(5)
        handle = here.transport.read(connected, [spread(20)])
        status = here.transport.poll(handle)
        assert status.state is State.FAILED
        assert "ERR_GPU_OP" in status.detail
        assert not any(landed(here.buffers[0], pattern(1, SIZES[0]), 20))
        assert not here.transport.release(handle)
    # Any that shares the stream carries the earlier copies out; each stream is used in turn.
    for _ in range(64):
        finish(here.transport, here.transport.read(connected, [batch([SIZES[0] - 1], [0], [1])]))
    assert landed(here.buffers[0], pattern(1, SIZES[0]), 20) == [True] * 4 + [False] * 16
    assert not here.transport.release(handle)
    here.transport.close()
    assert not here.transport.release(handle)
    assert here.transport.poll(handle).state is State.FAILED
    assert here.transport.live_handles == 1


def test_a_failed_copy_leaves_the_link_as_it_was(side: MakeSide, spawn: Spawn) -> None:
    here = side()
    connected = connect(here, spawn())
    fail_copy(1)
    assert here.transport.poll(here.transport.read(connected, [WHOLE])).state is State.FAILED
    finish(here.transport, here.transport.read(connected, [WHOLE]))
    assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))
    assert here.transport.live_engines == 1


def test_a_failed_write_is_quiet_when_the_peer_is_gone(side: MakeSide, spawn: Spawn) -> None:
    here, peer = side(), spawn()
    connected = connect(here, peer)
    fail_copy(5)
    handle = here.transport.write(connected, [spread(20)])
    assert here.transport.poll(handle).state is State.FAILED
    assert [here.transport.release(handle) for _ in range(3)] == [False] * 3
    expected = moved(pattern(1, SIZES[0]), here.buffers[0], *(array[:4] for array in spread(20)[2:]))
    assert peer.digest(0) == digest(expected)
    peer.kill()
    assert here.transport.release(handle)


def test_a_peer_killed_with_a_transfer_under_way(side: MakeSide, spawn: Spawn) -> None:
    """The copies go on, from memory that this process has mapped: FAILED at once, quiet at their end."""
    here, peer = side(), spawn()
    connected = connect(here, peer)
    with gpu_held():
        handle = here.transport.read(connected, [WHOLE])
        peer.kill()
        status = here.transport.poll(handle)
        assert status.state is State.FAILED
        assert f"its process {peer.pid} is gone" in status.detail
        assert not here.transport.release(handle)
    give_back(here.transport, handle)
    assert here.transport.live_handles == 0


def test_close_says_what_it_could_not_end(side: MakeSide, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori, "CLOSE_S", 0.02)
    here = side()
    connected = connect(here, spawn())
    with gpu_held():
        handle = here.transport.read(connected, [WHOLE])
        here.transport.close()
        assert not here.transport.release(handle)
        assert here.transport.poll(handle).state is State.FAILED


@pytest.mark.parametrize("operation", ["read", "write"])
def test_wrong_lists_never_reach_the_library(side: MakeSide, spawn: Spawn, operation: str) -> None:
    """Unequal ones would end the process there, and offsets are not checked."""
    here = side()
    connected = connect(here, spawn())
    before = copies()
    for bad in UNEQUAL + OUTSIDE:
        with pytest.raises(BadTransfer):
            getattr(here.transport, operation)(connected, [spread(1), bad])
    assert copies() == before


def test_peers_have_memory_of_their_own(side: MakeSide, spawn: Spawn) -> None:
    """The library numbers memory from nought in each process."""
    here, first, second = side(), spawn(), spawn()
    one, other = connect(here, first), connect(here, second, seed=2)
    for connected, seed in ((one, 1), (other, 2), (one, 1)):
        finish(here.transport, here.transport.read(connected, [WHOLE]))
        assert np.array_equal(here.buffers[0], pattern(seed, SIZES[0]))


def test_regions_inside_one_allocation() -> None:
    memory = [allocate("device", 4 * 4096) for _ in range(2)]
    sides = [make("mori", {"backend": "xgmi"}) for _ in memory]
    for one, m in zip(sides, memory, strict=True):
        one.register([Region(m.ctypes.data + 4096 * (1 + i), 4096, "cuda:0") for i in range(2)])
    memory[1][:] = pattern(3, 4 * 4096)
    handle = sides[0].read(sides[0].connect(sides[1].record()), [batch([5], [7], [100], (1, 0))])
    finish(sides[0], handle)
    assert np.array_equal(memory[0][8192 + 5 : 8192 + 105], memory[1][4096 + 7 : 4096 + 107])
    assert np.count_nonzero(memory[0]) <= 100
    for one in sides:
        one.close()


def test_memory_of_the_wrong_kind_is_refused_by_name(side: MakeSide) -> None:
    buffer = np.zeros(4096, dtype=np.uint8)
    fresh = make("mori", {"backend": "xgmi"})
    with pytest.raises(TransportError, match="region 0 is on 'cpu': backend 'xgmi' moves GPU memory only"):
        fresh.register([Region(buffer.ctypes.data, 4096)])
    fresh.close()
    fresh, good = make("mori", {"backend": "xgmi"}), allocate("device", 4096)
    unknown = Region(buffer.ctypes.data, 4096, "cuda:0")
    with pytest.raises(TransportError, match="region 1 on 'cuda:0' can't be registered: HIP gives no handle"):
        fresh.register([Region(good.ctypes.data, 4096, "cuda:0"), unknown])
    fresh.register([Region(good.ctypes.data, 4096, "cuda:0")])
    here, there = side(), side()
    there.buffers[0][:] = pattern(4, SIZES[0])
    finish(fresh, fresh.read(fresh.connect(there.transport.record()), [batch([0], [0], [4096])]))
    assert np.array_equal(good, pattern(4, SIZES[0])[:4096])
    fresh.close()
    record = there.transport.record()
    on_cpu = [{"address": 4096, "length_bytes": 4096, "device": "cpu"}] * 2
    for wrong, text in (
        ({"regions": on_cpu}, "the peer's region 0 is on 'cpu'"),
        ({"node": "elsewhere"}, "stays within a host: the peer is on elsewhere"),
        ({"backend": "rdma"}, "backend of the peer is 'rdma', here 'xgmi'"),
    ):
        assert not here.transport.reaches(changed(record, **wrong))
        with pytest.raises(TransportError, match=text):
            here.transport.connect(changed(record, **wrong))


def test_all_is_given_back(side: MakeSide, spawn: Spawn) -> None:
    before = imported()
    here, peers = side(), [spawn() for _ in range(2)]
    records = [peer.start() for peer in peers]
    for _ in range(3):
        connected = [here.transport.connect(record) for record in records]
        for one in connected:
            finish(here.transport, here.transport.read(one, [WHOLE]))
            here.transport.disconnect(one)
        assert here.transport.live_sessions == 0
        # The library keeps a mapping for each region of a peer until its engine ends.
        assert imported() == before + 4
    here.transport.close()
    assert imported() == before
