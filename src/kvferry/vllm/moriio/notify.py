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


class Notifier:
    """One connection to each peer, for any thread: by the connection a peer that counts ranks tells them apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: Context | None = None
        self._sockets: dict[str, Socket] = {}

    def send_notify(
        self,
        req_ids: list[str] | str,
        remote_ip: str,
        remote_port: int | str,
        message_type: str | None = None,
        message_fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Sends one message for each id: the bare id, or with a message_type a map of it, the id and message_fields.

        Returns when the messages are queued; a peer that is not there gets them when it comes. Without an address
        nothing is sent, and ids that are no text are left out; both are logged. Raises ValueError for a release whose
        consumer_tp_size is no positive number, zmq.ZMQError for a bad address and for a peer that does not keep up.
        """
        if not remote_ip or not remote_port:
            logger.warning("kvferry: no notification: remote_ip is %r, remote_port is %r", remote_ip, remote_port)
            return
        frames = _frames(req_ids, message_type, message_fields or {})
        address = addresses.join(remote_ip, int(remote_port))
        with self._lock:
            try:
                socket = self._socket(address)
                for frame in frames:
                    socket.send(frame, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                logger.error("kvferry: no notification to %s: %s", address, error)
                if address in self._sockets:
                    self._sockets.pop(address).close()
                raise

    def close(self) -> None:
        """Ends all connections, delivering for a moment what is still queued. A later call opens new ones."""
        with self._lock:
            for socket in self._sockets.values():
                socket.close()
            self._sockets.clear()
            if self._context is not None:
                self._context.term()
                self._context = None

    def _socket(self, address: str) -> Socket:
        if address not in self._sockets:
            if self._context is None:
                self._context = zmq.Context()
            socket = self._context.socket(zmq.DEALER)
            self._sockets[address] = socket
            socket.linger = _LINGER_MS
            socket.ipv6 = "[" in address
            socket.connect(address)
        return self._sockets[address]


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


def _frames(req_ids: list[str] | str, message_type: str | None, fields: Mapping[str, Any]) -> list[bytes]:
    given: list[Any] = req_ids if isinstance(req_ids, list) else [req_ids]
    for one in given:
        if not isinstance(one, str):
            logger.warning("kvferry: no notification for %r: an id must be text", one)
    ids = [one for one in given if isinstance(one, str)]
    if message_type is None:
        return [one.encode() for one in ids]
    payloads = [{"type": message_type, "transfer_id": one, **fields} for one in ids]
    if message_type == "release":
        for payload in payloads:
            _check_release(payload)
    return [msgspec.msgpack.encode(payload) for payload in payloads]


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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"a frame of {len(frame)} bytes is no release: {error}") from None
    return MoRIIOTransferAck(release.transfer_id, release.consumer_tp_size)
