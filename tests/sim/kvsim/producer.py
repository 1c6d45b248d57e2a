"""The producer's side: blocks, holds, the real ProducerEngine, and what is known to be true of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from kvferry.protocol.digest import blocks_digest
from kvferry.protocol.landings import MAX_CLOSED
from kvferry.protocol.messages import (
    CancelWrite,
    Claim,
    CloseWrite,
    Failed,
    Grant,
    Landing,
    Message,
    OpenWrite,
    Refused,
    Release,
    RemoteBlocks,
    Renew,
    Renewed,
    RenewEntry,
    TransferRef,
    WriteOpened,
)
from kvferry.protocol.producer import (
    Closing,
    FreeHold,
    Held,
    Note,
    ProducerEngine,
    Received,
    Relieve,
    Send,
    Void,
)
from kvsim.prefill import Compute, Prefill
from kvsim.prompts import (
    LAYERS,
    TOKENS_PER_BLOCK,
    TOPOLOGY,
    ClaimTruth,
    HoldTruth,
    Params,
    Place,
    RealClaim,
    Setting,
    content_of,
    digest_of,
)
from kvsim.world import EPSILON_S, Driver, Link, Process, World, check
from kvsim.writes import ProducerWorker

if TYPE_CHECKING:
    from kvsim.consumer import Consumer

Key: TypeAlias = tuple[str, int]
"""Transfer id, generation; 0 where the id is a router's."""


