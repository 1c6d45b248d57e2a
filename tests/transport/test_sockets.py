"""What only the example's transport has: strangers at its port, other processes at its port, writes that break off."""

from __future__ import annotations

import dataclasses
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import sockets_example
from transport_harness import (
    SIZES,
    Kit,
    PeerProcess,
    Side,
    batch,
    digest,
    finish,
    give_back,
    open_files,
    outcome,
    pattern,
    settle,
    waiting,
)

from kvferry.transport.base import PeerLost, State, TransportError
from kvferry.transport.registry import make

# Nobody else of this host binds this address, so its ports are free until these tests take them.
HOST = "127.0.0.77"
BIG = 64 << 20
Start = Callable[..., PeerProcess]
MakeSide = Callable[..., Side]


@pytest.fixture(scope="module")
def kit() -> Kit:
    sockets_example.environment()
    return dataclasses.replace(sockets_example.KIT, options={"host": HOST})


@pytest.fixture
def start(kit: Kit) -> Iterator[Start]:
    """Starts a peer on a known pattern, with further options, that drives its transport."""
    started: list[PeerProcess] = []

    def begin(sizes: tuple[int, ...] = SIZES, **options: Any) -> PeerProcess:
        peer = PeerProcess(dataclasses.replace(kit, options={**kit.options, **options}))
        started.append(peer)
        peer.start(sizes)
        peer.call("fill", region=0, seed=1)
        peer.call("progress", on=True)
        return peer

    yield begin
    for peer in started:
        peer.kill()


@pytest.fixture
def big(kit: Kit) -> Iterator[Side]:
    here = Side(kit, (BIG,))
    yield here
    here.transport.close()


def whole(length: int = SIZES[0]) -> Any:
    return batch([0], [0], [length])


def fields(record: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(record)  # type: ignore[no-any-return]


def changed(record: bytes, **others: Any) -> bytes:
    return msgspec.msgpack.encode({**fields(record), **others})


def begun_write(here: Side, peer: PeerProcess) -> Any:
    """A write of which some has been sent, and far from all."""
    handle = here.transport.write(here.transport.connect(peer.record), [whole(BIG)])
    for _ in waiting("the target does not answer"):
        assert here.transport.poll(handle).state is State.PENDING
        if handle.connection.may_land:
            return handle
    raise AssertionError


def test_another_process_at_the_port_is_not_taken_for_the_peer(side: MakeSide, start: Start) -> None:
    here, old = side(), start()
    before = here.transport.connect(old.record)
    finish(here.transport, here.transport.read(before, [whole()]))
    old.kill()
    new = start(port=fields(old.record)["port"])
    new.call("fill", region=0, seed=2)
    here.reset()
    # It listens there, so connecting works; it is the transfer that shows who it is.
    again = here.transport.connect(old.record)
    for stale, post in ((before, here.transport.read), (again, here.transport.write)):
        handle = post(stale, [whole()])
        assert settle(here.transport, handle).state is State.FAILED
        assert here.transport.release(handle) is True
        with pytest.raises(PeerLost):
            post(stale, [whole()])
    assert (here.buffers[0] == 0xA5).all()
    assert new.digest(0) == digest(pattern(2, SIZES[0]))
    finish(here.transport, here.transport.read(here.transport.connect(new.record), [whole()]))
    assert np.array_equal(here.buffers[0], pattern(2, SIZES[0]))


def request(token: bytes, body: bytes, num_bytes: int | None = None) -> bytes:
    return token + (len(body) if num_bytes is None else num_bytes).to_bytes(8, "little") + body


def asking(token: bytes, region: int, offset: int, length: int) -> bytes:
    int64s = [int.to_bytes(value, 8, "little", signed=True) for value in (offset, length)]
    return request(token, msgspec.msgpack.encode({"write": False, "parts": [(region, *int64s)]}))


def test_garbage_at_the_port_ends_only_its_own_connection(side: MakeSide, start: Start) -> None:
    here, peer = side(), start()
    record, rng = fields(peer.record), random.Random(9)
    token = record["token"]
    garbage = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        *(rng.randbytes(length) for length in (16, 24, 100, 100_000)),
        request(b"\0" * len(token), b"x"),
        request(token, b"\xc1 not msgpack"),
        request(token, b""),
        request(token, b"", 2**64 - 1),
        request(token, msgspec.msgpack.encode({"write": True, "parts": [(0, b"123", b"1")]})),
        asking(token, 2, 0, 1),
        asking(token, -1, 0, 1),
        asking(token, 0, SIZES[0], 1),
        asking(token, 0, -1, 1),
        asking(token, 0, 0, SIZES[0] + 1),
        asking(token, 0, 2**63 - 1, 2**63 - 1),
    ]
    for bad in garbage:
        with socket.create_connection((HOST, record["port"])) as stranger:
            stranger.settimeout(60)
            try:
                stranger.sendall(bad)
                assert stranger.recv(1) == b"", bad
            except ConnectionError:
                continue
    socket.create_connection((HOST, record["port"])).close()
    finish(here.transport, here.transport.read(here.transport.connect(peer.record), [whole()]))
    assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))


