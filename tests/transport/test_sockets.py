"""What only the example's transport has: strangers at its port, other processes at its port, writes that break off."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import sockets_example
from transport_harness import (
    BOUND_S,
    SIZES,
    Kit,
    PeerProcess,
    Side,
    batch,
    digest,
    finish,
    give_back,
    moved,
    open_files,
    outcome,
    pattern,
    settle,
)

from kvferry.transport.base import PeerLost, QueueFull, State, TransportError
from kvferry.transport.registry import make

# Nobody else of this host binds this address, so its ports are free until these tests take them.
HOST = "127.0.0.77"
BIG = 64 << 20
Start = Callable[..., PeerProcess]
MakeSide = Callable[..., Side]
Play = Callable[[PeerProcess], "PlayedTarget"]


@pytest.fixture(scope="module")
def kit() -> Kit:
    sockets_example.environment()
    return dataclasses.replace(sockets_example.KIT, options={"host": HOST})


@pytest.fixture
def start(kit: Kit) -> Iterator[Start]:
    """Starts a peer on a known pattern, with further options."""
    started: list[PeerProcess] = []

    def begin(sizes: tuple[int, ...] = SIZES, **options: Any) -> PeerProcess:
        peer = PeerProcess(dataclasses.replace(kit, options={**kit.options, **options}))
        started.append(peer)
        peer.start(sizes)
        peer.call("fill", region=0, seed=1)
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


class PlayedTarget:
    """The target's end of a transfer, played by the test at a port of its own under the name of a live peer."""

    def __init__(self, peer: PeerProcess) -> None:
        self.listener = socket.create_server((HOST, 0))
        lengths = [BIG, *fields(peer.record)["region_lengths_bytes"][1:]]
        self.record = changed(peer.record, port=self.listener.getsockname()[1], region_lengths_bytes=lengths)
        self.conn = socket.socket()

    def ready(self) -> None:
        """Takes a connection, reads its request, and answers READY."""
        self.conn.close()
        self.conn, _ = self.listener.accept()
        self.conn.settimeout(BOUND_S)
        with self.conn.makefile("rb") as stream:
            stream.read(16)
            stream.read(int.from_bytes(stream.read(8), "little"))
        self.conn.sendall(b"R")

    def connected(self, here: Side) -> Any:
        connected = here.transport.connect(self.record)
        self.listener.accept()[0].close()
        return connected

    def close(self) -> None:
        self.conn.close()
        self.listener.close()


@pytest.fixture
def play() -> Iterator[Callable[[PeerProcess], PlayedTarget]]:
    made: list[PlayedTarget] = []

    def begin(peer: PeerProcess) -> PlayedTarget:
        made.append(PlayedTarget(peer))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def begun_write(here: Side, target: PlayedTarget) -> Any:
    """A write of which some bytes have come, and far from all."""
    handle = here.transport.write(target.connected(here), [whole(BIG)])
    target.ready()
    assert target.conn.recv(1000)
    assert here.transport.poll(handle).state is State.PENDING
    return handle


def ask(record: bytes, body: dict[str, Any], some: bytes = b"") -> socket.socket:
    """A connection on which that was asked, READY has come, and some bytes were sent."""
    conn = socket.create_connection((HOST, fields(record)["port"]), timeout=BOUND_S)
    conn.sendall(request(fields(record)["token"], msgspec.msgpack.encode(body)))
    assert conn.recv(1) == b"R"
    conn.sendall(some)
    return conn


