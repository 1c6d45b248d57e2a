"""Endpoints over real sockets on loopback, and the means to drive several of them from one thread."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvferry.control.addresses import AllowedRanges
from kvferry.control.endpoint import Endpoint, Event, Limits, Lost, Received
from kvferry.control.security import Security

DEADLINE_S = 30.0
"""When a test gives up waiting for what must happen; how long it takes is not what is tested."""

SECRET = b"the cluster's secret, quite long"
OTHER_SECRET = b"some other secret, just as long."

MakeEndpoint = Callable[..., Endpoint]
Pump = Callable[..., dict[Endpoint, list[Event]]]


@pytest.fixture
def make_endpoint() -> Iterator[MakeEndpoint]:
    """Makes endpoints that are closed at the end: secrets (none: open) or a Security; then Endpoint's own arguments."""
    made: list[Endpoint] = []

    def make(
        secrets: Sequence[bytes] = (SECRET,),
        host: str = "127.0.0.1",
        security: Security | None = None,
        **options: object,
    ) -> Endpoint:
        security = security or Security.choose(host, secrets)
        made.append(Endpoint(host, security, AllowedRanges(), **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


@pytest.fixture
def pump() -> Pump:
    """Runs endpoints until `done(events so far, by endpoint)`; fails after DEADLINE_S."""

    def run(*endpoints: Endpoint, done: Callable[[dict[Endpoint, list[Event]]], bool]) -> dict[Endpoint, list[Event]]:
        seen: dict[Endpoint, list[Event]] = {endpoint: [] for endpoint in endpoints}
        deadline = time.monotonic() + DEADLINE_S
        while not done(seen):
            assert time.monotonic() < deadline, f"gave up with {list(seen.values())}, {[e.counters for e in endpoints]}"
            for endpoint in endpoints:
                seen[endpoint] += endpoint.receive(0.01)
        return seen

    return run


@pytest.fixture
def received(pump: Pump) -> Callable[..., Received]:
    """Runs endpoints until the first of them receives a frame, and returns it."""

    def wait(endpoint: Endpoint, *others: Endpoint) -> Received:
        events = pump(endpoint, *others, done=lambda seen: bool(seen[endpoint]))[endpoint]
        assert isinstance(events[0], Received), events
        return events[0]

    return wait


@pytest.fixture
def lost(pump: Pump) -> Callable[..., Lost]:
    """Runs endpoints until the first of them loses a peer, and returns that event, which must be its only one."""

    def wait(endpoint: Endpoint, *others: Endpoint) -> Lost:
        (event,) = pump(endpoint, *others, done=lambda seen: bool(seen[endpoint]))[endpoint]
        assert isinstance(event, Lost), event
        return event

    return wait


class EchoProcess:
    """Another process with an endpoint that sends back every frame (echo_process.py)."""

    def __init__(self, secret: bytes, port: int = 0) -> None:
        script = Path(__file__).with_name("echo_process.py")
        command = [sys.executable, str(script), secret.decode(), str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_echo() -> Iterator[Callable[..., EchoProcess]]:
    started: list[EchoProcess] = []

    def start(port: int = 0) -> EchoProcess:
        started.append(EchoProcess(SECRET, port))
        return started[-1]

    yield start
    for echo in started:
        echo.kill()


@pytest.fixture
def quick() -> Limits:
    """Limits under which a dead peer is noticed within about two seconds."""
    return Limits(connect_s=1.0, handshake_s=1.0, heartbeat_s=0.5)