class Producer(Process):
    """The scheduler's process; its workers live and die with it."""

    def __init__(
        self,
        world: World,
        name: str,
        setting: Setting,
        num_ranks: int,
        claims: dict[str, RealClaim],
        servers: dict[str, Any],
        consumers: dict[str, Consumer],
    ) -> None:
        """claims: by id, every claim that a consumer really made; filled by the consumers. servers: by address, whoever
        takes messages there; consumers: by the address of their rendezvous."""
        super().__init__(world, name)
        self.setting, self.leases = setting, setting.leases
        self.address = f"tcp://{name}"
        self.claims, self.servers, self.consumers = claims, servers, consumers
        self.outcomes: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._rng = world.rng(f"producer {name}")
        servers[self.address] = self
        self.workers: list[ProducerWorker] = []
        self._start_scheduler()
        self.workers += [ProducerWorker(self, rank) for rank in range(num_ranks)]

    def _start_scheduler(self) -> None:
        self.revive()
        self.incarnation = f"{self.name}-life{self.life}"
        self.engine = ProducerEngine(self.name, self.incarnation, self.leases)
        self.driver = Driver(self, self.engine, self._act)
        blocks = range(self.setting.pool_blocks)
        self.memory: dict[Place, str] = {(block, layer): "junk" for block in blocks for layer in range(LAYERS)}
        self.free = list(blocks)
        self.holds: dict[Key, HoldTruth] = {}
        self.opened: set[Landing] = set()
        self.closed: set[Landing] = set()
        self._routers_ids: dict[str, Key] = {}
        self._claims_on: dict[Key, dict[str, ClaimTruth]] = defaultdict(dict)

    def crash_all(self) -> None:
        for process in (self, *self.workers):
            process.crash()
        addresses = [worker.address for worker in self.workers]
        for consumer in self.consumers.values():
            for worker in consumer.workers:
                worker.hear_of_crash(addresses)

    def start_all(self) -> None:
        self._start_scheduler()
        for worker in self.workers:
            worker.start()

    # What the engine does

    def prefill(self, prompt: str, num_blocks: int, transfer_id: str, generation: int) -> Params | None:
        """Computes a prompt and holds its blocks. None: no blocks, or dead."""
        if not self.is_alive or len(self.free) < num_blocks:
            return None
        blocks = tuple(self.free.pop() for _ in range(num_blocks))
        for index, block in enumerate(blocks):
            for layer in range(LAYERS):
                self.memory[block, layer] = content_of(prompt, (index, layer))
        ref = TransferRef(self.name, self.incarnation, transfer_id, generation)
        key = (transfer_id, generation)
        self.holds[key] = HoldTruth(self._claims_on[key], list(blocks))
        num_tokens, digest = num_blocks * TOKENS_PER_BLOCK, digest_of(prompt, num_blocks)
        offer = Held(ref, num_tokens, digest, blocks_digest([blocks]), TOPOLOGY, (blocks,))
        self.later(self._rng.uniform(0.0, 0.02), lambda: self.tell(offer))
        return Params(ref, self.address, prompt, num_blocks, blocks)

    def tell(self, offer: Held) -> None:
        self.holds[offer.ref.transfer_id, offer.ref.generation].told_at = self.clock()
        self.driver.feed(offer)

    def compute(self, routers_id: str, prompt: str, num_blocks: int, compute: Compute) -> None:
        """A first leg of which the router has told the consumer already."""
        self.do(lambda: Prefill(self, routers_id, prompt, num_blocks, compute))

    def promise(self, ref: TransferRef, routers_id: str) -> HoldTruth:
        key = (ref.transfer_id, ref.generation)
        if routers_id:
            self._routers_ids[routers_id] = key
        claims = self._claims_on[routers_id, 0] if routers_id else {}
        self.holds[key] = HoldTruth(claims, [])
        return self.holds[key]

    def give_back(self, blocks: Iterable[int], content: str) -> None:
        for block in blocks:
            for layer in range(LAYERS):
                self.memory[block, layer] = content
            self.free.append(block)

    def void(self) -> None:
        self.do(lambda: self.driver.feed(Void("the prefix cache is reset")))

    def close(self) -> None:
        self.do(lambda: self.driver.feed(Closing("the engine stops")))

    def relieve(self) -> None:
        """A prompt waits for blocks that others hold."""
        for transfer in self._routers_ids.values():
            if (hold := self.holds.get(transfer)) is not None and hold.told_at is not None and hold.nobody_came:
                hold.may_be_relieved = True
        self.driver.feed(Relieve("a prompt waits for blocks"))

    # Messages

    def receive(self, link: Link, message: Message) -> None:
        self.do(lambda: self._receive(link, message))

    def _receive(self, link: Link, message: Message) -> None:
        if isinstance(message, OpenWrite | CloseWrite) and message.home != self.incarnation:
            return  # as the agent does: it is no worker of this life
        if isinstance(message, Release):
            self._learn_release(message)
        elif isinstance(message, CloseWrite):
            self.closed.add(message.landing)
        self.driver.feed(Received(link, message))

    def _learn_release(self, release: Release) -> None:
        key, real = self._key(release.ref), self.claims.get(release.claim_id)
        num_ranks = release.num_ranks if real is None else real.num_ranks
        if key is None or release.num_ranks != num_ranks or num_ranks < 1:
            return
        ranks = range(num_ranks) if release.ranks is None else release.ranks
        if all(0 <= rank < num_ranks for rank in ranks):
            hold = self._hold_of(release.ref)
            claims = self._claims_on[key] if hold is None else hold.claims
            claim = claims.setdefault(release.claim_id, ClaimTruth(num_ranks))
            claim.released.update(ranks)
            if hold is not None and (release.ref.is_routers or hold.told_at is not None):
                claim.in_time.update(ranks)

    def _key(self, ref: TransferRef) -> Key | None:
        """None: meant for another life."""
        if ref.is_routers:
            return (ref.transfer_id, 0)
        return (ref.transfer_id, ref.generation) if ref.incarnation == self.incarnation else None

    def _hold_of(self, ref: TransferRef) -> HoldTruth | None:
        key = self._key(ref)
        if key is not None and ref.is_routers:
            key = self._routers_ids.get(ref.transfer_id)
        return None if key is None else self.holds.get(key)

    # What the machine says

    def _act(self, action: Send | FreeHold | Note) -> None:
        match action:
            case Send(link, message):
                self._check_answer(message)
                link.to_client(message)
            case FreeHold():
                self._free(action)
            case Note(name, _):
                self.notes[name] += 1

    def _check_answer(self, message: Message) -> None:
        if isinstance(message, Grant):
            self._promise(message.claim_id, message.lease_s).proof_until = self.clock() + message.lease_s
        elif isinstance(message, Renewed):
            for entry in message.entries:
                if entry.held:
                    self._promise(entry.claim_id, entry.lease_s)
        elif isinstance(message, WriteOpened):
            self._check_opened(message)
        elif isinstance(message, Refused):
            self.refusals[message.reason] += 1
            if message.reason in ("digest", "blocks", "topology") and "ranks" not in message.detail:
                self._disown(message.claim_id)

    def _check_opened(self, opened: WriteOpened) -> None:
        landing = opened.landing
        check(landing not in self.closed, "rule 6", f"{landing} is opened again")
        hold = self._granted(landing.claim_id)
        hold.was_written = True
        self.opened.add(landing)
        is_held = hold.told_at is not None
        check(bool(opened.block_ids) == is_held, "rule 3", f"{landing} is opened with {opened.block_ids}")

    def _disown(self, claim_id: str) -> None:
        real = self.claims.get(claim_id)
        hold = self._hold_of(real.ref) if real is not None else None
        if real is not None and hold is not None:
            claim = hold.claims.setdefault(claim_id, ClaimTruth(real.num_ranks))
            claim.granted_until = claim.proof_until
            claim.is_disowned = True

    def _granted(self, claim_id: str) -> HoldTruth:
        """What the claim is granted. It must be held, or promised, and the claim neither released nor refused."""
        real = self.claims[claim_id]
        hold = self._hold_of(real.ref)
        check(hold is not None, "rule 3", f"claim {claim_id} is granted, nothing is held for it")
        assert hold is not None
        claim = hold.claims.setdefault(claim_id, ClaimTruth(real.num_ranks))
        check(not claim.is_final, "rule 3", f"claim {claim_id} is granted after its release")
        check(not claim.is_disowned, "rule 5", f"claim {claim_id} is granted after it was refused")
        return hold

    def _promise(self, claim_id: str, lease_s: float) -> ClaimTruth:
        check(lease_s > 0, "rule 2", f"claim {claim_id} is granted {lease_s} s")
        claim = self._granted(claim_id).claims[claim_id]
        claim.granted_until = max(claim.granted_until, self.clock() + lease_s)
        return claim

    def _free(self, freed: FreeHold) -> None:
        key = (freed.ref.transfer_id, freed.ref.generation)
        hold = self.holds.pop(key, None)
        check(hold is not None, "rule 1", f"{key} is freed twice, or was never held")
        assert hold is not None
        writing = [worker.name for worker in self.workers if worker.is_writing(key)]
        check(not writing, "rule 1", f"{key} is freed while {writing} may write from it")
        if freed.outcome == "failed":
            is_relieved = hold.may_be_relieved and hold.nobody_came
            check(hold.is_dropped or is_relieved, "rule 1", f"{key} is called failed, and was asked for")
        else:
            self._check_free(key, hold, freed)
        self.outcomes[freed.outcome] += 1
        self.give_back(hold.blocks, f"what came after {key}")
        for routers_id in [name for name, named in self._routers_ids.items() if named == key]:
            del self._routers_ids[routers_id], self._claims_on[routers_id, 0]
        for worker in self.workers:
            worker.forget(freed.ref.transfer_id)

    def _check_free(self, key: Key, hold: HoldTruth, freed: FreeHold) -> None:
        now = self.clock()
        check(hold.told_at is not None, "rule 1", f"{key} is freed before the machine knew it")
        assert hold.told_at is not None
        promised = {name: claim for name, claim in hold.claims.items() if claim.is_promised}
        for name, claim in promised.items():
            check(
                claim.granted_until <= now + EPSILON_S,
                "rule 1",
                f"{key} is freed ({freed.outcome}) while claim {name} has {claim.granted_until - now:.3f} s left",
            )
        if freed.outcome in ("released", "lapsed"):
            owners = [name for name, claim in hold.claims.items() if not claim.is_disowned]
            check(bool(owners), "rule 5", f"{key} is {freed.outcome} by {sorted(hold.claims)}, who were refused")
        if freed.outcome != "lapsed":
            promised = {name: claim for name, claim in promised.items() if not claim.is_disowned}
            check(not promised, "rule 3", f"{key} is called {freed.outcome}, {sorted(promised)} are not released")
        if not hold.was_written:
            limit_s = self.leases.longest_hold_s if hold.claims else self.leases.first_hold_s
            latest = max(hold.told_at + limit_s, self.resumed_at)
            check(now <= latest + EPSILON_S, "deadline", f"{key} was held for {now - hold.told_at:.3f} s")

    def check_end(self) -> None:
        if not self.is_alive:
            return
        check(not self.holds, "leak", f"{self.name} still holds {sorted(self.holds)}")
        free, all_blocks = sorted(self.free), list(range(self.setting.pool_blocks))
        check(free == all_blocks, "leak", f"{self.name} has the free blocks {free} of {len(all_blocks)}")
        engine, most = self.engine, self.leases.max_remembered
        check(engine.num_holds == 0, "leak", f"{engine.num_holds} holds in the machine")
        check(engine.num_parked == 0, "leak", f"{engine.num_parked} messages parked")
        check(not engine._holds and not engine._parking._lots, "leak", "empty dicts are kept in the producer")
        check(len(engine._past) <= most, "leak", f"{len(engine._past)} holds are remembered")
        check(len(engine._routers_ids) <= len(engine._past), "leak", f"names of nothing: {engine._routers_ids}")
        check(len(engine._closed) <= MAX_CLOSED, "leak", f"{len(engine._closed)} landings are remembered")
        check(engine.next_deadline() is None, "leak", "the producer still waits for something")
        for worker in self.workers:
            worker.check_end()


