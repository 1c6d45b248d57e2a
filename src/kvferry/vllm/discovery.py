"""Announces this engine to a router, in the words of vllm-router's discovery for `--kv-connector moriio`.

The router binds a ZMQ ROUTER socket. Each engine sends it one msgpack map every 3 s and is dropped when none came for
about 5 s. The announced zmq_address comes back in the ids of requests (request_addresses.py). It has places for
MoRIIO's two ports; kvferry has one rendezvous per engine, so both carry its port.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import zmq

from kvferry.control import addresses
from kvferry.control.security import load_secret
from kvferry.vllm.config import Config, ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[Socket]"

INTERVAL_S = 3.0
_DEAD_AFTER_MS = 10_000
_RECONNECT_MS = 500
_STOP_S = 5.0
_TYPES: dict[str, Literal["P", "D"]] = {"prefill": "P", "decode": "D"}
_SIDES = {"kv_producer": "prefill", "kv_consumer": "decode"}


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What the router is told of an engine; the field names are the router's. http_address: "ip:port", no scheme."""

    type: Literal["P", "D"]
    http_address: str
    zmq_address: str
    dp_size: int
    tp_size: int
    transfer_mode: Literal["READ", "WRITE"]


class Announcer:
    """Repeats an announcement to one router from a thread of its own, whether or not the router is there."""

    def __init__(self, router: str, announcement: Announcement, interval_s: float = INTERVAL_S) -> None:
        """router: "tcp://host:port"; its host may be a name."""
        self.router = router
        self.announcement = announcement
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-announcer", daemon=True)

    def start(self) -> None:
        """The first announcement leaves at once. Call it once."""
        what = self.announcement
        logger.info(
            "kvferry: announces itself to the router at %s: %s", self.router, msgspec.json.encode(what).decode()
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the announcements; the router forgets this engine by itself. Idempotent, also before `start`."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        told = ""
        context: Context = zmq.Context()
        while not self._stopped.is_set():
            try:
                self._announce(context)
            except Exception as error:  # whatever it is, an engine does not end for want of an announcement
                if str(error) != told:
                    told = str(error)
                    logger.warning("kvferry: cannot announce this engine to the router at %s: %s", self.router, told)
                self._stopped.wait(self._interval_s)
        context.term()

    def _announce(self, context: Context) -> None:
        """Sends until stopped. Raises AddressError while the router's name has no address, ZMQError."""
        payload = msgspec.msgpack.encode(self.announcement)
        with context.socket(zmq.DEALER) as socket:
            _set_options(socket)
            host, _ = addresses.parse(self.router)
            socket.ipv6 = ":" in addresses.resolve(host)[0]
            socket.connect(self.router)
            while not self._stopped.is_set():
                socket.send(payload, zmq.NOBLOCK)
                self._stopped.wait(self._interval_s)


def _set_options(socket: Socket) -> None:
    socket.linger = 0
    socket.setsockopt(zmq.CONFLATE, 1)  # while the router is away one announcement waits for it, not all of them
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, _DEAD_AFTER_MS)  # a router that vanished without a word; the name is asked anew


def announcer(config: Config, vllm_config: VllmConfig, rendezvous_address: str) -> Announcer | None:
    """The announcer of this engine; None without `discovery`, and on all DP ranks but the first.

    rendezvous_address: "tcp://host:port" as peers are told it; its host is also that of the announced HTTP server.
    Raises ConfigError where the settings leave open which side a kv_both engine takes, or contradict its role.
    """
    if config.discovery is None:
        return None
    side = _side(config.announce_as, vllm_config.kv_transfer_config.kv_role)
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_index != 0:  # the rank; data_parallel_rank is 0 on every rank of a dense model
        return None
    router = f"tcp://{config.discovery}"
    host, port = addresses.parse(rendezvous_address)
    is_protected = config.allow_open or bool(load_secret(config.secret, os.environ))
    _warn_if_unreachable(host, router, is_protected)
    announcement = Announcement(
        type=_TYPES[side],
        http_address=addresses.join(host, config.http_port).removeprefix("tcp://"),
        zmq_address=f"host:{host},handshake:{port},notify:{port}",
        dp_size=parallel.data_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        transfer_mode="WRITE" if config.mode == "write" else "READ",
    )
    return Announcer(router, announcement)


def _side(announce_as: str | None, kv_role: str | None) -> str:
    by_role = _SIDES.get(kv_role or "")
    side = announce_as or by_role
    if side is None:
        raise ConfigError(
            f"kv_connector_extra_config: discovery is set and kv_role is {kv_role!r}, which can be either side: set "
            'announce_as to "prefill" or "decode"'
        )
    if by_role not in (None, side):
        raise ConfigError(
            f"kv_connector_extra_config: announce_as is {announce_as!r} and kv_role is {kv_role!r}, "
            f"which is the {by_role} side"
        )
    return side


def _warn_if_unreachable(host: str, router: str, is_protected: bool) -> None:
    if addresses.is_loopback(host) and not addresses.is_loopback(addresses.parse(router)[0]):
        logger.warning(
            "kvferry: this engine announces itself as %s to the router at %s: unless both are on one host, "
            "set host_ip%s",
            host,
            router,
            "" if is_protected else "; it stays on loopback until KVFERRY_SECRET (or allow_open) is set",
        )