def test_a_stranger_that_says_nothing_is_cut_off(side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = side(), side()
    monkeypatch.setattr("kvferry_sockets_wire.REQUEST_S", 0)
    with socket.create_connection((HOST, fields(there.transport.record())["port"])) as stranger:
        stranger.setblocking(False)
        for _ in waiting("the stranger is still connected"):
            there.transport.progress()
            try:
                assert stranger.recv(1) == b""
                break
            except BlockingIOError:
                continue
    monkeypatch.undo()
    handle = here.transport.read(here.transport.connect(there.transport.record()), [whole()])
    while here.transport.poll(handle).state is State.PENDING:
        there.transport.progress()
    finish(here.transport, handle)


def test_it_listens_on_its_host_alone(side: MakeSide) -> None:
    port = fields(side().transport.record())["port"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.78", port))
    with pytest.raises(TransportError, match=f"can't listen on {HOST}, port {port}: "):
        side(port=port)


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1", ""])
def test_a_host_that_is_no_address_for_peers_is_refused(kit: Kit, host: str) -> None:
    with pytest.raises(TransportError, match="sockets: host: "):
        make(kit.name, {"host": host})


def test_what_keeps_to_the_loopback_dials_nothing_else(side: MakeSide) -> None:
    here, there = side(), side()
    record = there.transport.record()
    assert here.transport.reaches(record)
    for elsewhere in (changed(record, host="192.0.2.1"), changed(record, host_id="another host")):
        assert not here.transport.reaches(elsewhere)
        with pytest.raises(TransportError, match="out of reach"):
            here.transport.connect(elsewhere)


def test_the_target_checks_bounds_as_well(side: MakeSide, start: Start) -> None:
    here, peer = side(), start()
    boasting = changed(peer.record, region_lengths_bytes=[2 * SIZES[0], SIZES[1]])
    beyond = batch([0, 0], [0, SIZES[0]], [10, 1])
    before = here.snapshot()
    for operation in ("read", "write"):
        post = getattr(here.transport, operation)
        connected = here.transport.connect(boasting)
        assert outcome(here.transport, lambda post=post, to=connected: post(to, [beyond])) == "failed"
    assert here.snapshot() == before
    assert peer.digest(0) == digest(pattern(1, SIZES[0]))


def test_a_begun_write_is_quiet_only_when_the_target_is_gone(big: Side, start: Start) -> None:
    peer = start((BIG,))
    handle = begun_write(big, peer)
    peer.stop()
    for _ in range(50):
        assert big.transport.release(handle) is False
        assert big.transport.poll(handle).state is State.PENDING
    peer.kill()
    assert settle(big.transport, handle).state is State.FAILED
    give_back(big.transport, handle)
    assert big.transport.live_handles == 0


def test_a_begun_write_outlives_close_until_the_target_is_gone(big: Side, start: Start) -> None:
    peer = start((BIG,))
    handle = begun_write(big, peer)
    peer.stop()
    big.transport.close()
    assert big.transport.poll(handle).state is State.FAILED
    assert big.transport.release(handle) is False
    peer.kill()
    assert big.transport.release(handle) is True


def test_a_target_that_closes_says_that_it_is_through(big: Side, start: Start) -> None:
    """Its process lives on, and what it is told while it closes is all that can prove that nothing more lands there."""
    peer = start((BIG,))
    handle = begun_write(big, peer)
    peer.call("progress", on=False)
    peer.call("close")
    landed = peer.digest(0)
    status = settle(big.transport, handle)
    assert status.state is State.FAILED
    assert status.detail.endswith("the target has given the transfer up")
    assert big.transport.release(handle) is True
    assert peer.digest(0) == landed


def test_a_released_write_runs_to_its_end(big: Side, start: Start) -> None:
    peer = start((BIG,))
    handle = begun_write(big, peer)
    give_back(big.transport, handle)
    assert peer.digest(0) == digest(big.buffers[0])


def test_close_gives_sockets_back(kit: Kit, start: Start) -> None:
    peer = start()
    peer.call("progress", on=False)
    files, threads = open_files(), threading.active_count()
    here, there = Side(kit), Side(kit)
    posted = [here.transport.read(here.transport.connect(peer.record), [whole()]) for _ in range(3)]
    posted += [here.transport.write(here.transport.connect(there.transport.record()), [whole()]) for _ in range(3)]
    for handle in posted:
        here.transport.poll(handle)
    there.transport.progress()
    assert open_files() > files + 2
    for one in (here, there):
        one.transport.close()
    assert all(here.transport.release(handle) for handle in posted)
    assert open_files() == files
    assert threading.active_count() == threads
