"""All control sockets of one process, for the one thread that owns them.

A process listens on one ROUTER and dials each peer with a DEALER of its own. What ZMQ does silently (a refused
connection, a failed handshake, a peer that is gone) is read from socket monitors and becomes an event or a count,
so that nobody has to wait for a time-out to learn of it. Frames are opaque here.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import zmq

from kvferry.control import addresses
from kvferry.control.addresses import AddressError, AllowedRanges
from kvferry.control.connection import (
    BATCH,
    DIALLER_EVENTS,
    Context,
    DialledPeer,
    Limits,
    ListenerWatch,
    Monitor,
    Socket,
    take,
)
from kvferry.control.security import Security, ZapServer

__all__ = [
    "AddressError",
    "Backlog",
    "Endpoint",
    "Event",
    "Forgotten",
    "FrameTooLarge",
    "HostNotHere",
    "Limits",
    "Lost",
    "Received",
    "Route",
]

DEFAULT_MAX_FRAME_BYTES = 8 << 20

_IDLE_CHECK_S = 60.0
"""How often idle peers are looked for, so how often they wake a loop in which nothing else happens."""

_NEVER_MS = 3_600_000
"""A lost connection is closed long before; ZMQ's own reconnecting would hide that it was lost."""


class Backlog(RuntimeError):
    """Back-pressure: the peer does not keep up and the frame was not accepted. Send it again later, or let it be."""


class HostNotHere(AddressError):
    """The host to listen on is no address of this machine."""


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


class Forgotten(NamedTuple):
    """A connection that we dialled was closed since nobody used it. The next frame dials anew, and may find another."""

    address: str


Event: TypeAlias = Received | Lost | Forgotten


