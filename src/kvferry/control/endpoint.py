"""All control sockets of one process, for the one thread that owns them.

A process listens on one ROUTER and dials each peer with a DEALER of its own. What ZMQ does silently (a refused
connection, a failed handshake, a peer that is gone) is read from socket monitors and becomes an event or a count,
so that nobody has to wait for a time-out to learn of it. Frames are opaque here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import math
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import zmq

from kvferry.control import addresses
from kvferry.control.addresses import AddressError, AllowedRanges
from kvferry.control.security import Security, ZapServer

__all__ = ["AddressError", "Backlog", "Endpoint", "Event", "FrameTooLarge", "Limits", "Lost", "Received", "Route"]

DEFAULT_MAX_FRAME_BYTES = 8 << 20

_Socket: TypeAlias = "zmq.Socket[bytes]"
_Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_BATCH = 64
"""Messages taken from one socket per `receive`, so that none starves the others."""
_NEVER_MS = 3_600_000
"""A lost connection is closed long before; ZMQ's own reconnecting would hide that it was lost."""
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_DIALLER_EVENTS = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | _HANDSHAKE_FAILURES
)
_LISTENER_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES


class Backlog(RuntimeError):
    """Back-pressure: the peer does not keep up and the frame was not accepted. Send it again later, or let it be."""


class FrameTooLarge(ValueError):
    """A frame that the peer would drop was not sent; the text has both sizes."""


class Route(NamedTuple):
    """The way back to a peer that dialled us; valid while its connection lives."""

    identity: bytes


class Received(NamedTuple):
    """A frame came. source: the Route of a peer that dialled us, or the address that we dialled."""

    source: Route | str
    frame: bytes


class Lost(NamedTuple):
    """The connection that we dialled is over and forgotten; whatever was unanswered on it will stay so."""

    address: str
    reason: str


Event: TypeAlias = Received | Lost


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of an endpoint.

    high_water_messages: kept per connection and direction before `Backlog`. max_peers: addresses dialled at a time.
    connect_s, handshake_s: how long either may take. heartbeat_s: how often a quiet connection is probed.
    linger_s: how long `close` tries to deliver what was accepted.
    """

    high_water_messages: int = 1000
    max_peers: int = 1024
    connect_s: float = 3.0
    handshake_s: float = 5.0
    heartbeat_s: float = 3.0
    linger_s: float = 0.2

    @property
    def silence_s(self) -> float:
        """A peer that neither answers a probe nor reads for this long is lost: noticed in heartbeat_s + silence_s."""
        return 3 * self.heartbeat_s


class _Monitor:
    """What libzmq says happens to one socket's connections."""

    _numbers = itertools.count()

    def __init__(self, context: _Context, watched: _Socket, events: int) -> None:
        address = f"inproc://monitor-{next(self._numbers)}"
        watched.monitor(address, events)
        self.socket = context.socket(zmq.PAIR)
        # On a full monitor libzmq's I/O thread would block, holding a lock that closing needs.
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.connect(address)

    def read(self) -> Iterator[tuple[int, int]]:
        """Events waiting now, at most a batch: (event, value). What the value means depends on the event."""
        for frames in _take(self.socket):
            yield struct.unpack("=Hi", frames[0])


class _Peer:
    """One connection that we dialled."""

    def __init__(self, address: str, socket: _Socket, monitor: _Monitor, limits: Limits) -> None:
        self.address = address
        self.socket = socket
        self.monitor = monitor
        self.lost_reason: str | None = None
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
            "the peer closed the connection during the handshake: it has another secret, or only one side has any, or"
            " it is no kvferry endpoint"
        )


