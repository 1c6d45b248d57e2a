"""One landing being written: which descriptors may move now, which are on their way, and when all is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from kvferry.agent.sources import Source
from kvferry.agent.transfers import Part, Phase, Transfer
from kvferry.plan import PairPlan, PlanBatch, TransferPlan, block_tables
from kvferry.protocol.messages import RemoteBlocks
from kvferry.records import WorkerRecord
from kvferry.transport.base import Batch, Peer, Transport


class Target(NamedTuple):
    """A consumer worker that this one may write to.

    rows: plan of the layers that grow token by token; states: of those that hold a state after all tokens. None where
    there are none.
    """

    worker: WorkerRecord
    rows: PairPlan | None
    states: PairPlan | None


class Way(NamedTuple):
    """How a target is reached."""

    transport: Transport
    peer: Peer


@dataclass
class _Span:
    """Tokens up to num_tokens, in the layers that have not been posted yet."""

    plan: TransferPlan
    num_tokens: int
    layers: dict[int, tuple[str, ...]]  # by placement


class Writes:
    """Posts each layer of a landing's tokens once it is computed: `step` until the phase is not MOVING, then `quiet`.
    lost_peer: the peer whose loss ended it, if that is why it failed.

    Tokens that are not the last ones go in whole blocks of both sides. A new attempt of the producer's request begins
    again, once nothing of the old one is on its way.
    """

    def __init__(self, order: RemoteBlocks, target: Target, way: Way) -> None:
        self._order = order
        self._target = target
        self._way = way
        self._consumer_tables = block_tables("consumer", order.block_ids)
        self._grain = _grain(target.rows)
        self._transfers: list[Transfer] = []
        self._abandoned = False
        self.lost_peer: Peer | None = None
        self._begin(0)

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._spans: list[_Span] = []
        self._planned_to = self._order.first_token
        self._has_states = self._target.states is not None
        self.num_bytes = self.num_descriptors = 0
        self.reason = ""

    def step(self, source: Source | None, now: float) -> Phase:
        """Raises Refusal for what can't be planned; nothing of it has been posted then."""
        if self._abandoned:
            return Phase.ABANDONED
        if source is not None and source.attempt != self._attempt and not self._restart(source.attempt):
            return Phase.MOVING
        if source is not None:
            self._plan(source)
            self._post(source, now)
        return self._advance()

    def _restart(self, attempt: int) -> bool:
        """False while something of the old attempt may still land."""
        self._abandon_all("the producer's request was preempted")
        if not self.quiet():
            return False
        self._transfers = []
        self._begin(attempt)
        return True

    def abandon(self, reason: str) -> None:
        """Nothing more is posted."""
        self._abandoned = True
        self.reason = reason
        self._abandon_all(reason)

    def quiet(self) -> bool:
        """Whether nothing can land any more; only once it was abandoned, has failed or is done."""
        self._transfers = [transfer for transfer in self._transfers if not transfer.quiet()]
        return not self._transfers

    def poll_interval_s(self, now: float) -> float | None:
        """None: nothing is on its way."""
        return min((one.poll_interval_s(now) for one in self._transfers if not _is_over(one)), default=None)

    def nudges_due(self, now: float) -> Iterator[str]:
        for transfer in self._transfers:
            yield from transfer.nudges_due(now)

    @property
    def address(self) -> str:
        """Of the consumer engine's rendezvous."""
        return self._order.address

    @property
    def peer(self) -> Peer:
        return self._way.peer

    @property
    def transport(self) -> str:
        return self._way.transport.name

    def _plan(self, source: Source) -> None:
        """Plans what the source has, or is about to have, beyond what was planned."""
        end = self._order.end_token
        upto = min(source.num_tokens, end)
        if upto < end:
            upto = upto // self._grain * self._grain
        if self._target.rows is not None and upto > self._planned_to:
            plan = self._bind(self._target.rows, source, self._planned_to, upto)
            placements = {piece.placement for piece in plan.slices}
            names = {placement: self._target.rows.layers[placement] for placement in sorted(placements)}
            self._spans.append(_Span(plan, upto, names))
        self._planned_to = max(self._planned_to, upto)

    def _bind(self, plan: PairPlan, source: Source, first_token: int, end_token: int) -> TransferPlan:
        windows = tuple(min(start, end_token) for start in self._order.window_starts)
        producer_tables = block_tables("producer", source.block_ids)
        return plan.bind(self._consumer_tables, producer_tables, first_token, end_token, windows)

    def _post(self, source: Source, now: float) -> None:
        for span in self._spans:
            ready = [placement for placement, names in span.layers.items() if source.has_all(names, span.num_tokens)]
            for placement in ready:
                del span.layers[placement]
            self._send(span.plan.of(set(ready)), now)
        self._spans = [span for span in self._spans if span.layers]
        if self._has_states and self._target.states is not None and source.is_final:
            self._has_states = False
            whole = self._bind(self._target.states, source, self._order.first_token, self._order.end_token)
            self._send(whole.batches, now)

    def _send(self, batches: Sequence[PlanBatch], now: float) -> None:
        if not batches:
            return
        self.num_bytes += sum(int(batch.lengths.sum()) for batch in batches)
        self.num_descriptors += sum(len(batch.lengths) for batch in batches)
        part = Part(
            self._way.transport,
            self._way.peer,
            self._target.worker.control_address,
            tuple(_as_write(batch) for batch in batches),
        )
        self._transfers.append(Transfer([part], now, write=True))

    def _advance(self) -> Phase:
        phases = {transfer.step() for transfer in self._transfers}
        failed = next((transfer for transfer in self._transfers if transfer.phase is Phase.FAILED), None)
        if failed is not None:
            self.lost_peer = failed.lost_peer
            self.abandon(failed.reason)
            return Phase.FAILED
        self._transfers = [transfer for transfer in self._transfers if not _is_over(transfer)]
        is_sealed = self._planned_to >= self._order.end_token and not self._spans and not self._has_states
        return Phase.DONE if is_sealed and phases <= {Phase.DONE} and not self._transfers else Phase.MOVING

    def _abandon_all(self, reason: str) -> None:
        for transfer in self._transfers:
            transfer.abandon(reason)


def _is_over(transfer: Transfer) -> bool:
    return transfer.phase is Phase.DONE and transfer.quiet()


def _grain(rows: PairPlan | None) -> int:
    """Tokens in which unfinished prompts are cut: whole blocks on both sides, in each group."""
    groups = rows.groups.values() if rows is not None else ()
    return lcm(*(size for group in groups for size in (group.consumer_block_size, group.producer_block_size)))


def _as_write(batch: PlanBatch) -> Batch:
    """A WRITE moves the producer's bytes (local) into the consumer's (remote)."""
    return Batch(
        batch.producer_region,
        batch.consumer_region,
        batch.producer_offsets,
        batch.consumer_offsets,
        batch.lengths,
    )
