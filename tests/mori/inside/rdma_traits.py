"""What only MoRI-IO's RDMA has: queues that fill, queue pairs that die, engines that take over, what may still land."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from stand_ins import card_held, fail_request, queue_pairs, requests
from steps import OUTSIDE, TEN_BYTES, UNEQUAL, connect, landed, spread
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
    moved,
    open_files,
    pattern,
    scattered,
    settle,
    waiting,
)

from kvferry.transport import mori
from kvferry.transport.base import (
    BadTransfer,
    Batch,
    PeerLost,
    QueueFull,
    State,
    TransportError,
    TransportUnavailable,
)
from kvferry.transport.registry import make

KIT = Kit("mori-rdma", "mori", {"backend": "rdma"})
Spawn = Callable[[], PeerProcess]
MakeSide = Callable[..., Side]
WHOLE = batch([0], [0], [SIZES[0]])


def test_a_full_queue_is_back_pressure(side: MakeSide, spawn: Spawn) -> None:
    here = side(max_send_wr=64)
    connected = connect(here, spawn())
    with card_held():
        posted = [here.transport.read(connected, [spread(32)]) for _ in range(2)]
        before = requests()
        for _ in range(3):
            with pytest.raises(QueueFull, match=r"64 of 64 \(max_send_wr\) are queued"):
                here.transport.read(connected, [spread(1)])
        assert requests() == before
        assert here.transport.live_handles == 2
        assert {here.transport.poll(handle).state for handle in posted} == {State.PENDING}
    for handle in posted:
        finish(here.transport, handle)
    finish(here.transport, here.transport.read(connected, [spread(33)]))
    assert all(landed(here.buffers[0], pattern(1, SIZES[0]), 33))


@pytest.mark.parametrize("options", [{}, {"qp_per_transfer": 3}, {"post_batch_size": 7}, {"num_workers": 2}], ids=str)
def test_a_transfer_longer_than_the_queue(side: MakeSide, spawn: Spawn, options: dict[str, int]) -> None:
    """It goes out piece by piece, and the library never meets a full queue, which would end the transfer."""
    here = side(max_send_wr=64, **options)
    connected = connect(here, spawn())
    one = scattered(5000, SIZES[0], 1)
    expected = moved(here.buffers[0], pattern(1, SIZES[0]), *one[2:])
    handles = [here.transport.read(connected, [one])]
    finish(here.transport, handles[0])
    assert np.array_equal(here.buffers[0], expected)


def test_what_waits_for_room_is_dropped_by_release(side: MakeSide, spawn: Spawn) -> None:
    here = side(max_send_wr=64)
    connected = connect(here, spawn())
    with card_held():
        handle = here.transport.read(connected, [spread(400)])
        before = requests()
        assert [here.transport.release(handle) for _ in range(3)] == [False] * 3
    give_back(here.transport, handle)
    assert requests() == before
    assert landed(here.buffers[0], pattern(1, SIZES[0]), 400) == [True] * 64 + [False] * 336


def test_a_card_that_takes_less_than_told(side: MakeSide, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first transfer fails with the library's advice, part of it started; the next ones keep to the limit."""
    monkeypatch.setenv("STAND_IN_VERBS_MAX_WR", "40")
    here, peer = side(), spawn()
    connected = connect(here, peer)
    with card_held():
        handle = here.transport.read(connected, [spread(400)])
        status = here.transport.poll(handle)
        assert status.state is State.FAILED
        assert "SQ full" in status.detail
        assert not here.transport.release(handle)
    with pytest.raises(PeerLost, match="connect again"):
        here.transport.read(connected, [spread(1)])
    again = here.transport.connect(peer.record)
    finish(here.transport, here.transport.read(again, [spread(400)]))
    # Of the first nobody can say when it ends, before its engine does.
    assert not here.transport.release(handle)
    here.transport.close()
    assert here.transport.release(handle)
    assert here.transport.live_handles == 0


