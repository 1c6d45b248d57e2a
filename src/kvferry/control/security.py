"""Who may talk: keys derived from the cluster's secret, and the choice between CURVE and open.

One secret gives two Curve25519 key pairs, the server's and the client's. A process shows the first to whoever dials
it and uses the second to dial. Nothing derived from the secret but `key_id` and public keys leaves this module.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Literal

import zmq
from zmq.utils import z85

from kvferry.control.addresses import AddressError, is_loopback

MIN_SECRET_BYTES = 16
ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvferry"
"""Set on open sockets too: it makes libzmq refuse ZMTP 1.0, in which any bytes pass for frames."""
_SALT = b"kvferry control 1"
_KEY_BYTES = 32
_KEY_ID_BYTES = 8


class SecurityError(ValueError):
    """Settings under which control messages would not be protected, or that can't be used. Never shows a secret."""


class UnknownKey(AddressError):
    """A peer can't be dialled because its key is not one of ours; the text names the key's id."""


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869: `length` bytes (at most 8160) derived from a secret for the use that `info` names."""
    if length > 255 * 32:
        raise ValueError(f"length {length} is more than HKDF-SHA256 can give: {255 * 32}")
    pseudorandom_key = hmac.digest(salt or bytes(32), secret, hashlib.sha256)
    output = block = b""
    counter = 0
    while len(output) < length:
        counter += 1
        block = hmac.digest(pseudorandom_key, block + info + bytes([counter]), hashlib.sha256)
        output += block
    return output[:length]


class ClusterKeys:
    """What one secret gives. Keys are in Z85 (40 bytes), as ZMQ takes them.

    key_id: 16 hex digits that name the secret in public; server_*, client_*: one key pair each.
    """

    __slots__ = ("client_public", "client_secret", "key_id", "server_public", "server_secret")

    def __init__(self, secret: bytes) -> None:
        """Raises SecurityError for a secret of less than MIN_SECRET_BYTES bytes."""
        if len(secret) < MIN_SECRET_BYTES:
            raise SecurityError(f"a secret has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
        self.key_id = hkdf_sha256(secret, _SALT, b"key id", _KEY_ID_BYTES).hex()
        self.server_secret = z85.encode(hkdf_sha256(secret, _SALT, b"server key", _KEY_BYTES))
        self.client_secret = z85.encode(hkdf_sha256(secret, _SALT, b"client key", _KEY_BYTES))
        self.server_public = zmq.curve_public(self.server_secret)
        self.client_public = zmq.curve_public(self.client_secret)

    def __repr__(self) -> str:
        return f"ClusterKeys(key_id={self.key_id!r})"


class Security:
    """How one process protects its control messages: with CURVE, or not at all ("open").

    keys: of every secret that is accepted; the first is shown to those who dial, and used to dial unless another is
    asked for. Without keys, only loopback is served and dialled, unless allow_open is set.
    """

    def __init__(self, keys: Sequence[ClusterKeys] = (), *, allow_open: bool = False) -> None:
        self._keys = tuple(keys)
        self._allow_open = allow_open
        self._admitted = frozenset(z85.decode(key.client_public) for key in self._keys)

    @classmethod
    def choose(cls, host: str, secrets: Sequence[bytes] | None, allow_open: bool = False) -> Security:
        """The security for an endpoint on `host`: CURVE whenever there is a secret, also on loopback.

        Raises SecurityError where there is none, the host is not loopback and allow_open is not set.
        """
        security = cls([ClusterKeys(secret) for secret in secrets or ()], allow_open=allow_open)
        if not security.protects(host):
            raise SecurityError(
                f"host {host!r} is not loopback and there is no secret, so anybody who reaches the port could send"
                " control messages: set KVFERRY_SECRET or KVFERRY_SECRET_FILE to the same secret on every host, or"
                " allow_open to accept that"
            )
        return security

    def __repr__(self) -> str:
        return f"Security(mode={self.mode!r}, key_ids={[key.key_id for key in self._keys]})"

    @property
    def mode(self) -> Literal["curve", "open"]:
        return "curve" if self._keys else "open"

    @property
    def key_id(self) -> str:
        """Names the key of this process's listener, for its record; empty when open."""
        return self._keys[0].key_id if self._keys else ""

    def protects(self, host: str) -> bool:
        """Whether messages to or from a host may travel under these settings."""
        return bool(self._keys) or self._allow_open or is_loopback(host)

    def secure_listener(self, listener: zmq.Socket[bytes]) -> None:
        """Before bind: only peers that the ZAP server admits get in."""
        listener.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        if self._keys:
            listener.set(zmq.CURVE_SERVER, 1)
            listener.set(zmq.CURVE_SECRETKEY, self._keys[0].server_secret)

    def secure_dialler(self, dialler: zmq.Socket[bytes], key_id: str | None) -> None:
        """Before connect: expect the server key of `key_id` (None or empty: of our first secret). Raises UnknownKey."""
        dialler.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        key = self._key(key_id)
        if key is not None:
            dialler.set(zmq.CURVE_SERVERKEY, key.server_public)
            dialler.set(zmq.CURVE_PUBLICKEY, key.client_public)
            dialler.set(zmq.CURVE_SECRETKEY, key.client_secret)

    def admits(self, mechanism: bytes, credentials: Sequence[bytes]) -> bool:
        """Whether a ZAP request (mechanism, credential frames) is let in."""
        if self._keys:
            return mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._admitted
        return mechanism == b"NULL"

    def _key(self, key_id: str | None) -> ClusterKeys | None:
        if not key_id:
            return self._keys[0] if self._keys else None
        for key in self._keys:
            if key.key_id == key_id:
                return key
        known = ", ".join(key.key_id for key in self._keys) or "none: no secret is set"
        raise UnknownKey(f"the peer's key is {key_id[:64]!r}; the keys known here are {known}")


