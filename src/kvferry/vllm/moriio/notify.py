"""MoRIIO's notifications: what a consumer tells a producer's socket when it has done with transfers, and its reading.

On the wire a release is {"type": "release", "transfer_id": ..., "consumer_tp_size": n} in msgpack; older peers leave
the size out, or send the bare id. It travels in the clear and names no rank: a rendezvous of kvferry's takes it where
it runs open, and counts each connection as one rank. kvferry's own engines send each other another message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import zmq

from kvferry.control import addresses
from kvferry.protocol.messages import MoriioRelease
from kvferry.vllm.moriio.ranks import MoRIIOTransferAck

logger = logging.getLogger(__name__)

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[Socket]"

_LINGER_MS = 1000
"""How long a closed connection still delivers."""
WAIT_S = 10.0
"""How long a message waits for room in the queue to its peer."""


class Notifier:
    """One connection to each peer, for any thread: by the connection a peer that counts ranks tells them apart."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        """wait_s: how long a peer may take nothing while more is queued than the connection holds, 1000 messages."""
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._context: Context | None = None
        self._connections: dict[str, _Connection] = {}

    def send_notify(
        self,
        req_ids: list[str] | str,
        remote_ip: str,
        remote_port: int | str,
        message_type: str | None = None,
        message_fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Sends one message for each id: the bare id, or with a message_type a map of it, the id and message_fields.

        Returns when the messages are queued; a peer that is not there gets them when it comes. Blocks while the queue
        is full. Without an address nothing is sent, and ids that are empty or no text are left out; both are logged.
        Raises ValueError for a port that is none and for a release whose consumer_tp_size is no positive number;
        zmq.ZMQError for a host that is none, and for a peer that does not keep up: it says how many messages went, and
        those stay queued.
        """
        if not remote_ip or not remote_port:
            logger.warning("kvferry: no notification: remote_ip is %r, remote_port is %r", remote_ip, remote_port)
            return
        frames = _frames(req_ids, message_type, message_fields or {})
        address = _address(remote_ip, remote_port)
        try:
            while not self._connection(address).send(frames):
                pass  # closed meanwhile, by another thread
        except zmq.ZMQError as error:
            logger.error("kvferry: no notification to %s: %s", address, error)
            raise

    def close(self) -> None:
        """Ends all connections, delivering for a moment what is still queued. A later call opens new ones."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
            if self._context is not None:
                self._context.term()
                self._context = None

    def _connection(self, address: str) -> _Connection:
        with self._lock:
            found = self._connections.get(address)
            if found is None or found.is_closed:
                if self._context is None:
                    self._context = zmq.Context()
                found = self._connections[address] = _Connection(self._context, address, self._wait_s)
            return found


class _Connection:
    """To one peer. Its own lock, so that a peer that takes nothing holds up nobody who talks to another."""

    def __init__(self, context: Context, address: str, wait_s: float) -> None:
        """Raises zmq.ZMQError for an address that can't be one."""
        self._lock = threading.Lock()
        self._address, self._wait_s = address, wait_s
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = _LINGER_MS
        self._socket.sndtimeo = round(wait_s * 1000)
        self._socket.ipv6 = "[" in address
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self._socket.close()
            raise

    @property
    def is_closed(self) -> bool:
        return self._socket.closed

    def send(self, frames: list[bytes]) -> bool:
        """Whether it was still open. Raises zmq.ZMQError where no message finds room for wait_s; the rest do not go."""
        with self._lock:
            if self._socket.closed:
                return False
            for number, frame in enumerate(frames):
                try:
                    self._socket.send(frame)
                except zmq.Again:
                    raise zmq.ZMQError(
                        zmq.EAGAIN,
                        f"{number} of {len(frames)} messages went to {self._address}, then it took none for "
                        f"{self._wait_s:g} s",
                    ) from None
                except zmq.ZMQError:
                    self._socket.close()
                    raise
            return True

    def close(self) -> None:
        with self._lock:
            self._socket.close()


_notifier = Notifier()


def send_notify(
    req_ids: list[str] | str,
    remote_ip: str,
    remote_port: int | str,
    message_type: str | None = None,
    message_fields: Mapping[str, Any] | None = None,
) -> None:
    """As `Notifier.send_notify`, over connections of this process."""
    _notifier.send_notify(req_ids, remote_ip, remote_port, message_type, message_fields)


def _address(remote_ip: str, remote_port: int | str) -> str:
    """Raises ValueError for a port that is none. Whether text can be a host is for ZeroMQ to say."""
    try:
        port = int(remote_port) if float(remote_port).is_integer() else 0
    except (TypeError, ValueError):
        port = 0
    if not isinstance(remote_ip, str) or not 1 <= port <= 65535:
        raise ValueError(f"no notification to {remote_ip}:{remote_port}: that is no host with a port within 1..65535")
    return addresses.join(remote_ip.strip("[]"), port)


def _frames(req_ids: list[str] | str, message_type: str | None, fields: Mapping[str, Any]) -> list[bytes]:
    given: list[Any] = req_ids if isinstance(req_ids, list) else [req_ids]
    for one in given:
        if not _is_id(one):
            logger.warning("kvferry: no notification for %r: an id must be text, and not empty", one)
    ids = [one for one in given if _is_id(one)]
    if message_type is None:
        return [one.encode() for one in ids]
    payloads = [{"type": message_type, "transfer_id": one, **fields} for one in ids]
    if message_type == "release":
        for payload in payloads:
            _check_release(payload)
    return [msgspec.msgpack.encode(payload) for payload in payloads]


def _is_id(one: object) -> bool:
    return isinstance(one, str) and one != ""


def _check_release(payload: dict[str, Any]) -> None:
    try:
        msgspec.convert(payload, MoriioRelease)
    except msgspec.ValidationError as error:
        raise ValueError(f"release of {payload.get('transfer_id')!r}, {payload}: {error}") from None


def read_transfer_ack(frame: bytes) -> MoRIIOTransferAck:
    """What a peer's release says, in any of the three forms. Raises ValueError for whatever else a frame holds."""
    try:
        bare = frame.decode("utf-8")
    except UnicodeDecodeError:  # a map in msgpack begins with a byte that no text does
        return _read_map(frame)
    if not bare:
        raise ValueError("the frame is empty: a release names a transfer")
    return MoRIIOTransferAck(bare)


def _read_map(frame: bytes) -> MoRIIOTransferAck:
    try:
        release = msgspec.msgpack.decode(frame, type=MoriioRelease)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a frame of {len(frame)} bytes is no release: {error}") from None
    return MoRIIOTransferAck(release.transfer_id, release.consumer_tp_size)