class Endpoint:
    """Sends to and receives from any number of peers. One thread uses it; only `wake` may be called from others.

    address: "tcp://host:port", canonical and with the real port, for peers to dial. counters: what was dropped, by
    cause.
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

        Raises HostNotHere for a host of another machine, AddressError for one that can't be bound or a port in use.
        """
        numeric = addresses.advertised_host(host, {})
        if not security.protects(numeric):
            raise AddressError(f"host {numeric} is not loopback and there is no secret: set KVFERRY_SECRET")
        self.max_frame_bytes = max_frame_bytes
        self.counters = dict.fromkeys(
            ("malformed", "oversized", "handshake_failed", "disconnected", "unroutable", "backlog"), 0
        )
        self._security = security
        self._allowed = allowed
        self._limits = limits or Limits()
        self._peers: dict[str, DialledPeer] = {}
        self._watch: ListenerWatch | None = None
        self._idle_check_at_s = 0.0
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context: Context = zmq.Context()
        # A dialled peer takes three: its DEALER and both ends of the monitor.
        self._context.set(zmq.MAX_SOCKETS, 3 * self._limits.max_peers + 16)
        try:
            self._zap = ZapServer(self._context, security)
            self._listener = self._make_socket(zmq.ROUTER, numeric)
            self._watch = ListenerWatch(self._context, self._listener, self.counters)
            self.address = self._listen(numeric, port)
        except BaseException:
            self.close()
            raise
        watch = self._watch
        self._poller = zmq.Poller()
        for readable in (self._wake_fd, self._zap.socket, watch.socket, self._listener):
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

        key_id: names the peer's key, from its record; None or empty: our first. Raises AddressError: a bad form or one
        that is not canonical, out of range, a name instead of a number, an unknown key, no secret though it is not
        loopback, too many peers.
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
                self._send_dialled(to, frame, key_id)
        except zmq.Again:
            self.counters["backlog"] += 1
            limits = self._limits
            most = limits.routed_messages if isinstance(to, Route) else limits.high_water_messages
            raise Backlog(f"{most} messages wait for {to}") from None
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
        peer.monitor.stop()
        peer.socket.close(linger=0)

    def receive(self, timeout_s: float | None) -> list[Event]:
        """Waits at most timeout_s (None: for ever) for something to happen; returns what did, in order per peer.

        Empty after a time-out or a `wake`, and also when all that happened was a peer coming or garbage being dropped.
        What a peer sent before it was lost comes before its `Lost`.
        """
        ready = {readable for readable, _ in self._poller.poll(self._timeout_ms(timeout_s))}
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._zap.socket in ready:
            self._zap.serve(BATCH)
        if self._watch is not None and self._watch.socket in ready:
            self._watch.read()
        events: list[Event] = []
        if self._listener in ready:
            events += self._receive_routed()
        for peer in list(self._peers.values()):
            if peer.lost_reason or peer.socket in ready or peer.monitor.socket in ready:
                events += self._receive_from(peer)
        events += self._forget_idle()
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
        for peer in self._peers.values():
            peer.monitor.stop()
        if self._watch is not None:
            self._watch.stop()
        self._peers.clear()
        self._context.destroy(linger=round(self._limits.linger_s * 1000))

    def _listen(self, numeric: str, port: int) -> str:
        try:
            self._listener.bind(addresses.join(numeric, port))
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise HostNotHere(f"host {numeric} is no address of this machine") from None
            # pyzmq's own text ends with the address once more.
            why = zmq.strerror(error.errno or 0)
            raise AddressError(f"can't listen on {addresses.join(numeric, port)}: {why}") from None
        bound = self._listener.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        return addresses.join(numeric, int(bound.rpartition(":")[2]))

    def _connect(self, address: str, key_id: str | None) -> DialledPeer:
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

    def _make_peer(self, address: str, target: str, key_id: str | None) -> DialledPeer:
        with contextlib.ExitStack() as on_failure:
            socket = self._make_socket(zmq.DEALER, addresses.parse(target)[0])
            on_failure.callback(socket.close, linger=0)
            self._security.secure_dialler(socket, key_id)
            monitor = Monitor(self._context, socket, DIALLER_EVENTS)
            on_failure.callback(monitor.stop)
            socket.connect(target)
            on_failure.pop_all()
        return DialledPeer(address, socket, monitor, self._limits)

    def _make_socket(self, kind: int, host: str) -> Socket:
        socket = self._context.socket(kind)
        limits = self._limits
        options = {
            zmq.IPV6: int(":" in host),
            # ZMQ ends the connection beyond this without a word; a smaller excess is dropped and counted here.
            zmq.MAXMSGSIZE: 2 * self.max_frame_bytes + 1024,
            zmq.HANDSHAKE_IVL: _ms(limits.handshake_s),
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: max(1, round(limits.silence_s)),
            zmq.TCP_KEEPALIVE_INTVL: max(1, round(limits.heartbeat_s)),
            zmq.TCP_KEEPALIVE_CNT: 3,
            zmq.TCP_MAXRT: _ms(limits.silence_s),
        }
        # libzmq 4.3.5 aborts the process when it probes a peer that left while more waited than may be received. So
        # only diallers probe, and take in whatever comes; a listener leaves it to TCP to notice a host that is gone.
        if kind == zmq.ROUTER:
            options |= {
                zmq.SNDHWM: limits.routed_messages,
                zmq.RCVHWM: limits.high_water_messages,
                zmq.ROUTER_MANDATORY: 1,
                zmq.ROUTER_HANDOVER: 0,
                zmq.BACKLOG: 1024,
            }
            self._security.secure_listener(socket)
        else:
            options |= {
                zmq.SNDHWM: limits.high_water_messages,
                zmq.RCVHWM: 0,
                zmq.HEARTBEAT_IVL: _ms(limits.heartbeat_s),
                zmq.HEARTBEAT_TIMEOUT: _ms(limits.silence_s),
                zmq.HEARTBEAT_TTL: _ms(limits.silence_s),
                zmq.CONNECT_TIMEOUT: _ms(limits.connect_s),
                zmq.RECONNECT_IVL: _NEVER_MS,
            }
        for option, value in options.items():
            socket.set(option, value)
        return socket

    def _send_dialled(self, address: str, frame: bytes, key_id: str | None) -> None:
        self.dial(address, key_id)
        peer = self._peers[address]
        peer.socket.send(frame, zmq.NOBLOCK)
        peer.used_at_s = time.monotonic()

    def _timeout_ms(self, timeout_s: float | None) -> int | None:
        """How long `receive` may wait: not at all with an ended peer to report, else until idle peers are due."""
        if any(peer.lost_reason for peer in self._peers.values()):
            return 0
        if self._peers:
            until_check_s = max(0.0, self._idle_check_at_s - time.monotonic())
            timeout_s = until_check_s if timeout_s is None else min(timeout_s, until_check_s)
        return None if timeout_s is None else math.ceil(timeout_s * 1000)

    def _forget_idle(self) -> Iterator[Forgotten]:
        """Closes dialled connections that nobody uses; a peer's next frame dials anew."""
        now_s = time.monotonic()
        if now_s < self._idle_check_at_s:
            return
        self._idle_check_at_s = now_s + min(self._limits.idle_s, _IDLE_CHECK_S)
        for peer in list(self._peers.values()):
            if now_s - peer.used_at_s >= self._limits.idle_s and not peer.lost_reason:
                self.forget(peer.address)
                yield Forgotten(peer.address)

    def _receive_routed(self) -> Iterator[Received]:
        for identity, *frames in take(self._listener):
            if self._is_sound(frames):
                yield Received(Route(identity), frames[0])

    def _receive_from(self, peer: DialledPeer) -> Iterator[Event]:
        # The monitor first: what a peer sent before it was lost is then already in its DEALER.
        peer.watch()
        taken = 0
        for frames in take(peer.socket):
            taken += 1
            if self._is_sound(frames):
                yield Received(peer.address, frames[0])
        if taken:
            peer.used_at_s = time.monotonic()
        if peer.lost_reason and taken < BATCH:
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


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