class ZapServer:
    """Answers libzmq's question "may this client in?", inside the loop that owns the listener (RFC 27)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], security: Security) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ZAP_ADDRESS)
        self._security = security

    def serve(self, limit: int) -> None:
        """Answers at most `limit` waiting requests. Never blocks."""
        for _ in range(limit):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(request))

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Frames asked: version, id, domain, address, identity, mechanism, credentials...
        Frames answered: version, id, status, its text, user id, metadata."""
        version, request_id, domain, _address, _identity, mechanism, *credentials = request
        admitted = domain == ZAP_DOMAIN and self._security.admits(mechanism, credentials)
        status, text = (b"200", b"OK") if admitted else (b"400", b"unknown key")
        return [version, request_id, status, text, b"", b""]


def load_secret(value: str | None, environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """The accepted secrets, the one in use first; empty if none is set.

    Taken from `value` or else KVFERRY_SECRET (several are separated by commas), or else the file that
    KVFERRY_SECRET_FILE names (one a line). Raises SecurityError: both variables are set, a file can't be read or is
    open to others, nothing in it, a secret too short.
    """
    variable, path = environ.get("KVFERRY_SECRET"), environ.get("KVFERRY_SECRET_FILE")
    if value is not None:
        return _checked(value.split(","), "the secret in the settings")
    if variable is not None and path is not None:
        raise SecurityError("KVFERRY_SECRET and KVFERRY_SECRET_FILE are both set: which one is meant?")
    if variable is not None:
        return _checked(variable.split(","), "KVFERRY_SECRET")
    if path is not None:
        return _checked(_read_lines(path), f"KVFERRY_SECRET_FILE ({path})")
    return ()


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & stat.S_IRWXO:
                raise SecurityError(
                    f"KVFERRY_SECRET_FILE {path} has mode {mode:04o}, open to every user: chmod o= {path}"
                )
            return [line for line in file.read().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SecurityError(f"KVFERRY_SECRET_FILE {path} can't be read: {reason}") from None


def _checked(texts: Sequence[str], source: str) -> tuple[bytes, ...]:
    secrets = tuple(text.strip().encode() for text in texts)
    if not secrets:
        raise SecurityError(f"{source} holds no secret")
    for number, secret in enumerate(secrets, start=1):
        if len(secret) < MIN_SECRET_BYTES:
            raise SecurityError(
                f"{source}: secret {number} has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed"
            )
    return secrets
