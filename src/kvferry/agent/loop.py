"""The loop of an agent's thread: sockets, commands from other threads, deadlines. It never dies of one error."""

from __future__ import annotations

import collections
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvferry.control.endpoint import Endpoint, Forgotten, Lost, Received, Route
from kvferry.protocol import messages
from kvferry.protocol.messages import BadMessage, Message

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0
"""A deadline that is further away is looked at again; sockets can't wait for months."""
MAX_KEYS = 4096
"""Addresses whose key's name is remembered."""
AFTER_ERROR_S = 0.05
"""Keeps a loop whose every turn fails from taking a core."""


def boottime() -> float:
    """Seconds of CLOCK_BOOTTIME, which goes on while a machine is suspended: leases must not stretch."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Counters(collections.Counter[str]):
    """Counts by name, written by one thread, read by any (a read may be one event behind)."""


class AgentLoop(ABC):
    """Runs one thread that owns `endpoint`. Subclasses say what to do with messages, losses and time.

    Other threads call only `submit`, `start`, `stop` and what subclasses mark as safe for any thread.
    """

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.counters = Counters()
        self._name = name
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._key_ids: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._pinned: set[str] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()
        self._start_error: BaseException | None = None

    # For any thread.

    def start(self) -> None:
        """Starts the thread and waits until `on_start` has run. Raises what it raised."""
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            raise self._start_error

    def submit(self, command: Callable[[], None]) -> None:
        """Runs `command` in the agent's thread, soon and in order."""
        self._commands.append(command)
        self.endpoint.wake()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread; what it owned is closed. Idempotent."""
        self._stopping = True
        self.endpoint.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # For subclasses, all in the agent's thread.

    def on_start(self) -> None:
        """Once, before the first message."""

    @abstractmethod
    def on_message(self, source: Route | str, message: Message) -> None:
        """A well-formed message came."""

    @abstractmethod
    def on_lost(self, address: str, reason: str) -> None:
        """A connection that was dialled is over and forgotten."""

    def on_forgotten(self, address: str) -> None:
        """A connection that was dialled has been closed since nobody used it; what is there now nobody has seen."""

    def on_time(self) -> None:
        """After every wake-up."""

    def next_wakeup(self) -> float | None:
        """When `on_time` must run next even if nothing happens (boottime seconds)."""
        return None

    def on_stop(self) -> None:
        """Once, at the end of the thread."""

    def learn_key(self, address: str, key_id: str) -> None:
        """Names the key of an address, for when it is dialled. Bounded: addresses come from clients."""
        if address in self._pinned:
            return
        self._key_ids[address] = key_id
        self._key_ids.move_to_end(address)
        if len(self._key_ids) > MAX_KEYS:
            self._key_ids.popitem(last=False)

    def pin_key(self, address: str) -> None:
        """The address is our own engine's: our first key, whatever a client or a peer says of it."""
        self._pinned.add(address)
        self._key_ids.pop(address, None)

    def key_of(self, address: str) -> str | None:
        return self._key_ids.get(address) or None

    def send(self, to: Route | str, message: Message) -> None:
        """Sends or counts why not: a message that can't leave is a lost message, which the protocol repairs."""
        key_id = self.key_of(to) if isinstance(to, str) else None
        try:
            self.endpoint.send(to, messages.encode(message), key_id)
        except Exception as error:
            # A full queue, an address that may not be dialled, a value that has no encoding: none may stop the rest.
            self.counters[f"unsent_{type(message).__name__.lower()}"] += 1
            logger.debug("%s could not send %s to %s: %s", self._name, type(message).__name__, to, error)

    # The thread.

    def _run(self) -> None:
        try:
            self.on_start()
        except BaseException as error:
            self._start_error = error
            self._ready.set()
            self._close()
            return
        self._ready.set()
        while not self._stopping:
            if not self.guard(self._turn):
                time.sleep(AFTER_ERROR_S)
        self._close()

    def _turn(self) -> None:
        for event in self.endpoint.receive(self._timeout_s()):
            if isinstance(event, Received):
                self.guard(self._deliver, event)
            elif isinstance(event, Lost):
                self.guard(self.on_lost, event.address, event.reason)
            elif isinstance(event, Forgotten):
                self.guard(self.on_forgotten, event.address)
        while self._commands:
            self.guard(self._commands.popleft())
        self.guard(self.on_time)

    def _timeout_s(self) -> float | None:
        if self._commands:
            return 0.0
        wakeup = self.next_wakeup()
        return None if wakeup is None else min(max(0.0, wakeup - boottime()), LONGEST_WAIT_S)

    def _deliver(self, event: Received) -> None:
        try:
            message = messages.decode(event.frame)
        except BadMessage as error:
            self.counters["bad_messages"] += 1
            logger.debug("%s dropped a message from %s: %s", self._name, event.source, error)
            return
        self.on_message(event.source, message)

    def guard(self, step: Callable[..., None], *args: object) -> bool:
        """Runs one step. One that fails must not end, or hold up, the thread that every request depends on."""
        try:
            step(*args)
        except Exception:
            self.counters["errors"] += 1
            logger.exception("kvferry: %s: an event failed", self._name)
            return False
        return True

    def _close(self) -> None:
        self.guard(self.on_stop)
        self.guard(self.endpoint.close)