def pour(conn: socket.socket) -> None:
    """Sends until the other side has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while True:
            conn.sendall(b"y" * 1000)


def stays_pending(here: Side, handle: Any) -> None:
    """For longer than a transfer takes that nothing holds up."""
    for _ in range(300):
        assert here.transport.poll(handle).state is State.PENDING
        time.sleep(0.001)


def part(length: int, offset: int = 0, region: int = 0) -> tuple[int, bytes, bytes]:
    return region, *(int.to_bytes(value, 8, "little", signed=True) for value in (offset, length))


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
    return request(token, msgspec.msgpack.encode({"write": False, "parts": [part(length, offset, region)]}))


def test_garbage_at_the_port_ends_only_its_own_connection(side: MakeSide, start: Start) -> None:
    here, peer = side(), start()
    record, rng = fields(peer.record), random.Random(9)
    token = record["token"]
    garbage = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        *(rng.randbytes(length) for length in (16, 24, 100, 100_000)),
        asking(b"\0" * len(token), 0, 0, 1),
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
    record = there.transport.record()
    monkeypatch.setattr("kvferry_sockets.SILENT_S", 0.01)
    with socket.create_connection((HOST, fields(record)["port"]), timeout=BOUND_S) as stranger:
        assert stranger.recv(1) == b""
    monkeypatch.undo()
    finish(here.transport, here.transport.read(here.transport.connect(record), [whole()]))


def test_a_request_of_too_many_bytes_is_not_waited_for(side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry_sockets.SILENT_S", 10 * BOUND_S)
    record = fields(side().transport.record())
    with socket.create_connection((HOST, record["port"]), timeout=BOUND_S) as stranger:
        stranger.sendall(request(record["token"], b"", 2**30 + 1))
        assert stranger.recv(1) == b""


def test_connections_beyond_the_cap_wait(side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry_sockets.MAX_SERVED", 1)
    here, there = side(), side()
    record = there.transport.record()
    connected = here.transport.connect(record)
    with ask(record, {"write": True, "parts": [part(10)]}):
        handle = here.transport.read(connected, [whole()])
        stays_pending(here, handle)
    finish(here.transport, handle)


def test_a_target_without_a_descriptor_left_takes_connections_later(side: MakeSide, start: Start) -> None:
    here, peer = side(), start()
    usual = resource.prlimit(peer.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(peer.pid, resource.RLIMIT_NOFILE, (3, usual[1]))
    # The descriptor for this one was set aside before the limit fell.
    connected = here.transport.connect(peer.record)
    handle = here.transport.read(connected, [whole()])
    stays_pending(here, handle)
    resource.prlimit(peer.pid, resource.RLIMIT_NOFILE, usual)
    finish(here.transport, handle)
    assert np.array_equal(here.buffers[0], pattern(1, SIZES[0]))


def test_a_post_without_a_descriptor_left_is_back_pressure(side: MakeSide, start: Start) -> None:
    here, peer = side(), start()
    connected = here.transport.connect(peer.record)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
    try:
        with pytest.raises(QueueFull, match="no descriptor"):
            here.transport.read(connected, [whole()])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert here.transport.live_handles == 0
    finish(here.transport, here.transport.read(connected, [whole()]))


@pytest.mark.parametrize("operation", ["read", "write"])
def test_many_small_descriptors(side: MakeSide, operation: str) -> None:
    here, there = side(), side()
    rng = np.random.default_rng(3)
    here.buffers[0][:], there.buffers[0][:] = pattern(5, SIZES[0]), pattern(6, SIZES[0])
    local, remote = (rng.permutation(100_000) * 20 for _ in range(2))
    one = batch(local, remote, rng.integers(1, 21, len(local)))
    if operation == "read":
        expected = moved(here.buffers[0], there.buffers[0], local, remote, one.lengths)
    else:
        expected = moved(there.buffers[0], here.buffers[0], remote, local, one.lengths)
    connected = here.transport.connect(there.transport.record())
    finish(here.transport, getattr(here.transport, operation)(connected, [one]))
    assert np.array_equal((here if operation == "read" else there).buffers[0], expected)


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


def test_a_begun_write_is_quiet_only_when_the_target_is_gone(big: Side, start: Start, play: Play) -> None:
    peer = start()
    target = play(peer)
    handle = begun_write(big, target)
    for _ in range(50):
        assert big.transport.release(handle) is False
        assert big.transport.poll(handle).state is State.PENDING
    # Whatever closed the connection, the target may still have bytes to take out of its socket.
    target.conn.close()
    assert settle(big.transport, handle).state is State.FAILED
    for _ in range(50):
        assert big.transport.release(handle) is False
    peer.kill()
    assert big.transport.release(handle) is True
    assert big.transport.live_handles == 0


def test_what_has_failed_is_not_in_flight(side: MakeSide, start: Start, play: Play) -> None:
    """Else what waits for its proof would fill the queue for good."""
    here, peer = side(sizes=(BIG,), max_inflight=1), start()
    target, other = play(peer), here.transport.connect(peer.record)
    handle = begun_write(here, target)
    with pytest.raises(QueueFull, match="max_inflight is 1"):
        here.transport.read(other, [whole()])
    target.conn.close()
    assert settle(here.transport, handle).state is State.FAILED
    finish(here.transport, here.transport.read(other, [whole()]))
    assert here.transport.release(handle) is False


def test_a_begun_write_to_a_process_that_is_gone_needs_no_answer(big: Side, start: Start, play: Play) -> None:
    """Its sockets may live on in a child of it."""
    peer = start()
    handle = begun_write(big, play(peer))
    peer.kill()
    give_back(big.transport, handle)


def test_a_begun_write_outlives_close_until_the_target_is_gone(big: Side, start: Start, play: Play) -> None:
    peer, threads = start(), threading.active_count()
    handle = begun_write(big, play(peer))
    big.transport.close()
    # The listener's thread was there before.
    assert threading.active_count() == threads - 1
    assert big.transport.poll(handle).state is State.FAILED
    assert big.transport.release(handle) is False
    peer.kill()
    assert big.transport.release(handle) is True


def test_a_released_write_is_quiet_once_the_target_says_so(big: Side, start: Start, play: Play) -> None:
    target = play(start())
    handle = begun_write(big, target)
    assert big.transport.release(handle) is False
    # Cut short: the target sees the end, and it is its answer that counts.
    taken = 1000
    while chunk := target.conn.recv(1 << 20):
        taken += len(chunk)
    assert taken < BIG
    assert big.transport.release(handle) is False
    target.conn.sendall(b"G")
    give_back(big.transport, handle)
    assert not handle.is_alive()


def test_a_released_read_takes_nothing_more(side: MakeSide, start: Start, play: Play) -> None:
    here, target = side(), play(start())
    connected = target.connected(here)
    handle = here.transport.read(connected, [whole()])
    target.ready()
    target.conn.sendall(b"x" * 1000)
    assert here.transport.release(handle) is False
    assert settle(here.transport, handle).state is State.FAILED
    assert here.transport.release(handle) is True
    before = here.snapshot()
    pour(target.conn)
    assert here.snapshot() == before
    # It was this side that ended it, so the peer is not taken for lost.
    give_back(here.transport, here.transport.read(connected, [whole()]))


@pytest.mark.parametrize("way", ["release", "close"])
def test_a_transfer_that_is_still_connecting_can_be_ended(side: MakeSide, start: Start, play: Play, way: str) -> None:
    here, target = side(), play(start())
    connected = target.connected(here)
    # The queue of the listener is full after these, so that further ones get no answer.
    target.listener.listen(0)
    others = [socket.socket() for _ in range(3)]
    for one in others:
        one.setblocking(False)
        one.connect_ex(target.listener.getsockname())
    handles = [here.transport.read(connected, [whole()]), here.transport.write(connected, [whole()])]
    for _ in range(50):
        assert {here.transport.poll(handle).state for handle in handles} == {State.PENDING}
    if way == "close":
        here.transport.close()
    for handle in handles:
        give_back(here.transport, handle)
        assert not handle.is_alive()
    for one in others:
        one.close()


def test_nothing_lands_after_a_release(side: MakeSide, start: Start) -> None:
    """Wherever a release finds a write, nothing of it lands once it has said True."""
    here, peer = side(), start()
    connected = here.transport.connect(peer.record)
    for round_ in range(30):
        give_back(here.transport, here.transport.write(connected, [whole()]))
        peer.call("fill", region=0, seed=round_)
        assert peer.digest(0) == digest(pattern(round_, SIZES[0]))
    assert here.transport.live_handles == 0


def test_a_target_that_closes_says_that_it_is_through(start: Start) -> None:
    """Its process lives on, and what it is told while it closes is all that can prove that nothing more lands there."""
    peer = start()
    with ask(peer.record, {"write": True, "parts": [part(SIZES[0])]}, b"x" * 1000) as writer:
        peer.call("close")
        landed = peer.digest(0)
        assert writer.recv(1) == b"G"
        pour(writer)
    assert peer.digest(0) == landed


@pytest.mark.parametrize(("sent", "answer"), [(SIZES[0], b"D"), (SIZES[0] - 1, b"G"), (0, b"G")])
def test_what_a_target_answers_to_written_bytes(start: Start, sent: int, answer: bytes) -> None:
    peer = start()
    with ask(peer.record, {"write": True, "parts": [part(SIZES[0])]}, b"x" * sent) as writer:
        writer.shutdown(socket.SHUT_WR)
        assert writer.recv(1) == answer
        expected = pattern(1, SIZES[0]).copy()
        expected[:sent] = ord("x")
        assert peer.digest(0) == digest(expected)


def test_the_targets_word_makes_a_write_quiet(big: Side, start: Start, play: Play) -> None:
    target = play(start())
    handle = begun_write(big, target)
    target.conn.sendall(b"G")
    target.conn.close()
    status = settle(big.transport, handle)
    assert status.state is State.FAILED
    assert status.detail.endswith("the target has given the transfer up")
    assert big.transport.release(handle) is True


def test_close_gives_sockets_and_threads_back(
    kit: Kit, start: Start, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is `close` that ends the threads, not their patience.
    monkeypatch.setattr("kvferry_sockets.SILENT_S", 10 * BOUND_S)
    target = play(start())
    files, threads = open_files(), threading.active_count()
    here, there = Side(kit), Side(kit)
    record = there.transport.record()
    silent, served = target.connected(here), here.transport.connect(record)
    posted = [here.transport.read(silent, [whole()]) for _ in range(3)]
    posted += [here.transport.write(to, [whole()]) for to in (silent, served) for _ in range(3)]
    with (
        ask(record, {"write": True, "parts": [part(10)]}),
        ask(record, {"write": False, "parts": [part(SIZES[0])] * 100}),
        socket.create_connection((HOST, fields(record)["port"])),
    ):
        for one in (there, here):
            one.transport.close()
        assert threading.active_count() == threads
    assert all(here.transport.release(handle) for handle in posted)
    assert open_files() == files


NEVER_CLOSED = """
import sys
import numpy as np
from kvferry.layout import Region
from kvferry.transport.base import Batch
from kvferry.transport.registry import make

memory = np.zeros(10, dtype=np.uint8)
transport = make(sys.argv[1], {"host": sys.argv[2]})
transport.register([Region(memory.ctypes.data, memory.nbytes)])
transport.read(transport.connect(bytes.fromhex(sys.argv[3])), [Batch(0, 0, *np.array([[0], [0], [10]]))])
"""


def test_a_process_that_has_not_closed_can_end(kit: Kit, start: Start, play: Play) -> None:
    command = [sys.executable, "-c", NEVER_CLOSED, kit.name, HOST, play(start()).record.hex()]
    subprocess.run(command, env={**os.environ, **kit.environment()}, timeout=BOUND_S, check=True)
