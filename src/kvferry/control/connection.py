"""What libzmq's socket monitors say of connections: which one is lost and why, and how many never became one."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import struct
import time
from collections.abc import Iterator
from typing import TypeAlias

import zmq

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

BATCH = 64
"""Messages taken from one socket at a time, so that none starves the others."""

_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
DIALLER_EVENTS = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | _HANDSHAKE_FAILURES
)
_LISTENER_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of an endpoint.

    high_water_messages: kept per connection before `Backlog`, and from a peer that dialled before it must wait.
    routed_messages: the same for what waits to go back along one Route, which is less, since a stranger chooses how
    many Routes there are and what is asked.
    max_peers: addresses dialled at a time. connect_s, handshake_s: how long either may take. heartbeat_s: how often a
    quiet connection is probed. idle_s: a dialled peer with nothing sent or received for so long is forgotten.
    linger_s: how long `close` tries to deliver what was accepted.
    """

    high_water_messages: int = 1000
    # libzmq may take up to half of a bound for waiting still; the other half takes a batch's answers.
    routed_messages: int = 2 * BATCH
    max_peers: int = 1024
    connect_s: float = 3.0
    handshake_s: float = 5.0
    heartbeat_s: float = 3.0
    idle_s: float = 300.0
    linger_s: float = 0.2

    @property
    def silence_s(self) -> float:
        """A peer that neither answers a probe nor reads for this long is lost: noticed in heartbeat_s + silence_s."""
        return 3 * self.heartbeat_s


def take(socket: Socket) -> Iterator[list[bytes]]:
    """Messages that wait on a socket, at most a batch."""
    for _ in range(BATCH):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class Monitor:
    """What libzmq says happens to one socket's connections. `stop` it before the watched socket is closed."""

    _numbers = itertools.count()

    def __init__(self, context: Context, watched: Socket, events: int) -> None:
        address = f"inproc://monitor-{next(self._numbers)}"
        watched.monitor(address, events)
        self._watched = watched
        self.socket = context.socket(zmq.PAIR)
        # On a full monitor libzmq's I/O thread would block, holding a lock that closing needs.
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.connect(address)

    def stop(self) -> None:
        """No more events. Without it libzmq's I/O thread goes on to tell of a socket that is being closed; with nobody
        left to be told it waits for ever, and with it every connection of the context."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)

    def read(self) -> Iterator[tuple[int, int]]:
        """Events waiting now, at most a batch: (event, value). What the value means depends on the event."""
        for frames in take(self.socket):
            yield struct.unpack("=Hi", frames[0])


class DialledPeer:
    """One connection that we dialled. used_at_s: when a frame last went either way (monotonic clock)."""

    def __init__(self, address: str, socket: Socket, monitor: Monitor, limits: Limits) -> None:
        self.address = address
        self.socket = socket
        self.monitor = monitor
        self.lost_reason: str | None = None
        self.used_at_s = time.monotonic()
        self._limits = limits
        self._established = False

    def watch(self) -> None:
        """Reads the monitor; the first event that ends the connection gives the reason."""
        for event, value in self.monitor.read():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._established = True
            else:
                self.lost_reason = self.lost_reason or self._reason(event, value)

    def _reason(self, event: int, value: int) -> str:
        if event in (zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED):
            return f"can't connect: refused, not reachable or silent for {self._limits.connect_s:g} s"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"the peer refused our key (status {value})"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return "one side has a secret and the other has none"
            return f"the handshake broke ZMTP's rules (0x{value:x})"
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
            return f"no handshake within {self._limits.handshake_s:g} s"
        if self._established:
            return f"the connection ended: peer closed it, or was silent for {self._limits.silence_s:g} s"
        return (
            "the connection ended during the handshake: the peer has another secret, only one side has any, or it is no"
            " kvferry endpoint"
        )


class ListenerWatch:
    """Counts the listener's connections that ended, before or after their handshake.

    Only ACCEPTED and DISCONNECTED say which connection is meant (by its descriptor), and strangers that do not even
    speak ZMTP cause no failure event. So a connection during which no handshake succeeded counts as a failed one.
    """

    def __init__(self, context: Context, listener: Socket, counters: dict[str, int]) -> None:
        """counters: "handshake_failed" and "disconnected" are counted up."""
        self._monitor = Monitor(context, listener, _LISTENER_EVENTS)
        self.socket = self._monitor.socket
        self._counters = counters
        self._handshakes = 0
        self._handshakes_at_accept: dict[int, int] = {}
        self._unattributed_failures = 0

    def stop(self) -> None:
        """As of a Monitor."""
        self._monitor.stop()

    def read(self) -> None:
        """Takes what the monitor has, at most a batch."""
        for event, value in self._monitor.read():
            if event == zmq.EVENT_ACCEPTED:
                self._handshakes_at_accept[value] = self._handshakes
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshakes += 1
            elif event == zmq.EVENT_DISCONNECTED:
                self._ended(self._handshakes_at_accept.pop(value, None))
            else:
                self._counters["handshake_failed"] += 1
                self._unattributed_failures += 1

    def _ended(self, handshakes_at_accept: int | None) -> None:
        if self._unattributed_failures:
            self._unattributed_failures -= 1
        elif handshakes_at_accept == self._handshakes:
            self._counters["handshake_failed"] += 1
        else:
            self._counters["disconnected"] += 1