class Endpoint:
    """Sends to and receives from any number of peers. One thread uses it; only `wake` may be called from others.

    address: "tcp://host:port" with the real port, for peers to dial. counters: what was dropped, by cause.
    """

    def __init__(
        self,
        host: str,
        security: Security,
        allowed: AllowedRanges,
        port: int = 0,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        limits: Limits | None = None,
    ) -> None:
        """Listens on `host` (numeric, or a name, which is resolved here), on any free port if `port` is 0.

        Raises AddressError for a host that can't be bound or a port in use.
        """
        self.max_frame_bytes = max_frame_bytes
        self.counters = dict.fromkeys(
            ("malformed", "oversized", "handshake_failed", "disconnected", "unroutable", "backlog"), 0
        )
        self._security = security
        self._allowed = allowed
        self._limits = limits or Limits()
        self._peers: dict[str, _Peer] = {}
        self._open_connections: dict[int, int] = {}
        self._handshakes = 0
        self._unattributed_failures = 0
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: _Context = zmq.Context()
        # A dialled peer takes three: its DEALER and both ends of the monitor.
        self._context.set(zmq.MAX_SOCKETS, 3 * self._limits.max_peers + 16)
        try:
            self._zap = ZapServer(self._context, security)
            self._listener = self._make_socket(zmq.ROUTER, host)
            self._monitor = _Monitor(self._context, self._listener, _LISTENER_EVENTS)
            self.address = self._listen(host, port)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        for readable in (self._wake_fd, self._zap.socket, self._monitor.socket, self._listener):
            self._poller.register(readable, zmq.POLLIN)

    @property
    def key_id(self) -> str:
        """Names the key of this listener, to travel beside `address`; empty when open."""
        return self._security.key_id

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def dial(self, address: str, key_id: str | None = None) -> None:
        """Starts a connection unless there is one. Never blocks; the outcome is silence, or a `Lost` later.

        key_id: names the peer's key, from its record; None or empty: our first. Raises AddressError (a form, a range, a name
        instead of a number, a key that we do not have, no secret for a host that is not loopback, too many peers).
        """
        if address not in self._peers:
            self._peers[address] = self._connect(address, key_id)

    def send(self, to: str | Route, frame: bytes, key_id: str | None = None) -> None:
        """Sends one frame to an address (dialled if need be, see `dial`), or back along a Route. Never blocks.

        A frame for a Route whose peer is gone is counted as unroutable. Raises AddressError, Backlog, FrameTooLarge.
        """
        if len(frame) > self.max_frame_bytes:
            raise FrameTooLarge(f"frame of {len(frame)} bytes for {to}: at most {self.max_frame_bytes} are accepted")
        try:
            if isinstance(to, Route):
                self._listener.send_multipart([to.identity, frame], zmq.NOBLOCK)
            else:
                self.dial(to, key_id)
                self._peers[to].socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self.counters["backlog"] += 1
            raise Backlog(f"{self._limits.high_water_messages} messages wait for {to}") from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.counters["unroutable"] += 1

    def forget(self, address: str) -> None:
        """Ends the connection to an address, if there is one, without an event; queued frames may be lost."""
        peer = self._peers.pop(address, None)
        if peer is None:
            return
        for socket in (peer.socket, peer.monitor.socket):
            self._poller.unregister(socket)
            socket.close(linger=0)

    def receive(self, timeout_s: float | None) -> list[Event]:
        """Waits at most timeout_s (None: for ever) for something to happen; returns what did, in order per peer.

        Empty after a time-out or a `wake`, and also when all that happened was a peer coming or garbage being
        dropped. What a peer sent before it was lost comes before its `Lost`.
        """
        ending = any(peer.lost_reason for peer in self._peers.values())
        timeout_ms = 0 if ending else None if timeout_s is None else math.ceil(timeout_s * 1000)
        ready = {readable for readable, _ in self._poller.poll(timeout_ms)}
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._zap.socket in ready:
            self._zap.serve(_BATCH)
        if self._monitor.socket in ready:
            self._watch_listener()
        events: list[Event] = []
        if self._listener in ready:
            events += self._receive_routed()
        for peer in list(self._peers.values()):
            if peer.lost_reason or peer.socket in ready or peer.monitor.socket in ready:
                events += self._receive_from(peer)
        return events

    def wake(self) -> None:
        """Ends a `receive` that waits, or the next one. From any thread, at any time, also after `close`."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Closes every socket; takes linger_s at most to deliver what was accepted. Idempotent."""
        with self._wake_lock:
            if self._wake_fd < 0:
                return
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._peers.clear()
        self._context.destroy(linger=round(self._limits.linger_s * 1000))

    def _listen(self, host: str, port: int) -> str:
        numeric = addresses.advertised_host(host, {})
        if not self._security.protects(numeric):
            raise AddressError(f"host {numeric} is not loopback and there is no secret")
        try:
            self._listener.bind(addresses.join(numeric, port))
        except zmq.ZMQError as error:
            raise AddressError(f"can't listen on {addresses.join(numeric, port)}: {error.strerror}") from None
        bound = self._listener.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return addresses.join(numeric, addresses.parse(bound)[1])

    def _connect(self, address: str, key_id: str | None) -> _Peer:
        host, _ = addresses.parse(address)
        if not addresses.is_numeric(host):
            raise AddressError(f"{address!r}: looking up a name would block; the address of a peer must be numeric")
        target = self._allowed.check(address)
        if not self._security.protects(host):
            raise AddressError(f"{address!r} is not loopback and there is no secret: set KVFERRY_SECRET")
        if len(self._peers) >= self._limits.max_peers:
            raise AddressError(f"{address}: {len(self._peers)} peers are dialled already, the most allowed")
        try:
            peer = self._make_peer(address, target, key_id)
        except zmq.ZMQError as error:
            raise AddressError(f"{address} can't be dialled: {error.strerror}") from None
        for readable in (peer.socket, peer.monitor.socket):
            self._poller.register(readable, zmq.POLLIN)
        return peer

    def _make_peer(self, address: str, target: str, key_id: str | None) -> _Peer:
        with contextlib.ExitStack() as on_failure:
            socket = self._make_socket(zmq.DEALER, addresses.parse(target)[0])
            on_failure.callback(socket.close, linger=0)
            self._security.secure_dialler(socket, key_id)
            monitor = _Monitor(self._context, socket, _DIALLER_EVENTS)
            on_failure.callback(monitor.socket.close, linger=0)
            socket.connect(target)
            on_failure.pop_all()
        return _Peer(address, socket, monitor, self._limits)

    def _make_socket(self, kind: int, host: str) -> _Socket:
        socket = self._context.socket(kind)
        limits = self._limits
        options = {
            zmq.IPV6: int(":" in host),
            zmq.SNDHWM: limits.high_water_messages,
            zmq.RCVHWM: limits.high_water_messages,
            # ZMQ ends the connection beyond this without a word; a smaller excess is dropped and counted here.
            zmq.MAXMSGSIZE: 2 * self.max_frame_bytes + 1024,
            zmq.HANDSHAKE_IVL: _ms(limits.handshake_s),
            zmq.HEARTBEAT_IVL: _ms(limits.heartbeat_s),
            zmq.HEARTBEAT_TIMEOUT: _ms(limits.silence_s),
            zmq.HEARTBEAT_TTL: _ms(limits.silence_s),
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_MAXRT: _ms(limits.silence_s),
        }
        if kind == zmq.ROUTER:
            options |= {zmq.ROUTER_MANDATORY: 1, zmq.ROUTER_HANDOVER: 0, zmq.BACKLOG: 1024}
            self._security.secure_listener(socket)
        else:
            options |= {zmq.CONNECT_TIMEOUT: _ms(limits.connect_s), zmq.RECONNECT_IVL: _NEVER_MS}
        for option, value in options.items():
            socket.set(option, value)
        return socket

    def _receive_routed(self) -> Iterator[Received]:
        for identity, *frames in _take(self._listener):
            if self._is_sound(frames):
                yield Received(Route(identity), frames[0])

    def _receive_from(self, peer: _Peer) -> Iterator[Event]:
        # The monitor first: what a peer sent before it was lost is then already in its DEALER.
        peer.watch()
        taken = 0
        for frames in _take(peer.socket):
            taken += 1
            if self._is_sound(frames):
                yield Received(peer.address, frames[0])
        if peer.lost_reason and taken < _BATCH:
            self.forget(peer.address)
            yield Lost(peer.address, peer.lost_reason)

    def _is_sound(self, frames: Sequence[bytes]) -> bool:
        """Whether a message is one frame, neither empty nor too large; counts it if not."""
        if len(frames) != 1 or not frames[0]:
            self.counters["malformed"] += 1
        elif len(frames[0]) > self.max_frame_bytes:
            self.counters["oversized"] += 1
        else:
            return True
        return False

    def _watch_listener(self) -> None:
        """Counts connections that ended, before or after their handshake.

        Only ACCEPTED and DISCONNECTED say which connection is meant (by its descriptor), and strangers that do not
        even speak ZMTP cause no failure event. So a connection during which no handshake succeeded has failed.
        """
        for event, value in self._monitor.read():
            if event == zmq.EVENT_ACCEPTED:
                self._open_connections[value] = self._handshakes
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshakes += 1
            elif event != zmq.EVENT_DISCONNECTED:
                self.counters["handshake_failed"] += 1
                self._unattributed_failures += 1
            else:
                handshakes_before = self._open_connections.pop(value, None)
                if self._unattributed_failures:
                    self._unattributed_failures -= 1
                elif handshakes_before == self._handshakes:
                    self.counters["handshake_failed"] += 1
                else:
                    self.counters["disconnected"] += 1


def _take(socket: _Socket) -> Iterator[list[bytes]]:
    """Messages that wait on a socket, at most a batch."""
    for _ in range(_BATCH):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
