"""Endpoints over real sockets: exchange, lost peers, waking, resources."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvferry.control.addresses import AddressError, AllowedRanges
from kvferry.control.endpoint import Backlog, Endpoint, Event, Forgotten, FrameTooLarge, Limits, Lost, Received, Route
from kvferry.control.security import ClusterKeys, Security

SECRET = b"the cluster's secret, quite long"
DEADLINE_S = 30.0


def test_a_request_and_its_answer(make_endpoint, received) -> None:
    server, client = make_endpoint(), make_endpoint()
    client.send(server.address, b"question")
    question = received(server, client)
    assert question.frame == b"question"
    assert isinstance(question.source, Route)
    server.send(question.source, b"answer")
    assert received(client, server) == Received(server.address, b"answer")


def test_both_sides_dial_each_other(make_endpoint, pump) -> None:
    one, two = make_endpoint(), make_endpoint()
    one.send(two.address, b"from one")
    two.send(one.address, b"from two")
    seen = pump(one, two, done=lambda seen: all(seen.values()))
    assert [event.frame for event in seen[one]] == [b"from two"]
    assert [event.frame for event in seen[two]] == [b"from one"]


def test_answers_go_to_the_peer_that_asked(make_endpoint, pump) -> None:
    server = make_endpoint()
    clients = [make_endpoint() for _ in range(5)]
    for number, client in enumerate(clients):
        for repeat in range(4):
            client.send(server.address, b"%d/%d" % (number, repeat))
    questions = pump(server, *clients, done=lambda seen: len(seen[server]) == 20)[server]
    for question in questions:
        server.send(question.source, b"re " + question.frame)
    seen = pump(*clients, done=lambda seen: all(len(events) == 4 for events in seen.values()))
    for number, client in enumerate(clients):
        assert seen[client] == [Received(server.address, b"re %d/%d" % (number, repeat)) for repeat in range(4)]


@pytest.mark.parametrize("secrets", [(SECRET,), ()], ids=["curve", "open"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_addresses_of_each_kind(make_endpoint, received, host: str, secrets: tuple[bytes, ...]) -> None:
    server, client = make_endpoint(secrets, host=host), make_endpoint(secrets)
    expected = ("tcp://[::1]:",) if ":" in host else ("tcp://127.0.0.1:", "tcp://[::1]:")
    assert server.address.startswith(expected)
    client.send(server.address, b"hello")
    assert received(server, client).frame == b"hello"


def test_a_port_may_be_asked_for_and_a_used_one_is_named(make_endpoint) -> None:
    first = make_endpoint()
    port = int(first.address.rsplit(":", 1)[1])
    with pytest.raises(AddressError, match=rf"^can't listen on {first.address}: Address already in use$"):
        make_endpoint(port=port)
    first.close()
    assert make_endpoint(port=port).address == first.address


def test_a_host_that_needs_a_secret_is_refused_without_one(make_endpoint) -> None:
    with pytest.raises(AddressError, match=r"10\.0\.0\.1.*KVFERRY_SECRET"):
        make_endpoint(host="10.0.0.1", security=Security())


def test_a_wildcard_host_is_refused(make_endpoint) -> None:
    with pytest.raises(AddressError, match="set host_ip"):
        make_endpoint(host="0.0.0.0")


def test_frames_up_to_the_limit_arrive_and_larger_ones_are_refused(make_endpoint, received) -> None:
    server, client = make_endpoint(), make_endpoint()
    frame = os.urandom(client.max_frame_bytes)
    client.send(server.address, frame)
    question = received(server, client)
    assert question.frame == frame
    for sender, to in ((client, server.address), (server, question.source)):
        with pytest.raises(FrameTooLarge, match=f"{len(frame) + 1} bytes.*{len(frame)}"):
            sender.send(to, frame + b"x")


def test_peers_outside_the_ranges_are_not_dialled() -> None:
    allowed = AllowedRanges(["10.0.0.0/8"])
    with Endpoint("127.0.0.1", Security.choose("127.0.0.1", [SECRET]), allowed) as endpoint:
        with pytest.raises(AddressError, match=r"tcp://127\.0\.0\.1:9.*10\.0\.0\.0/8"):
            endpoint.send("tcp://127.0.0.1:9", b"hello")
        with pytest.raises(AddressError, match="must be numeric"):
            endpoint.send("tcp://localhost:9", b"hello")
        with pytest.raises(AddressError, match="form"):
            endpoint.send("ipc:///tmp/x", b"hello")


def test_one_address_is_one_connection_however_it_is_spelled(make_endpoint) -> None:
    server, client = make_endpoint(), make_endpoint()
    port = server.address.rsplit(":", 1)[1]
    client.dial(server.address)
    for host in ("::ffff:127.0.0.1", "::FFFF:7f00:1", "0::ffff:7f00:1", "::1%lo", "0::1"):
        with pytest.raises(AddressError):
            client.dial(f"tcp://[{host}]:{port}")
    assert list(client._peers) == [server.address]


@pytest.mark.parametrize("host", ["0:0::1", "::ffff:127.0.0.1"])
def test_the_address_of_an_endpoint_is_canonical(make_endpoint, received, host: str) -> None:
    server, client = make_endpoint(host=host), make_endpoint()
    client.send(server.address, b"hello")
    assert received(server, client).frame == b"hello"


def test_an_open_endpoint_dials_loopback_only(make_endpoint) -> None:
    endpoint = make_endpoint(())
    with pytest.raises(AddressError, match=r"tcp://10\.0\.0\.1:9.*KVFERRY_SECRET"):
        endpoint.send("tcp://10.0.0.1:9", b"hello")


def test_the_number_of_peers_is_bounded(make_endpoint) -> None:
    server, other = make_endpoint(), make_endpoint()
    client = make_endpoint(limits=Limits(max_peers=1))
    client.dial(server.address)
    with pytest.raises(AddressError, match=f"{other.address}: 1 peers"):
        client.dial(other.address)
    client.forget(server.address)
    client.dial(other.address)


def test_a_refused_connection_is_lost_once_and_can_be_tried_again(make_endpoint, lost, received, pump) -> None:
    endpoint = make_endpoint()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        endpoint.send(address, b"one")
        endpoint.send(address, b"two")
        first = lost(endpoint)
        assert first == Lost(address, first.reason)
        assert "refused" in first.reason
        assert endpoint.receive(0.05) == []
    server = make_endpoint(port=port)
    endpoint.send(address, b"three")
    assert received(server, endpoint).frame == b"three"


def test_a_peer_that_never_answers_the_handshake_is_lost(make_endpoint, lost, quick) -> None:
    endpoint = make_endpoint(limits=quick)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        endpoint.send(address, b"hello")
        assert lost(endpoint) == Lost(address, "no handshake within 1 s")


def test_a_peer_that_does_not_even_accept_is_lost(make_endpoint, lost, quick) -> None:
    endpoint = make_endpoint(limits=quick)
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        endpoint.send(f"tcp://127.0.0.1:{full.getsockname()[1]}", b"hello")
        assert "silent for 1 s" in lost(endpoint).reason


@pytest.mark.parametrize("secrets", [(SECRET,), ()], ids=["curve", "open"])
def test_a_peer_that_speaks_another_protocol_is_lost(make_endpoint, lost, secrets: tuple[bytes, ...]) -> None:
    endpoint = make_endpoint(secrets)
    with socket.create_server(("127.0.0.1", 0)) as web_server:
        endpoint.send(f"tcp://127.0.0.1:{web_server.getsockname()[1]}", b"hello")
        connection, _ = web_server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" + b"Padding: some\r\n" * 20)
            assert "no kvferry endpoint" in lost(endpoint).reason


def test_a_killed_peer_is_lost_and_its_successor_on_the_port_is_reached(
    make_endpoint, received, lost, start_echo
) -> None:
    endpoint, echo = make_endpoint(), start_echo()
    endpoint.send(echo.address, b"hello")
    assert received(endpoint) == Received(echo.address, b"hello")
    echo.kill()
    assert lost(endpoint).address == echo.address
    successor = start_echo(port=int(echo.address.rsplit(":", 1)[1]))
    assert successor.address == echo.address
    endpoint.send(echo.address, b"hello again")
    assert received(endpoint) == Received(echo.address, b"hello again")


def test_a_peer_that_stops_in_its_tracks_is_lost(make_endpoint, received, lost, quick, start_echo) -> None:
    endpoint, echo = make_endpoint(limits=quick), start_echo()
    endpoint.send(echo.address, b"hello")
    received(endpoint)
    os.kill(echo.process.pid, signal.SIGSTOP)
    assert lost(endpoint).address == echo.address


@pytest.mark.parametrize("busy", ["listener", "dialler"])
def test_a_peer_that_floods_a_busy_process_and_dies_does_not_end_it(busy: str) -> None:
    run = subprocess.run([sys.executable, Path(__file__).with_name("busy_endpoint.py"), busy], capture_output=True)
    assert (run.returncode, run.stdout) == (0, b"alive\n"), run.stderr.decode()


def test_what_a_peer_sent_before_it_went_comes_before_lost(make_endpoint, received, pump) -> None:
    server, client = make_endpoint(limits=Limits(routed_messages=1000)), make_endpoint()
    client.send(server.address, b"all of it")
    source = received(server, client).source
    for number in range(500):
        server.send(source, b"%d" % number)
    server.close()
    events = pump(client, done=lambda seen: any(isinstance(event, Lost) for event in seen[client]))[client]
    assert [event.frame for event in events[:-1]] == [b"%d" % number for number in range(500)]
    assert isinstance(events[-1], Lost)


def test_frames_for_a_peer_that_is_gone_never_reach_its_successor(make_endpoint, received, lost) -> None:
    first, client = make_endpoint(), make_endpoint()
    client.send(first.address, b"hello")
    received(first, client)
    first.close()
    assert client._peers[first.address].monitor.socket.poll(30_000)
    client.send(first.address, b"for the first")
    second = make_endpoint(port=int(first.address.rsplit(":", 1)[1]))
    for _ in range(30):
        assert second.receive(0.01) == []
    assert lost(client).address == first.address
    client.send(first.address, b"for the second")
    assert received(second, client).frame == b"for the second"


@pytest.mark.parametrize("count", [63, 64, 65, 128])
def test_lost_comes_whatever_the_number_of_frames_before_it(make_endpoint, received, count: int) -> None:
    server, client = make_endpoint(limits=Limits(routed_messages=1000)), make_endpoint()
    client.send(server.address, b"all of it")
    source = received(server, client).source
    for _ in range(count):
        server.send(source, b"frame")
    server.close()
    # Everything waits before the first receive, so that the frames fill whole batches.
    assert client._peers[server.address].monitor.socket.poll(30_000)
    events: list[Event] = []
    while not events or not isinstance(events[-1], Lost):
        events += client.receive(None)
    assert len(events) == count + 1


def test_a_forgotten_peer_is_no_loss(make_endpoint, received) -> None:
    server, client = make_endpoint(), make_endpoint()
    client.send(server.address, b"hello")
    received(server, client)
    client.forget(server.address)
    client.forget(server.address)
    server.close()
    assert client.receive(0.1) == []


def test_forgetting_peers_as_they_die_leaves_the_endpoint_alive(make_endpoint, received) -> None:
    """libzmq still tells of a socket that is being closed; where nobody listens its I/O thread stops for ever."""
    endpoint = make_endpoint()
    for turn in range(150):
        peer = make_endpoint()
        endpoint.send(peer.address, b"hello")
        endpoint.receive(0.001 * (turn % 10))
        peer.receive(0)
        dying = threading.Thread(target=peer.close)
        dying.start()
        endpoint.forget(peer.address)
        dying.join()
    other = make_endpoint()
    other.send(endpoint.address, b"still there?")
    assert received(endpoint).frame == b"still there?"


def test_an_idle_peer_is_forgotten_and_dialled_anew(make_endpoint, received, pump) -> None:
    server, client = make_endpoint(), make_endpoint(limits=Limits(idle_s=0.5))
    client.send(server.address, b"hello")
    assert received(server, client).frame == b"hello"
    seen = pump(client, server, done=lambda _: not client._peers and server.counters["disconnected"] == 1)
    assert seen[client] == [Forgotten(server.address)]
    client.send(server.address, b"hello again")
    assert received(server, client).frame == b"hello again"


def test_an_idle_peer_is_forgotten_in_a_wait_without_end(make_endpoint) -> None:
    server, client = make_endpoint(), make_endpoint(limits=Limits(idle_s=0.2))
    client.dial(server.address)
    events: list[Event] = []
    while client._peers:
        events += client.receive(None)
    assert events == [Forgotten(server.address)]


@pytest.mark.parametrize("direction", ["sent", "received"])
def test_a_peer_in_use_is_not_idle(make_endpoint, received, pump, direction: str) -> None:
    server, client = make_endpoint(), make_endpoint(limits=Limits(idle_s=60.0))
    client.send(server.address, b"hello")
    route = received(server, client).source
    (peer,) = client._peers.values()
    peer.used_at_s = client._idle_check_at_s = 0.0
    if direction == "sent":
        client.send(server.address, b"in use")
    else:
        server.send(route, b"in use")
        assert peer.socket.poll(30_000)
    client.receive(0.0)
    assert list(client._peers) == [server.address]
    peer.used_at_s = client._idle_check_at_s = 0.0
    client.receive(0.0)
    assert not client._peers


def test_an_idle_loop_is_not_woken_often_by_the_peers_it_dialled(make_endpoint, received) -> None:
    server, client = make_endpoint(), make_endpoint()
    client.send(server.address, b"hello")
    received(server, client)
    client.receive(0.0)
    assert client._timeout_ms(None) > 50_000
    assert server._timeout_ms(None) is None


def test_a_peer_that_asks_and_never_reads_holds_few_answers_and_blocks_nobody(make_endpoint, received, pump) -> None:
    server, other = make_endpoint(limits=Limits(heartbeat_s=20.0)), make_endpoint()
    greedy = make_endpoint(limits=Limits(high_water_messages=1, heartbeat_s=20.0))
    greedy.send(server.address, b"hello")
    route = received(server, greedy).source
    accepted = _send_until_backlog(server, route, most=500)
    # More than the bound: the kernel's buffers and the peer's own queue are full as well.
    assert Limits().routed_messages <= accepted < 500
    assert server.counters["backlog"] == 1
    other.send(server.address, b"question")
    server.send(received(server, other).source, b"answer")
    assert received(other, server) == Received(server.address, b"answer")


def test_an_answer_to_a_peer_that_is_gone_is_counted(make_endpoint, received, pump) -> None:
    server, client = make_endpoint(), make_endpoint()
    client.send(server.address, b"hello")
    source = received(server, client).source
    client.close()

    def refused(_: object) -> bool:
        # What is sent while the connection is ending may still be accepted.
        server.send(source, b"too late")
        return server.counters["unroutable"] > 0

    pump(server, done=refused)
    server.send(source, b"too late")
    server.send(Route(b"never met"), b"hello?")
    assert server.counters["unroutable"] == 3


def test_wake_ends_a_wait_from_another_thread(make_endpoint) -> None:
    endpoint = make_endpoint()
    waker = threading.Thread(target=endpoint.wake)
    started = time.monotonic()
    waker.start()
    assert endpoint.receive(60.0) == []
    assert time.monotonic() - started < 60.0
    waker.join()


def test_wakes_coalesce_and_one_before_the_wait_counts(make_endpoint) -> None:
    endpoint = make_endpoint()
    for _ in range(1000):
        endpoint.wake()
    assert endpoint.receive(None) == []
    started = time.monotonic()
    assert endpoint.receive(0.05) == []
    assert time.monotonic() - started >= 0.05


def test_wake_after_close_does_nothing(make_endpoint) -> None:
    endpoint = make_endpoint()
    endpoint.close()
    with open("/dev/null", "rb") as reuses_the_descriptor:
        endpoint.wake()
        assert reuses_the_descriptor.read() == b""
    endpoint.close()


def test_an_idle_endpoint_uses_no_cpu(make_endpoint, received) -> None:
    server, client = make_endpoint(), make_endpoint()
    client.send(server.address, b"hello")
    received(server, client)
    before = time.process_time()
    client.receive(1.0)
    assert time.process_time() - before < 0.1


def _resources() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def test_closed_endpoints_leave_neither_descriptors_nor_threads(make_endpoint, received, lost) -> None:
    def live_and_die() -> None:
        server, client = make_endpoint(), make_endpoint()
        client.send(server.address, b"hello")
        received(server, client)
        client.send("tcp://127.0.0.1:1", b"refused")
        lost(client)
        client.dial("tcp://127.0.0.1:1")
        client.close()
        server.close()

    live_and_die()
    before = _resources()
    for _ in range(20):
        live_and_die()
    assert _resources() == before


def test_lost_connections_leave_no_descriptors(make_endpoint, lost) -> None:
    endpoint = make_endpoint()

    def dial_and_lose() -> None:
        endpoint.send("tcp://127.0.0.1:1", b"hello")
        lost(endpoint)

    for _ in range(5):
        dial_and_lose()
    before = _resources()
    for _ in range(50):
        dial_and_lose()
    # libzmq closes the last sockets in a thread of its own, so before and now may both hold some.
    descriptors, threads = _resources()
    assert descriptors < before[0] + 50
    assert threads == before[1]


def test_a_failed_start_leaves_no_descriptors(make_endpoint) -> None:
    taken = make_endpoint()
    port = int(taken.address.rsplit(":", 1)[1])

    def fail() -> None:
        with pytest.raises(AddressError):
            make_endpoint(port=port)

    fail()
    before = _resources()
    for _ in range(10):
        fail()
    assert _resources() == before


def test_close_does_not_wait_for_a_peer_that_does_not_read(make_endpoint) -> None:
    endpoint = make_endpoint()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for _ in range(10):
            endpoint.send(f"tcp://127.0.0.1:{silent.getsockname()[1]}", b"x" * 100_000)
        endpoint.close()


def test_frames_accepted_before_close_are_delivered(make_endpoint, received, pump) -> None:
    server, client = make_endpoint(), make_endpoint()
    client.send(server.address, b"hello")
    received(server, client)
    for number in range(100):
        client.send(server.address, b"%d" % number)
    client.close()
    events = pump(server, done=lambda seen: len(seen[server]) == 100)[server]
    assert [event.frame for event in events] == [b"%d" % number for number in range(100)]


def test_a_slow_peer_is_back_pressure_and_nothing_accepted_is_lost(make_endpoint, received, pump) -> None:
    limits = Limits(high_water_messages=8, routed_messages=8, heartbeat_s=20.0)
    server, client = make_endpoint(limits=limits), make_endpoint(limits=limits)
    client.send(server.address, b"hello")
    route = received(server, client).source
    for sender, to, receiver in ((client, server.address, server), (server, route, client)):
        accepted = _send_until_backlog(sender, to)
        assert sender.counters["backlog"] == 1
        events = pump(receiver, done=lambda seen, r=receiver, n=accepted: len(seen[r]) == n)[receiver]
        assert [int(event.frame[:8]) for event in events] == list(range(accepted))
        sender.send(to, b"and on it goes")
        assert received(receiver).frame == b"and on it goes"


def _send_until_backlog(sender: Endpoint, to: str | Route, most: int = 100_000) -> int:
    """How many frames were accepted before Backlog was raised."""
    for number in range(most):
        try:
            sender.send(to, b"%08d" % number + bytes(100_000))
        except Backlog:
            return number
    raise AssertionError("no back-pressure")


def test_many_threads_send_to_one_without_loss_or_mixing(make_endpoint, pump) -> None:
    threads, frames_each = 8, 10_000
    server = make_endpoint()
    all_arrived = threading.Event()

    def send_all(number: int) -> None:
        security = Security.choose("127.0.0.1", [SECRET])
        with Endpoint("127.0.0.1", security, AllowedRanges()) as endpoint:
            for count in range(frames_each):
                _send_patiently(endpoint, server.address, b"%d %d " % (number, count) + b"%d" % number * 50)
            all_arrived.wait(DEADLINE_S)

    senders = [threading.Thread(target=send_all, args=(number,)) for number in range(threads)]
    for sender in senders:
        sender.start()
    try:
        events = pump(server, done=lambda seen: len(seen[server]) >= threads * frames_each)[server]
    finally:
        all_arrived.set()
        for sender in senders:
            sender.join()
    counts = [0] * threads
    for event in events:
        number, count, filling = event.frame.split()
        assert int(count) == counts[int(number)]
        assert filling == number * 50, event
        counts[int(number)] += 1
    assert counts == [frames_each] * threads


def _send_patiently(endpoint: Endpoint, address: str, frame: bytes) -> None:
    while True:
        try:
            return endpoint.send(address, frame)
        except Backlog:
            assert endpoint.receive(0.001) == []


def test_keys_rotate_without_a_gap(make_endpoint, received) -> None:
    old, new = b"the old secret of this cluster", b"the new secret of this cluster"
    # The steps of a rotation; at each, some processes are a step behind.
    steps = [(old,), (old, new), (new, old), (new,)]
    for before, after in itertools.pairwise(steps):
        for server_secrets, client_secrets in ((before, after), (after, before)):
            server, client = make_endpoint(server_secrets), make_endpoint(client_secrets)
            assert server.key_id == ClusterKeys(server_secrets[0]).key_id
            client.send(server.address, b"hello", key_id=server.key_id)
            assert received(server, client).frame == b"hello"
            server.close()
            client.close()


def test_a_key_that_we_do_not_have_is_refused_before_dialling(make_endpoint) -> None:
    server, client = make_endpoint((b"some other secret, just as long.",)), make_endpoint()
    with pytest.raises(AddressError, match=server.key_id):
        client.dial(server.address, server.key_id)
