"""Strangers and broken peers: whatever comes is counted and dropped, and the next good message is served."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvferry.control import addresses
from kvferry.control.endpoint import Endpoint, Limits, Lost
from kvferry.control.security import ClusterKeys, Security

SECRET = b"the cluster's secret, quite long"
OTHER_SECRET = b"some other secret, just as long."

MakeEndpoint = Callable[..., Endpoint]


@pytest.fixture(params=["curve", "open"])
def secrets(request: pytest.FixtureRequest) -> tuple[bytes, ...]:
    return (SECRET,) if request.param == "curve" else ()


@pytest.fixture
def foreign_dealer() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """A plain ZMQ socket with the right keys (none for no secrets), that breaks every other rule."""
    made = []
    with zmq.Context() as context:

        def dial(address: str, secrets: tuple[bytes, ...]) -> zmq.Socket[bytes]:
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            Security.choose("127.0.0.1", secrets).secure_dialler(dealer, None)
            dealer.connect(address)
            made.append(dealer)
            return dealer

        yield dial
        context.destroy(linger=0)


def count(endpoint: Endpoint, **changed: int) -> bool:
    """Whether the counters are exactly these, and 0 otherwise."""
    return endpoint.counters == {**dict.fromkeys(endpoint.counters, 0), **changed}


def assert_serves(server: Endpoint, make_endpoint: MakeEndpoint, received, secrets: tuple[bytes, ...]) -> None:
    client = make_endpoint(secrets)
    client.send(server.address, b"a good message")
    question = received(server, client)
    assert question.frame == b"a good message"
    server.send(question.source, b"a good answer")
    assert received(client, server).frame == b"a good answer"


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x07\xa3\x5c",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f" + b"\x01" * 200,
        b"\x16\x03\x01\x02\x00" + b"\x55" * 512,
        os.urandom(10_000_000),
    ],
    ids=["0 bytes", "3 bytes", "http", "zmtp with rubbish", "tls", "10 MB"],
)
def test_raw_bytes_on_the_port(make_endpoint, pump, received, secrets, garbage: bytes) -> None:
    server = make_endpoint(secrets)
    stranger = socket.create_connection(addresses.parse(server.address))
    with stranger, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        stranger.sendall(garbage)
    pump(server, done=lambda _: server.counters["handshake_failed"] == 1)
    assert_serves(server, make_endpoint, received, secrets)
    assert count(server, handshake_failed=1)


def test_a_stranger_that_says_nothing_is_shown_the_door(make_endpoint, pump, received, secrets) -> None:
    server = make_endpoint(secrets, limits=Limits(handshake_s=1.0))
    with socket.create_connection(addresses.parse(server.address)) as stranger:
        pump(server, done=lambda _: server.counters["handshake_failed"] == 1)
        stranger.settimeout(30)
        while stranger.recv(100):
            pass
    assert_serves(server, make_endpoint, received, secrets)


def test_many_strangers_are_counted_one_by_one(make_endpoint, pump, received, secrets) -> None:
    server = make_endpoint(secrets)
    assert_serves(server, make_endpoint, received, secrets)
    for _ in range(50):
        with socket.create_connection(addresses.parse(server.address)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    pump(server, done=lambda _: server.counters["handshake_failed"] == 50)
    assert_serves(server, make_endpoint, received, secrets)
    assert server.counters["handshake_failed"] == 50


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"a", b"b"], [b"", b"with a delimiter"], [b"x"] * 10_000],
    ids=["empty", "two", "a REQ socket's", "ten thousand"],
)
def test_messages_that_are_not_one_frame(make_endpoint, pump, received, secrets, foreign_dealer, frames) -> None:
    server = make_endpoint(secrets)
    dealer = foreign_dealer(server.address, secrets)
    dealer.send_multipart(frames)
    dealer.send(b"from the same peer, in order")
    assert received(server).frame == b"from the same peer, in order"
    assert count(server, malformed=1)
    assert_serves(server, make_endpoint, received, secrets)


def test_answers_that_are_not_one_frame(make_endpoint, pump, received) -> None:
    client = make_endpoint(())
    with zmq.Context() as context, context.socket(zmq.DEALER) as server:
        server.linger = 0
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.send(f"tcp://127.0.0.1:{port}", b"hello")
        pump(client, done=lambda _: bool(server.poll(0)))
        for frames in ([b"one", b"two"], [b""], [b"good"]):
            server.send_multipart(frames)
        assert received(client).frame == b"good"
    assert count(client, malformed=2)


def test_a_frame_over_the_limit_is_counted_and_the_connection_lives(
    make_endpoint, received, secrets, foreign_dealer
) -> None:
    server = make_endpoint(secrets)
    dealer = foreign_dealer(server.address, secrets)
    dealer.send(bytes(10 << 20))
    dealer.send(b"small again")
    assert received(server).frame == b"small again"
    assert count(server, oversized=1)


def test_a_frame_far_over_the_limit_ends_the_connection(make_endpoint, pump, received, secrets, foreign_dealer) -> None:
    server = make_endpoint(secrets, max_frame_bytes=1000)
    foreign_dealer(server.address, secrets).send(bytes(1 << 20))
    pump(server, done=lambda _: server.counters["disconnected"] == 1)
    assert_serves(server, make_endpoint, received, secrets)
    assert count(server, disconnected=1)


def test_another_secret_is_a_loss_with_a_reason(make_endpoint, pump, lost, received) -> None:
    server, client = make_endpoint(), make_endpoint((OTHER_SECRET,))
    client.send(server.address, b"let me in")
    event = lost(client, server)
    assert event.address == server.address
    assert "another secret" in event.reason
    pump(server, done=lambda _: server.counters["handshake_failed"] == 1)
    assert_serves(server, make_endpoint, received, (SECRET,))
    assert count(server, handshake_failed=1)


def test_a_client_key_that_is_not_accepted_is_a_loss_with_a_reason(make_endpoint, pump, lost, received) -> None:
    # The client knows the server's public key, but its own key is of a secret that is not accepted there.
    server = make_endpoint()
    keys = ClusterKeys(OTHER_SECRET)
    keys.server_public = ClusterKeys(SECRET).server_public
    client = make_endpoint(security=Security([keys]))
    client.send(server.address, b"let me in")
    assert lost(client, server) == Lost(server.address, "the peer refused our key (status 400)")
    pump(server, done=lambda _: server.counters["handshake_failed"] == 1)
    assert_serves(server, make_endpoint, received, (SECRET,))


@pytest.mark.parametrize("server_secrets", [(SECRET,), ()], ids=["plain to curve", "curve to plain"])
def test_one_side_without_a_secret_is_a_loss_with_a_reason(
    make_endpoint, pump, lost, received, server_secrets: tuple[bytes, ...]
) -> None:
    client_secrets = () if server_secrets else (SECRET,)
    server, client = make_endpoint(server_secrets), make_endpoint(client_secrets)
    client.send(server.address, b"let me in")
    assert "secret" in lost(client, server).reason
    pump(server, done=lambda _: server.counters["handshake_failed"] == 1)
    assert_serves(server, make_endpoint, received, server_secrets)
    assert count(server, handshake_failed=1)


def test_nothing_of_a_stranger_is_ever_delivered(make_endpoint, pump, secrets, foreign_dealer) -> None:
    server = make_endpoint((SECRET,))
    for wrong in ((), (OTHER_SECRET,)):
        foreign_dealer(server.address, wrong).send(b"let me in")
    seen = pump(server, done=lambda _: server.counters["handshake_failed"] >= 2)
    assert seen[server] == []
