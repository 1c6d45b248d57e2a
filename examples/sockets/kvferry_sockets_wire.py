"""Bytes between two processes over TCP: what a transport's library would do. Nothing here knows of kvferry.

A connection carries one transfer: a token and a request; READY; the bytes; and after written bytes DONE. It is a
generator that yields instead of waiting, so no thread is needed: whoever owns it calls `is_over` now and then.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

TOKEN_BYTES = 16
REQUEST_S = 10.0
"""Who connects and has not asked for anything after so long is a stranger, and is cut off."""

_READY, _DONE, _GIVEN_UP = b"R", b"D", b"G"
"""The target's answers: to a request; and to written bytes, when it is through with them."""
_MAX_REQUEST_BYTES = 1 << 30
_MAX_PIECES = 1024
"""In one system call (the system's IOV_MAX)."""
_MAX_STEPS = 16
"""At one go, so that a long transfer leaves the thread to others in between."""

_Steps = Generator[bool, None, Any]
"""Yields True when it has moved something, False when it must wait."""


class Request(msgspec.Struct, frozen=True):
    """parts: of the target's memory, in order: region, offsets and lengths (int64 in the processor's byte order)."""

    write: bool
    parts: list[tuple[int, bytes, bytes]]


class Connection:
    """A socket, and the steps that are taken on it."""

    def __init__(self, sock: socket.socket, steps: _Steps) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock, self._steps = sock, steps

    def is_over(self) -> bool:
        """Goes on for some steps; True when all is done. Raises what ended it before, an OSError mostly."""
        for _ in range(_MAX_STEPS):
            has_moved = next(self._steps, None)
            if not has_moved:
                return has_moved is None
        return False

    def close(self) -> None:
        """What has not moved does not move any more in this process."""
        self._steps.close()
        self._sock.close()


class Asking(Connection):
    """The side that reads or writes. pieces: its memory, as long as the target's, in order.

    may_land: bytes were written, and the target has not said that it is through with them.
    """

    def __init__(self, address: tuple[str, int], token: bytes, request: Request, pieces: list[memoryview]) -> None:
        sock = socket.socket()
        super().__init__(sock, self._run(sock, address, token, request, pieces))
        self.may_land = False

    def _run(
        self, sock: socket.socket, address: tuple[str, int], token: bytes, request: Request, pieces: list[memoryview]
    ) -> _Steps:
        error = sock.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
        body = msgspec.msgpack.encode(request)
        yield from _send(sock, [token, len(body).to_bytes(8, "little"), body])
        if (yield from _receive(sock, 1)) != _READY:
            raise ConnectionError("what listens there does not know this protocol")
        if not request.write:
            yield from _fill(sock, pieces)
            return
        self.may_land = True
        # Where sending breaks off there may be an answer all the same.
        with contextlib.suppress(OSError):
            yield from _send(sock, pieces)
        answer = yield from _receive(sock, 1)
        self.may_land = answer not in (_DONE, _GIVEN_UP)
        if answer != _DONE:
            raise ConnectionError("the target has given the transfer up")


class Serving(Connection):
    """The target's side, of a socket that anybody may have opened. pieces_of: the memory that a request asks for; what
    it raises ends this connection."""

    def __init__(self, sock: socket.socket, token: bytes, pieces_of: Callable[[Request], list[memoryview]]) -> None:
        super().__init__(sock, self._run(sock, token, pieces_of, time.monotonic() + REQUEST_S))

    def _run(
        self,
        sock: socket.socket,
        token: bytes,
        pieces_of: Callable[[Request], list[memoryview]],
        deadline: float,
    ) -> _Steps:
        if not hmac.compare_digest((yield from _receive(sock, TOKEN_BYTES, deadline)), token):
            raise ConnectionError("not the token of this side: a stranger, or meant for a process before this one")
        num_bytes = int.from_bytes((yield from _receive(sock, 8, deadline)), "little")
        if num_bytes > _MAX_REQUEST_BYTES:
            raise ConnectionError(f"a request of {num_bytes} bytes, at most {_MAX_REQUEST_BYTES} are taken")
        request = msgspec.msgpack.decode((yield from _receive(sock, num_bytes, deadline)), type=Request)
        pieces = pieces_of(request)
        yield from _send(sock, [_READY])
        if not request.write:
            yield from _send(sock, pieces)
            return
        answer = _GIVEN_UP
        try:
            yield from _fill(sock, pieces)
            answer = _DONE
        finally:
            # Also when it is closed. Only this answer tells the other side that nothing more of it lands here.
            with contextlib.suppress(OSError):
                sock.send(answer)


def _send(sock: socket.socket, buffers: Sequence[bytes | memoryview]) -> _Steps:
    yield from _move(sock.sendmsg, buffers)


def _fill(sock: socket.socket, buffers: Sequence[memoryview]) -> _Steps:
    yield from _move(lambda some: sock.recvmsg_into(some)[0], buffers)


def _receive(sock: socket.socket, num_bytes: int, deadline: float | None = None) -> _Steps:
    """Returns that many bytes. Raises TimeoutError once time.monotonic is past the deadline."""
    into = bytearray(num_bytes)
    for has_moved in _fill(sock, [memoryview(into)]):
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"nothing was asked for within {REQUEST_S} s")
        yield has_moved
    return bytes(into)


def _move(call: Callable[[Any], int], buffers: Sequence[bytes | memoryview]) -> _Steps:
    """Through all buffers in order with `call`, which takes a list of them. Raises OSError."""
    for start in range(0, len(buffers), _MAX_PIECES):
        some = list(buffers[start : start + _MAX_PIECES])
        while some:
            try:
                moved = call(some)
            except BlockingIOError:
                yield False
                continue
            if moved == 0:
                raise ConnectionError("the other side has closed the connection")
            while some and moved >= len(some[0]):
                moved -= len(some.pop(0))
            if moved:
                some[0] = some[0][moved:]
            yield True
