"""The agent of a scheduler's process: the engine's rendezvous.

It answers handshakes, claims, renewals and releases for all workers, renews the engine's own claims on
producers, and leaves what the scheduler must know in an inbox. It never touches blocks.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from typing import TypeAlias

import msgspec

from kvferry import records
from kvferry.agent.loop import AgentLoop, boottime
from kvferry.control.endpoint import Endpoint, Route
from kvferry.protocol import consumer, messages, producer
from kvferry.protocol.events import Note, Received, Send, Tick
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import Message, Outcome, TransferRef
from kvferry.records import EngineRecord

logger = logging.getLogger(__name__)

MAX_INBOX = 10_000
"""News that wait for the scheduler before more is turned away that its sender will repeat."""


class HoldEnded(msgspec.Struct, frozen=True):
    """The blocks of this holding may be given back. outcome: released, expired, lapsed, voided or failed."""

    ref: TransferRef
    outcome: str
    detail: str


class TransferLost(msgspec.Struct, frozen=True):
    """The producer no longer holds what this claim is for."""

    claim_id: str
    reason: str


class LoadQuiet(msgspec.Struct, frozen=True):
    """No operation of this rank can still write the destination blocks of a failed load."""

    load_id: str
    rank: int


_FOR_PRODUCER = (messages.Claim, messages.Renew, messages.Release, messages.PlainRelease)
BlockIds: TypeAlias = tuple[tuple[int, ...], ...]
InboxItem: TypeAlias = HoldEnded | TransferLost | LoadQuiet


class EngineAgent(AgentLoop):
    """Serves the rendezvous. All public methods are for the scheduler's thread and return at once, but `void`."""

    def __init__(self, engine_id: str, incarnation: str, endpoint: Endpoint, leases: Leases) -> None:
        super().__init__("kvferry-rendezvous", endpoint)
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.home = secrets.token_hex(16)
        self._producer = producer.ProducerEngine(engine_id, incarnation, leases)
        self._consumer = consumer.ConsumerEngine(engine_id, incarnation, leases)
        self._record_payload: bytes | None = None
        self._record_fault = ""
        self._topology_digest = b""
        self._inbox: deque[InboxItem] = deque()

    # For the scheduler's thread.

    def set_record(self, record: EngineRecord) -> None:
        """From now on handshakes are answered; before, they are refused as busy.

        A record that no message can carry is an error in the log, and what every peer is told.
        """
        payload, topology_digest = records.encode(record), record.topology_digest()
        num_bytes, most = len(messages.encode(self._record_message(0, payload))), self.endpoint.max_frame_bytes
        fault = ""
        if num_bytes > most:
            fault = f"the record of this engine's workers has {num_bytes} bytes, the limit is {most}"
            logger.error("kvferry: no engine can read from this one or write to it: %s", fault)

        def apply() -> None:
            self._record_payload = payload
            self._record_fault = fault
            self._topology_digest = topology_digest

        self.submit(apply)

    def promise(self, ref: TransferRef, num_tokens: int, digest: bytes, routers_id: str) -> None:
        """A request came whose KV will be `ref`; `hold` or `drop` follows. A router's name that is taken isn't used."""

        def apply() -> None:
            name = "" if self._producer.knows_routers_id(routers_id) else routers_id
            self._produce(producer.Promised(ref, num_tokens, digest, self._topology_digest, name))

        self.submit(apply)

    def hold(
        self, ref: TransferRef, num_tokens: int, digest: bytes, blocks_digest: bytes, block_ids: BlockIds = ()
    ) -> None:
        """The scheduler holds these blocks until a HoldEnded for `ref` comes through the inbox.

        block_ids: per KV cache group, by token position; -1 where there is none.
        """

        def apply() -> None:
            self._produce(producer.Held(ref, num_tokens, digest, blocks_digest, self._topology_digest, block_ids))

        self.submit(apply)

    def relieve(self, reason: str) -> None:
        """Prompts wait for blocks: one hold that nobody has asked for may go."""
        self.submit(lambda: self._produce(producer.Relieve(reason)))

    def drop(self, ref: TransferRef, reason: str) -> None:
        """The request of a promise ended early; what it had is held until a HoldEnded."""
        self.submit(lambda: self._produce(producer.Dropped(ref, reason)))

    def arrived(self, claim_id: str, ref: TransferRef, address: str, key_id: str, num_ranks: int) -> None:
        """A request with this transfer came: claim it and keep it alive until `over`."""

        def apply() -> None:
            self.learn_key(address, key_id)
            self._consume(consumer.Arrived(claim_id, ref, address, num_ranks))

        self.submit(apply)

    def over(self, claim_id: str, outcome: Outcome, reason: str = "") -> None:
        """The whole engine is through with this claim."""
        self.submit(lambda: self._consume(consumer.Over(claim_id, outcome, reason)))

    def void(self, reason: str, timeout_s: float = 2.0) -> None:
        """Ends every hold that nobody has claimed; their HoldEnded are in the inbox on return.

        Raises TimeoutError if the agent's thread does not answer in time.
        """
        done = threading.Event()

        def apply() -> None:
            self._produce(producer.Void(reason))
            done.set()

        self.submit(apply)
        if not done.wait(timeout_s):
            raise TimeoutError(f"the rendezvous did not answer within {timeout_s:g} s")

    def drain(self) -> list[InboxItem]:
        """What came since the last call, in order."""
        items: list[InboxItem] = []
        while self._inbox:
            items.append(self._inbox.popleft())
        return items

    # The agent's thread.

    def on_message(self, source: Route | str, message: Message) -> None:
        if isinstance(message, messages.Hello):
            self._answer_hello(source, message)
        elif isinstance(message, messages.Quiesced):
            self._quiesced(source, message)
        elif isinstance(message, messages.OpenWrite | messages.CloseWrite):
            if message.home == self.home:
                self._produce(Received(source, message))
            else:
                self.counters["foreign_writers"] += 1
        elif isinstance(message, _FOR_PRODUCER):
            self._produce(Received(source, message))
        elif isinstance(message, messages.Renewed | messages.Released):
            self._consume(Received(source, message))
        else:
            self.counters[f"unexpected_{type(message).__name__.lower()}"] += 1

    def on_lost(self, address: str, reason: str) -> None:
        self._consume(consumer.PeerLost(address, reason))

    def on_time(self) -> None:
        now = boottime()
        deadline = self._producer.next_deadline()
        if deadline is not None and now >= deadline:
            self._produce(Tick())
        deadline = self._consumer.next_deadline()
        if deadline is not None and now >= deadline:
            self._consume(Tick())

    def next_wakeup(self) -> float | None:
        deadlines = (self._producer.next_deadline(), self._consumer.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _answer_hello(self, source: Route | str, hello: messages.Hello) -> None:
        def refuse(reason: messages.RefusedReason, detail: str) -> None:
            self.counters["refused_handshakes"] += 1
            detail = messages.shorten(detail)
            asker = messages.shorten(hello.incarnation)
            logger.warning("kvferry: handshake of engine %s refused: %s: %s", asker, reason, detail)
            self.send(source, messages.Refused(claim_id="", rank=0, seq=hello.seq, reason=reason, detail=detail))

        if hello.version != messages.PROTOCOL_VERSION:
            refuse("version", f"consumer speaks {hello.version}, producer {messages.PROTOCOL_VERSION}")
        elif hello.engine_id not in ("", self.engine_id):
            refuse("incarnation", f"engine {hello.engine_id} was asked for, {self.engine_id} answers here")
        elif self._record_payload is None:
            refuse("busy", "the engine is still starting")
        elif self._record_fault:
            refuse("failed", self._record_fault)
        else:
            self.send(source, self._record_message(hello.seq, self._record_payload))

    def _record_message(self, seq: int, payload: bytes) -> messages.Record:
        return messages.Record(
            seq=seq,
            version=messages.PROTOCOL_VERSION,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            payload=payload,
        )

    def _quiesced(self, source: Route | str, message: messages.Quiesced) -> None:
        if message.incarnation != self.incarnation:
            self.counters["foreign_quiesced"] += 1
            return
        if len(self._inbox) >= MAX_INBOX:
            self.counters["inbox_full"] += 1  # without an answer the worker says it again
            return
        self._inbox.append(LoadQuiet(message.load_id, message.rank))
        self.send(source, messages.QuiescedAck(load_id=message.load_id, rank=message.rank, seq=message.seq))

    def _produce(self, event: producer.Event) -> None:
        for action in self._producer.handle(event, boottime()):
            self.guard(self._act_as_producer, action)

    def _act_as_producer(self, action: producer.Action) -> None:
        if isinstance(action, Send):
            self.send(action.to, action.message)
        elif isinstance(action, producer.FreeHold):
            self.counters[f"holds_{action.outcome}"] += 1
            self._inbox.append(HoldEnded(action.ref, action.outcome, action.detail))
        elif isinstance(action, Note):
            self._note(action)

    def _consume(self, event: consumer.Event) -> None:
        for action in self._consumer.handle(event, boottime()):
            self.guard(self._act_as_consumer, action)

    def _act_as_consumer(self, action: consumer.Action) -> None:
        if isinstance(action, Send):
            self.send(action.to, action.message)
        elif isinstance(action, consumer.ClaimLost):
            self._inbox.append(TransferLost(action.claim_id, action.reason))
        elif isinstance(action, Note):
            self._note(action)

    def _note(self, note: Note) -> None:
        self.counters[note.name] += 1
        logger.info("kvferry: %s: %s", note.name, note.detail)