def test_what_waits_while_another_card_turns_out_to_take_less(
    side: MakeSide, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit that one transfer has met holds for all, also for what was cut for a longer queue and waits."""
    here, first, second = side(), spawn(), spawn()
    one, other = connect(here, first), connect(here, second)
    fail_request(1)
    give_back(here.transport, failed(here, other, spread(1)))
    monkeypatch.setenv("STAND_IN_VERBS_MAX_WR", "40")
    other = here.transport.connect(second.record)
    long = scattered(5000, SIZES[0], 1)
    expected = moved(here.buffers[0], pattern(1, SIZES[0]), *long[2:])
    with card_held():
        handle = here.transport.read(one, [long, long])
        assert here.transport.poll(handle).state is State.PENDING
        starts = np.arange(100) * 20
        failed(here, other, batch(starts, starts, np.full(100, TEN_BYTES), (1, 0)))
    finish(here.transport, handle)
    assert np.array_equal(here.buffers[0], expected)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_wrong_lists_never_reach_the_library(side: MakeSide, spawn: Spawn, operation: str) -> None:
    here = side()
    connected = connect(here, spawn())
    before = requests()
    for bad in UNEQUAL + OUTSIDE:
        with pytest.raises(BadTransfer):
            getattr(here.transport, operation)(connected, [spread(1), bad])
    assert requests() == before


def test_a_dead_queue_pair_is_nobody_elses(side: MakeSide, spawn: Spawn) -> None:
    here, first, second = side(), spawn(), spawn()
    one, other = connect(here, first), connect(here, second, seed=2)
    fail_request(1)
    handle = here.transport.read(one, [WHOLE])
    assert settle(here.transport, handle).state is State.FAILED
    give_back(here.transport, handle)
    with pytest.raises(PeerLost, match="connect again"):
        here.transport.read(one, [WHOLE])
    for _ in range(2):
        finish(here.transport, here.transport.read(other, [WHOLE]))
    assert np.array_equal(here.buffers[0], pattern(2, SIZES[0]))


def test_a_fresh_engine_takes_over_for_the_same_record(side: MakeSide, spawn: Spawn) -> None:
    here, peer = side(), spawn()
    dead = connect(here, peer)
    for engines in (2, 3):
        fail_request(1)
        handle = here.transport.read(dead, [WHOLE])
        assert settle(here.transport, handle).state is State.FAILED
        give_back(here.transport, handle)
        alive = here.transport.connect(peer.record)
        assert here.transport.live_engines == engines
        finish(here.transport, here.transport.read(alive, [WHOLE]))
        assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))
        previous, dead = dead, alive
        with pytest.raises(PeerLost):
            here.transport.read(previous, [WHOLE])
    here.transport.disconnect(previous)
    here.transport.disconnect(alive)
    # The home stays, which holds no session but the first peer's.
    assert here.transport.live_engines == 1


def test_a_restarted_peer_needs_no_new_engine(side: MakeSide, spawn: Spawn) -> None:
    here, old, new = side(), spawn(), spawn()
    before = connect(here, old)
    with card_held():
        handle = here.transport.read(before, [WHOLE])
        old.kill()
    assert settle(here.transport, handle).state is State.FAILED
    give_back(here.transport, handle)
    after = connect(here, new, seed=2)
    finish(here.transport, here.transport.read(after, [WHOLE]))
    assert np.array_equal(here.buffers[0], pattern(2, SIZES[0]))
    assert here.transport.live_engines == 1


def test_a_failed_read_has_landed_up_to_the_failure(side: MakeSide, spawn: Spawn) -> None:
    """With one queue pair it is quiet at once: what was behind the failure is flushed."""
    here = side()
    connected = connect(here, spawn())
    fail_request(5)
    handle = here.transport.read(connected, [spread(20)])
    status = settle(here.transport, handle)
    assert status.state is State.FAILED
    assert "ERR_RDMA_OP" in status.detail
    assert here.transport.release(handle)
    assert landed(here.buffers[0], pattern(1, SIZES[0]), 20) == [True] * 4 + [False] * 16


def test_with_several_queue_pairs_a_failed_read_is_quiet_when_its_engine_ends(side: MakeSide, spawn: Spawn) -> None:
    here = side(qp_per_transfer=4)
    connected = connect(here, spawn())
    fail_request(5)
    handle = here.transport.read(connected, [spread(20)])
    assert settle(here.transport, handle).state is State.FAILED
    assert [here.transport.release(handle) for _ in range(3)] == [False] * 3
    here.transport.close()
    assert here.transport.release(handle)


def test_a_failed_write_is_quiet_when_the_peer_is_gone(side: MakeSide, spawn: Spawn) -> None:
    here, peer = side(), spawn()
    connected = connect(here, peer)
    fail_request(5)
    handle = here.transport.write(connected, [spread(20)])
    assert settle(here.transport, handle).state is State.FAILED
    assert [here.transport.release(handle) for _ in range(3)] == [False] * 3
    expected = moved(pattern(1, SIZES[0]), here.buffers[0], *(array[:4] for array in spread(20)[2:]))
    assert peer.digest(0) == digest(expected)
    peer.kill()
    assert here.transport.release(handle)
    assert here.transport.live_handles == 0


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_peer_killed_with_a_transfer_under_way(side: MakeSide, spawn: Spawn, operation: str) -> None:
    here, peer = side(), spawn()
    connected = connect(here, peer)
    with card_held():
        handle = getattr(here.transport, operation)(connected, [WHOLE])
        peer.kill()
        status = here.transport.poll(handle)
        assert status.state is State.FAILED
        assert f"its process {peer.pid} is gone" in status.detail
        assert not here.transport.release(handle)
    give_back(here.transport, handle)
    assert (here.buffers[0] == 0xA5).all()
    assert here.transport.live_handles == 0


def test_close_ends_what_is_under_way(side: MakeSide, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori, "CLOSE_S", 0.02)
    here, peer = side(), spawn()
    connected = connect(here, peer)
    with card_held():
        reading = here.transport.read(connected, [WHOLE])
        writing = here.transport.write(connected, [WHOLE])
        here.transport.close()
        assert here.transport.release(reading)
        assert not here.transport.release(writing)
    assert (here.buffers[0] == 0xA5).all()
    peer.kill()
    assert here.transport.release(writing)


def test_a_memory_that_is_gone_on_the_other_side(side: MakeSide, spawn: Spawn) -> None:
    """A peer that closes its transport takes its registrations and queue pairs with it."""
    here, peer = side(), spawn()
    connected = connect(here, peer)
    finish(here.transport, here.transport.read(connected, [WHOLE]))
    peer.call("close")
    handle = here.transport.read(connected, [WHOLE])
    assert settle(here.transport, handle).state is State.FAILED
    give_back(here.transport, handle)
    here.transport.disconnect(connected)
    with pytest.raises(PeerLost, match="does not answer"):
        here.transport.connect(peer.record)


def test_all_is_given_back(side: MakeSide, spawn: Spawn) -> None:
    records = [spawn().start() for _ in range(2)]
    side().transport.close()  # the first takes what the card keeps
    threads, files, pairs = count_threads(), open_files(), queue_pairs()
    here = side()
    for _ in range(3):
        connected = [here.transport.connect(record) for record in records]
        # For two regions on either side: all with the first, and the first with all.
        assert here.transport.live_sessions == 6
        for one in connected:
            finish(here.transport, here.transport.read(one, [batch([0], [0], [10], (1, 1)), spread(20)]))
        assert here.transport.live_sessions == 8
        for one in connected:
            here.transport.disconnect(one)
        assert here.transport.live_sessions == 0
    assert here.transport.live_handles == 0
    here.transport.close()
    assert queue_pairs() == pairs
    assert open_files() == files
    for _ in waiting("threads stay"):
        if count_threads() <= threads:
            break


def test_a_process_that_never_closes_ends_well() -> None:
    """A session that outlives its engine would crash it."""
    program = (
        "import numpy as np\n"
        "from kvferry.layout import Region\n"
        "from kvferry.transport.registry import make\n"
        "sides = [make('mori'), make('mori')]\n"
        "memory = [np.zeros(4096, np.uint8) for _ in sides]\n"
        "for one, m in zip(sides, memory): one.register([Region(m.ctypes.data, m.nbytes)])\n"
        "peer = sides[0].connect(sides[1].record())\n"
        "print('connected')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "connected\n"), done.stderr


def test_records_must_agree(side: MakeSide) -> None:
    here, there = side(), side()
    record = there.transport.record()
    elsewhere: dict[str, Any] = {"process": {"host": "5f0c/pid:[1]"}}
    for wrong, text in (
        ({"backend": "xgmi"}, "backend of the peer is 'xgmi', here 'rdma'"),
        ({"version": "1.0.0"}, r"version of the peer is 1\.0\.0, here 1\.2\.4"),
        ({"version": "1.3.0"}, r"version of the peer is 1\.3\.0"),
        (elsewhere, "on another host advertises the loopback address 127.0.0.1; set its option host"),
        ({"engine_desc": b"\x90"}, "digest"),
    ):
        assert not here.transport.reaches(changed(record, **wrong))
        with pytest.raises(TransportError, match=text):
            here.transport.connect(changed(record, **wrong))
    for fine in ({"version": "1.2.9"}, {**elsewhere, "address": "10.1.2.3"}):
        assert here.transport.reaches(changed(record, **fine))


def test_regions_must_be_those_that_the_library_describes(side: MakeSide) -> None:
    here, there = side(), side()
    record = there.transport.record()
    regions = here.transport.connect(record).regions
    longer = [{"address": r.address, "length_bytes": 2 * r.length_bytes, "device": r.device} for r in regions]
    with pytest.raises(BadTransfer, match="not those that MoRI describes"):
        side().transport.connect(changed(record, regions=longer))


def failed(here: Side, connected: Any, what: Batch) -> Any:
    """A read that has failed."""
    handle = here.transport.read(connected, [what])
    assert settle(here.transport, handle).state is State.FAILED
    return handle


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("192.0.2.7", r"mori: host 192\.0\.2\.7 is no address of this machine: Cannot assign requested address"),
        ("::1", "mori: host '::1' has no IPv4 address"),
        ("", "mori: host '' has no IPv4 address"),
        ("a" * 64, "has no IPv4 address"),
    ],
)
def test_a_host_that_this_machine_does_not_have(host: str, text: str) -> None:
    """The library would end the process, or take it and be reached by nobody."""
    with pytest.raises(TransportUnavailable, match=text):
        make("mori", {"host": host})


@pytest.mark.parametrize("host", ["0.0.0.0", "224.0.0.1", "255.255.255.255"])
def test_a_host_that_no_peer_can_dial(host: str) -> None:
    with pytest.raises(TransportError, match=f"mori: host '{host}' is {host}, which peers can't dial"):
        make("mori", {"host": host})


def test_a_host_by_name(side: MakeSide) -> None:
    """The library takes numbers only, so peers are told the number."""
    here, there = side(), side(host="localhost")
    record = there.transport.record()
    assert msgspec.msgpack.decode(record)["address"] == "127.0.0.1"
    finish(here.transport, here.transport.read(here.transport.connect(record), [WHOLE]))


def test_an_address_that_is_lost_does_not_end_the_process(side: MakeSide, spawn: Spawn) -> None:
    """A fresh engine would listen on it."""
    here, peer = side(), spawn()
    dead = connect(here, peer)
    fail_request(1)
    give_back(here.transport, failed(here, dead, WHOLE))
    here.transport._settings.host = "192.0.2.7"
    with pytest.raises(TransportUnavailable, match="is no address of this machine"):
        here.transport.connect(peer.record)
    assert here.transport.live_engines == 1
    here.transport._settings.host = "127.0.0.1"
    finish(here.transport, here.transport.read(here.transport.connect(peer.record), [WHOLE]))


def count_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
