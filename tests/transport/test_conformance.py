"""What every transport must do, on its real library, with the other side in a process of its own.

A column of the table (`KITS` in conftest.py) is all that a further transport needs.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from transport_harness import (
    SIZES,
    Kit,
    PeerProcess,
    Side,
    batch,
    digest,
    finish,
    give_back,
    int64,
    merged,
    moved,
    open_files,
    outcome,
    pattern,
    resident_bytes,
    scattered,
    settle,
)

from kvferry.layout import Region
from kvferry.transport import registry
from kvferry.transport.base import BadTransfer, Batch, PeerLost, QueueFull, State, TransportError

Spawn = Callable[[], PeerProcess]
MakeSide = Callable[..., Side]
COUNTS = (1, 7, 1000, 10_000)


def whole(regions: tuple[int, int] = (0, 0)) -> Batch:
    return batch([0], [0], [SIZES[regions[0]]], regions)


def connect(here: Side, peer: PeerProcess, *, seed: int = 1, progress: bool = True) -> Any:
    """Starts the peer on a known pattern and connects to it."""
    record = peer.start()
    peer.call("fill", region=0, seed=seed)
    peer.call("progress", on=progress)
    return here.transport.connect(record)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", [scattered, merged])
def test_read(pair: Any, shape: Any, count: int) -> None:
    here, peer, connected = pair
    here.reset()
    peer.call("fill", region=0, seed=count)
    one = shape(count, SIZES[0], count)
    expected = moved(here.buffers[0], pattern(count, SIZES[0]), one.local_offsets, one.remote_offsets, one.lengths)
    finish(here.transport, here.transport.read(connected, [one]))
    assert np.array_equal(here.buffers[0], expected)
    assert peer.digest(0) == digest(pattern(count, SIZES[0]))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", [scattered, merged])
def test_write(pair: Any, shape: Any, count: int) -> None:
    here, peer, connected = pair
    here.buffers[0][:] = pattern(count + 1, SIZES[0])
    peer.call("fill", region=0, seed=count)
    one = shape(count, SIZES[0], count)
    expected = moved(pattern(count, SIZES[0]), here.buffers[0], one.remote_offsets, one.local_offsets, one.lengths)
    finish(here.transport, here.transport.write(connected, [one]))
    assert peer.digest(0) == digest(expected)
    assert np.array_equal(here.buffers[0], pattern(count + 1, SIZES[0]))


@pytest.mark.timeout(300)
def test_a_hundred_thousand_descriptors(pair: Any) -> None:
    """In one transfer, each way; of 1 to 10 bytes in other orders on the two sides."""
    here, peer, connected = pair
    one = scattered(100_000, SIZES[0], 80, slot=20)
    here.buffers[0][:] = pattern(81, SIZES[0])
    peer.call("fill", region=0, seed=82)
    theirs = pattern(82, SIZES[0])
    written = moved(theirs, here.buffers[0], one.remote_offsets, one.local_offsets, one.lengths)
    finish(here.transport, here.transport.write(connected, [one]))
    assert peer.digest(0) == digest(written)
    here.reset()
    expected = moved(here.buffers[0], written, one.local_offsets, one.remote_offsets, one.lengths)
    finish(here.transport, here.transport.read(connected, [one]))
    assert np.array_equal(here.buffers[0], expected)


def test_batches_between_several_regions(pair: Any) -> None:
    here, peer, connected = pair
    here.reset()
    for region in (0, 1):
        peer.call("fill", region=region, seed=20 + region)
    crossed = [batch([10, 50], [5, 900], [20, 30], (1, 0)), batch([77], [SIZES[1] - 9], [9], (0, 1))]
    finish(here.transport, here.transport.read(connected, crossed))
    guard = np.full(max(SIZES), 0xA5, dtype=np.uint8)
    first = moved(guard[: SIZES[1]], pattern(20, SIZES[0]), [10, 50], [5, 900], [20, 30])
    assert np.array_equal(here.buffers[1], first)
    assert np.array_equal(here.buffers[0], moved(guard, pattern(21, SIZES[1]), [77], [SIZES[1] - 9], [9]))


@pytest.mark.parametrize("regions", [(0, 0), (1, 1)])
def test_whole_regions(pair: Any, regions: tuple[int, int]) -> None:
    here, peer, connected = pair
    peer.call("fill", region=regions[1], seed=30)
    finish(here.transport, here.transport.read(connected, [whole(regions)]))
    assert np.array_equal(here.buffers[regions[0]], pattern(30, SIZES[regions[1]]))


END = SIZES[0]
BAD = {
    "local end": batch([0, END - 9], [0, 0], [10, 10]),
    "remote end": batch([0, 0], [0, END - 9], [10, 10]),
    "local beyond": batch([0, END], [0, 0], [10, 1]),
    "remote beyond": batch([0, 0], [0, END + 5], [10, 1]),
    "local negative": batch([0, -1], [0, 0], [10, 10]),
    "remote negative": batch([0, 0], [0, -4096], [10, 10]),
    "length negative": batch([0, 0], [0, 0], [10, -1]),
    "length huge": batch([0, 0], [0, 0], [10, 2**63 - 1]),
    "sum overflows": batch([0, 2**63 - 1], [0, 2**63 - 1], [10, 2**63 - 1]),
    "unequal offsets": Batch(0, 0, int64(0, 1), int64(0), int64(10, 10)),
    "unequal lengths": Batch(0, 0, int64(0, 1), int64(0, 1), int64(10)),
    "not integers": Batch(0, 0, np.array([0.5]), int64(0), int64(10)),  # type: ignore[arg-type]
    "two dimensions": Batch(0, 0, np.zeros((1, 1), dtype=np.int64), int64(0), int64(10)),
    "local region": batch([0], [0], [10], (2, 0)),
    "remote region": batch([0], [0], [10], (0, 2)),
    "region negative": batch([0], [0], [10], (0, -1)),
    "smaller region": batch([SIZES[1]], [0], [10], (1, 0)),
}


@pytest.mark.parametrize("operation", ["read", "write"])
def test_wrong_descriptors_are_refused_and_nothing_moves(pair: Any, operation: str) -> None:
    here, peer, connected = pair
    here.reset()
    peer.call("fill", region=0, seed=40)
    before = here.snapshot()
    post = getattr(here.transport, operation)
    refused = {}
    for name, bad in BAD.items():
        try:
            post(connected, [batch([0], [0], [100]), bad])
        except BadTransfer as error:
            refused[name] = str(error)
    assert refused.keys() == BAD.keys()
    assert all(text.startswith("batch 1: ") for text in refused.values()), refused
    assert "local_offsets[1] = " + str(END - 9) in refused["local end"]
    assert here.snapshot() == before
    assert peer.digest(0) == digest(pattern(40, SIZES[0]))
    assert here.transport.live_handles == 0


@pytest.mark.parametrize("empty", [[], [batch([], [], [])], [batch([5, 9], [6, 1], [0, 0])]])
def test_nothing_to_move_is_done(pair: Any, empty: list[Batch]) -> None:
    here, _, connected = pair
    before = here.snapshot()
    finish(here.transport, here.transport.read(connected, empty))
    finish(here.transport, here.transport.write(connected, empty))
    assert here.snapshot() == before


def test_several_in_flight(pair: Any) -> None:
    here, peer, connected = pair
    here.reset()
    here.buffers[1][:] = pattern(51, SIZES[1])
    for region in (0, 1):
        peer.call("fill", region=region, seed=50)
    part = SIZES[1] // 16
    handles = [here.transport.read(connected, [batch([i * part], [i * part], [part])]) for i in range(16)]
    handles += [here.transport.write(connected, [batch([i * part], [i * part], [part], (1, 1))]) for i in range(16)]
    for handle in random.Random(0).sample(handles, len(handles)):
        finish(here.transport, handle)
    expected = np.full(SIZES[0], 0xA5, dtype=np.uint8)
    expected[: SIZES[1]] = pattern(50, SIZES[0])[: SIZES[1]]
    assert np.array_equal(here.buffers[0], expected)
    assert peer.digest(1) == digest(pattern(51, SIZES[1]))


def test_target_that_does_not_poll_then_is_nudged(side: MakeSide, spawn: Spawn) -> None:
    here, peer = side(), spawn()
    connected = connect(here, peer, progress=False)
    handle = here.transport.read(connected, [whole()])
    seen = {here.transport.poll(handle).state for _ in range(50)}
    assert seen <= ({State.DONE} if here.transport.traits.synchronous else {State.PENDING, State.DONE})
    if not here.transport.traits.target_must_poll:
        assert settle(here.transport, handle).state is State.DONE
    peer.call("progress", on=True)
    finish(here.transport, handle)
    assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("target", ["does not poll", "is stopped"])
def test_nothing_moves_after_a_release(side: MakeSide, spawn: Spawn, operation: str, target: str) -> None:
    """False is right only while bytes may still come; once it is True none may, whatever the target does then."""
    here, peer = side(), spawn()
    connected = connect(here, peer, progress=target == "is stopped")
    here.buffers[0][:] = pattern(2, SIZES[0])
    if target == "is stopped":
        peer.stop()
    handle = getattr(here.transport, operation)(connected, [whole()])
    for _ in range(50):
        pending = here.transport.poll(handle).state is State.PENDING
        is_quiet = here.transport.release(handle)
        if is_quiet:
            break
        assert pending
    landed = here.snapshot(), peer.memory(0)
    peer.resume()
    peer.call("progress", on=True)
    if not is_quiet:
        give_back(here.transport, handle)
        landed = here.snapshot(), peer.memory(0)
    for _ in range(50):
        here.transport.progress()
        peer.call("digest", region=0)  # in between it has driven its side
    has_moved = (here.snapshot(), peer.memory(0)) != landed
    assert not has_moved, "release had said True, and bytes have moved after it"
    assert here.transport.live_handles == 0


def test_synchronous_is_what_the_traits_say(pair: Any) -> None:
    here, _, connected = pair
    handle = here.transport.read(connected, [scattered(1000, SIZES[0], 3)])
    if here.transport.traits.synchronous:
        assert here.transport.poll(handle).state is State.DONE
    finish(here.transport, handle)


def test_peer_dead_before_connect(side: MakeSide, spawn: Spawn) -> None:
    here, peer = side(), spawn()
    record = peer.start()
    peer.kill()

    def post() -> Any:
        return here.transport.read(here.transport.connect(record), [whole()])

    assert outcome(here.transport, post) in ("lost", "failed")


@pytest.mark.parametrize(("operation", "used"), [("read", True), ("read", False), ("write", True)])
def test_peer_dies_between_connect_and_post(side: MakeSide, spawn: Spawn, operation: str, used: bool) -> None:
    here, peer = side(), spawn()
    connected = connect(here, peer)
    if used:
        finish(here.transport, here.transport.read(connected, [whole()]))
    peer.kill()
    post = getattr(here.transport, operation)
    assert outcome(here.transport, lambda: post(connected, [whole()])) in ("lost", "failed")
    assert outcome(here.transport, lambda: post(connected, [whole()])) == "lost"
    assert here.transport.live_handles == 0


@pytest.mark.parametrize(("operation", "used"), [("read", True), ("read", False), ("write", True)])
def test_peer_stopped_then_killed_during(side: MakeSide, spawn: Spawn, operation: str, used: bool) -> None:
    here, peer = side(), spawn()
    connected = connect(here, peer)
    if used:
        finish(here.transport, here.transport.read(connected, [whole()]))
    here.reset()
    peer.stop()
    handle = getattr(here.transport, operation)(connected, [whole()])
    for _ in range(50):
        here.transport.poll(handle)
    peer.kill()
    status = settle(here.transport, handle)
    if status.state is State.DONE:
        assert operation == "write" or np.array_equal(here.buffers[0], pattern(1, SIZES[0]))
    give_back(here.transport, handle)
    before = here.snapshot()
    for _ in range(50):
        here.transport.progress()
    assert here.snapshot() == before
    assert outcome(here.transport, lambda: here.transport.read(connected, [whole()])) == "lost"


def test_whoever_posts_dies(kit: Kit, side: MakeSide, spawn: Spawn) -> None:
    """In the middle of a transfer: the worker that it read from or wrote to goes on, for others too."""
    here, target = side(), spawn()
    connected = connect(here, target, seed=60)
    for operation, pause_s in itertools.product(kit.survives_death_in, (0, 0.05, 0.1)):
        dying = spawn()
        dying.start()
        dying.call("transfer_on", record=target.record.hex(), operation=operation, batch=[0, 1, [0], [0], [SIZES[1]]])
        time.sleep(pause_s)  # so that it is now here, now there in one of its transfers
        dying.kill()
        here.reset()
        finish(here.transport, here.transport.read(connected, [whole()]))
        assert np.array_equal(here.buffers[0], pattern(60, SIZES[0]))


def test_peer_restarted_under_a_new_record(side: MakeSide, spawn: Spawn) -> None:
    here, old, new = side(), spawn(), spawn()
    before = connect(here, old)
    finish(here.transport, here.transport.read(before, [whole()]))
    old.kill()
    after = connect(here, new, seed=2)
    assert outcome(here.transport, lambda: here.transport.read(before, [whole()])) in ("lost", "failed")
    finish(here.transport, here.transport.read(after, [whole()]))
    here.transport.disconnect(before)
    finish(here.transport, here.transport.read(after, [whole()]))
    assert np.array_equal(here.buffers[0], pattern(2, SIZES[0]))


def test_back_pressure(kit: Kit, side: MakeSide, spawn: Spawn) -> None:
    """A bounded transport says QueueFull and starts nothing; one without a bound takes many."""
    bounded = "max_inflight" in registry.options(kit.name)
    here, peer = side(**({"max_inflight": 2} if bounded else {})), spawn()
    connected = connect(here, peer)
    if not bounded:
        for handle in [here.transport.read(connected, [whole((1, 1))]) for _ in range(200)]:
            finish(here.transport, handle)
        return
    first, second = (here.transport.read(connected, [batch([i], [i], [1])]) for i in range(2))
    for _ in range(3):
        with pytest.raises(QueueFull, match=kit.text("max_inflight is 2")):
            here.transport.read(connected, [whole()])
    assert (here.buffers[0][2:] == 0xA5).all()
    assert here.transport.live_handles == 2
    finish(here.transport, first)
    finish(here.transport, here.transport.read(connected, [whole()]))
    finish(here.transport, second)
    assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))


def test_poll_and_release_after_the_end(pair: Any) -> None:
    here, _, connected = pair
    handle = here.transport.read(connected, [whole()])
    assert settle(here.transport, handle).state is State.DONE
    assert [here.transport.poll(handle).state for _ in range(3)] == [State.DONE] * 3
    give_back(here.transport, handle)
    assert here.transport.poll(handle).state is State.FAILED
    assert here.transport.release(handle) is True


def test_handles_are_given_back(pair: Any) -> None:
    here, _, connected = pair
    one = scattered(20, SIZES[0], 9)

    def transfers(count: int) -> None:
        for _ in range(count // 8):
            for handle in [here.transport.read(connected, [one]) for _ in range(8)]:
                finish(here.transport, handle)

    transfers(400)
    files, resident = open_files(), resident_bytes()
    transfers(2000)
    assert here.transport.live_handles == 0
    assert open_files() == files
    # 2,000 leaked handles of 20 descriptors would be some 4 MiB at the least.
    assert resident_bytes() - resident < 3 << 20


def test_malformed_records_are_refused(pair: Any) -> None:
    here, peer, _ = pair
    record = peer.record
    assert here.transport.reaches(record)
    rng = random.Random(7)
    cut = [record[:end] for end in sorted(rng.sample(range(len(record)), 40))]
    noise = [rng.randbytes(n) for n in (1, 3, 16, 200, len(record), 5000)]
    for bad in [b"", *cut, *noise, b"\x80", b"\xc0"]:
        assert not here.transport.reaches(bad)
        with pytest.raises(BadTransfer):
            here.transport.connect(bad)


def test_flipped_bits_in_a_record_do_no_harm(pair: Any, spawn: Spawn) -> None:
    here, _, _ = pair
    record = spawn().start()
    rng = random.Random(8)
    for _ in range(60):
        bad = bytearray(record)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        try:
            here.transport.disconnect(here.transport.connect(bytes(bad)))
        except TransportError:
            continue


def test_connect_again(pair: Any, spawn: Spawn) -> None:
    here, _, _ = pair
    peer = spawn()
    record = peer.start()
    peer.call("fill", region=0, seed=60)
    peer.call("progress", on=True)
    for _ in range(3):
        connected, twice = here.transport.connect(record), here.transport.connect(record)
        here.transport.disconnect(connected)
        here.transport.disconnect(connected)
        finish(here.transport, here.transport.read(twice, [whole()]))
        assert np.array_equal(here.buffers[0], pattern(60, SIZES[0]))
        here.transport.disconnect(twice)
        with pytest.raises(PeerLost):
            here.transport.read(twice, [whole()])


def test_disconnect_with_a_transfer_in_flight(side: MakeSide, spawn: Spawn) -> None:
    here, peer = side(), spawn()
    connected = connect(here, peer, progress=False)
    handle = here.transport.read(connected, [whole()])
    here.transport.disconnect(connected)
    peer.call("progress", on=True)
    finish(here.transport, handle)
    assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))


def test_close(kit: Kit, side: MakeSide, spawn: Spawn) -> None:
    here, peer = side(), spawn()
    record = peer.start()
    connected = here.transport.connect(record)
    in_flight = here.transport.read(connected, [whole()])
    here.transport.close()
    here.transport.close()
    assert here.transport.release(in_flight) is True
    assert here.transport.poll(in_flight).state is State.FAILED
    assert here.transport.live_handles == 0
    here.transport.disconnect(connected)
    here.transport.progress()
    for refused in (
        here.transport.record,
        lambda: here.transport.connect(record),
        lambda: here.transport.read(connected, [whole()]),
        lambda: here.transport.register([Region(here.buffers[0].ctypes.data, 1)]),
    ):
        with pytest.raises(TransportError, match=kit.text("closed")):
            refused()


def test_peer_that_has_closed_its_transport(side: MakeSide, spawn: Spawn) -> None:
    """Its memory is still there, so a transfer may succeed; what it may not do is hang or move other bytes."""
    here, peer = side(), spawn()
    connected = connect(here, peer)
    finish(here.transport, here.transport.read(connected, [batch([0], [0], [1])]))
    peer.call("close")
    peer.call("progress", on=False)
    here.reset()
    try:
        handle = here.transport.read(connected, [whole()])
    except PeerLost:
        return
    if settle(here.transport, handle).state is State.DONE:
        assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))
    peer.kill()
    give_back(here.transport, handle)


def test_register_refuses(kit: Kit, side: MakeSide) -> None:
    here = side()
    with pytest.raises(TransportError, match=kit.text("registered already")):
        here.transport.register([Region(here.buffers[0].ctypes.data, 1)])
    fresh = registry.make(kit.name, kit.options)
    with pytest.raises(TransportError, match=kit.text("nothing is registered")):
        fresh.record()
    for device, length in (("tpu:0", 16), ("cpu", 0), ("cpu", -1)):
        with pytest.raises(TransportError, match=kit.text("region 0")):
            fresh.register([Region(here.buffers[0].ctypes.data, length, device)])
    fresh.close()


def test_transports_in_several_threads(side: MakeSide, spawn: Spawn) -> None:
    """Each is driven by one thread; several at once share one target, and none disturbs another."""
    peer, sides = spawn(), [side() for _ in range(4)]
    connected = [connect(sides[0], peer), *(here.transport.connect(peer.record) for here in sides[1:])]
    share = SIZES[1] // len(sides)
    source = pattern(1, SIZES[0])

    def run(index: int) -> None:
        here, target, begin = sides[index], connected[index], index * share
        here.buffers[1][:] = pattern(90 + index, SIZES[1])
        for round_ in range(10):
            here.buffers[0][:] = 0xA5
            one = scattered(200, SIZES[0], 10 * index + round_)
            expected = moved(here.buffers[0], source, one.local_offsets, one.remote_offsets, one.lengths)
            handles = [here.transport.read(target, [one])]
            handles.append(here.transport.write(target, [batch([begin], [begin], [share], (1, 1))]))
            for handle in handles:
                finish(here.transport, handle)
            assert np.array_equal(here.buffers[0], expected), (index, round_)

    with ThreadPoolExecutor(len(sides)) as threads:
        list(threads.map(run, range(len(sides))))
    written = [pattern(90 + i, SIZES[1])[i * share : (i + 1) * share] for i in range(len(sides))]
    assert peer.digest(1) == digest(np.concatenate(written))
    assert [here.transport.live_handles for here in sides] == [0] * len(sides)


def test_two_in_one_process(side: MakeSide) -> None:
    here, there = side(), side()
    there.buffers[0][:] = pattern(70, SIZES[0])
    connected = here.transport.connect(there.transport.record())
    one = scattered(1000, SIZES[0], 71)
    expected = moved(here.buffers[0], there.buffers[0], one.local_offsets, one.remote_offsets, one.lengths)
    handle = here.transport.read(connected, [one])
    while here.transport.poll(handle).state is State.PENDING:
        there.transport.progress()
    finish(here.transport, handle)
    assert np.array_equal(here.buffers[0], expected)