def noise(rng: Random, params: Params, claim_id: str) -> Message:
    """A message that no honest consumer sends: wrong ranks, another prompt, or nothing for a producer to answer."""
    ref, digest = params.ref, digest_of("another prompt", 1)
    rank, num_ranks = rng.choice([(7, 3), (8, 8), (0, 99), (0, 0)])
    landing = Landing(claim_id, "noise", 0, 0)
    return rng.choice(
        [
            Release(ref, claim_id, "x", "x", 1, rng.choice([(0, 1), (98,), (99,), ()]), num_ranks, "done", ""),
            Claim(ref, claim_id, "x", "x", 0, 1, 1, 4, digest, digest, digest),
            Claim(ref, claim_id, "x", "x", rank, num_ranks, 1, 4, digest, digest, digest),
            Renew("x", "x", 1, (RenewEntry(ref, claim_id, num_ranks),)),
            Grant(claim_id, 0, 1, 1, 86_400.0),
            Renewed(1, ()),
            Failed(landing, "noise", quiet=True),
            WriteOpened(landing, 1, params.ref.transfer_id, ()),
        ]
    )


def noise_to_writer(rng: Random, params: Params, claim_id: str, worker: ProducerWorker, consumer: Consumer) -> Message:
    """An order for another prompt or wrong ranks, or a cancel of what was never ordered."""
    rank, num_ranks = rng.choice([(0, 1), (7, 3), (0, 0), (0, 99)])
    landing = Landing(claim_id, f"noise {rng.random()}", rank, rng.choice([worker.rank, 99]))
    incarnation = rng.choice([worker.producer.incarnation, "an earlier life"])
    if rng.random() < 0.5:
        return CancelWrite(landing, params.ref, incarnation, num_ranks)
    return RemoteBlocks(
        landing=landing,
        ref=params.ref,
        producer_incarnation=incarnation,
        engine_id=consumer.name,
        incarnation=consumer.incarnation,
        address=consumer.address,
        key_id="",
        transport="",
        num_ranks=num_ranks,
        num_tokens=TOKENS_PER_BLOCK,
        digest=digest_of("another prompt", 1),
        topology_digest=TOPOLOGY,
        first_token=0,
        end_token=TOKENS_PER_BLOCK,
        window_starts=(),
        block_ids=((0,),),
    )
