"""The producer's side: blocks, holds, the real ProducerEngine, and what is known to be true of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from kvferry.protocol.digest import blocks_digest, prompt_digest
from kvferry.protocol.lease import Leases
from kvferry.protocol.messages import Claim, Grant, Message, Refused, Release, Renew, Renewed, RenewEntry, TransferRef
from kvferry.protocol.producer import Closing, FreeHold, Held, Note, ProducerEngine, Received, Send, Void
from kvsim.world import EPSILON_S, Driver, Link, Process, World, check

TOPOLOGY = b"topology of all!"
TOKENS_PER_BLOCK = 4


def digest_of(prompt: str, num_blocks: int) -> bytes:
    tokens = [ord(letter) for letter in prompt.ljust(num_blocks * TOKENS_PER_BLOCK)]
    return prompt_digest(tokens, model="m", lora="", cache_salt="", mm_hashes=(), weights_epoch="")


@dataclass(frozen=True)
class Params:
    """What a client carries from the first leg to the second."""

    ref: TransferRef
    address: str
    prompt: str
    blocks: tuple[int, ...]


class RealClaim(NamedTuple):
    ref: TransferRef
    num_ranks: int


@dataclass
class ClaimTruth:
    """What the producer has promised to a claim, and what it was told.

    granted_until: on its own clock; proof_until: of those that a rank may trust. is_disowned: its reader was refused
    for what it wants. released: ranks whose release came; is_final: all of them while the hold was
    known. What came earlier is parked, and may be answered behind a renewal that is parked as well.
    """

    num_ranks: int
    granted_until: float = float("-inf")
    proof_until: float = float("-inf")
    is_disowned: bool = False
    released: set[int] = field(default_factory=set)
    is_final: bool = False

    @property
    def is_promised(self) -> bool:
        """Granted once, and not released since."""
        return self.granted_until > float("-inf") and len(self.released) < self.num_ranks


@dataclass
class HoldTruth:
    """told_at: when the machine heard of it, on the producer's clock."""

    params: Params
    claims: dict[str, ClaimTruth]
    told_at: float | None = None


class Producer(Process):
    def __init__(self, world: World, name: str, leases: Leases, claims: dict[str, RealClaim]) -> None:
        """claims: by id, every claim that a consumer really made; filled by the consumers."""
        super().__init__(world, name)
        self.leases = leases
        self.address = f"tcp://{name}"
        self.claims = claims
        self.outcomes: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._rng = world.rng(f"producer {name}")
        self.start()

    def start(self) -> None:
        self.revive()
        self.incarnation = f"{self.name}-life{self.life}"
        self.engine = ProducerEngine(self.name, self.incarnation, self.leases)
        self.driver = Driver(self, self.engine, self._act)
        self.memory: dict[int, str] = dict.fromkeys(range(16), "junk")
        self.free = list(self.memory)
        self.holds: dict[tuple[str, int], HoldTruth] = {}
        self._claims_on: dict[tuple[str, int], dict[str, ClaimTruth]] = defaultdict(dict)

    # What the engine does

    def prefill(self, prompt: str, num_blocks: int, transfer_id: str, generation: int) -> Params | None:
        """Computes a prompt and holds its blocks. None: no blocks, or dead."""
        if not self.is_alive or len(self.free) < num_blocks:
            return None
        blocks = tuple(self.free.pop() for _ in range(num_blocks))
        for index, block in enumerate(blocks):
            self.memory[block] = f"{prompt}/{index}"
        ref = TransferRef(self.name, self.incarnation, transfer_id, generation)
        params = Params(ref, self.address, prompt, blocks)
        self.holds[transfer_id, generation] = HoldTruth(params, self._claims_on[transfer_id, generation])
        offer = Held(
            ref, num_blocks * TOKENS_PER_BLOCK, digest_of(prompt, num_blocks), blocks_digest([blocks]), TOPOLOGY
        )
        self.later(self._rng.uniform(0.0, 0.02), lambda: self._tell(offer))
        return params

    def _tell(self, offer: Held) -> None:
        self.holds[offer.ref.transfer_id, offer.ref.generation].told_at = self.clock()
        self.driver.feed(offer)

    def void(self) -> None:
        self.do(lambda: self.driver.feed(Void("the prefix cache is reset")))

    def close(self) -> None:
        self.do(lambda: self.driver.feed(Closing("the engine stops")))

    # Messages

    def receive(self, link: Link, message: Message) -> None:
        self.do(lambda: self._receive(link, message))

    def _receive(self, link: Link, message: Message) -> None:
        if isinstance(message, Release):
            self._learn_release(message)
        self.driver.feed(Received(link, message))

    def _learn_release(self, release: Release) -> None:
        ref, real = release.ref, self.claims.get(release.claim_id)
        num_ranks = release.num_ranks if real is None else real.num_ranks
        if ref.incarnation != self.incarnation or release.num_ranks != num_ranks or num_ranks < 1:
            return
        ranks = range(num_ranks) if release.ranks is None else release.ranks
        if all(0 <= rank < num_ranks for rank in ranks):
            claims = self._claims_on[ref.transfer_id, ref.generation]
            claim = claims.setdefault(release.claim_id, ClaimTruth(num_ranks))
            claim.released.update(ranks)
            hold = self._hold_of(ref)
            claim.is_final = hold is not None and hold.told_at is not None and len(claim.released) == num_ranks

    def _hold_of(self, ref: TransferRef) -> HoldTruth | None:
        return self.holds.get((ref.transfer_id, ref.generation)) if ref.incarnation == self.incarnation else None

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
        elif isinstance(message, Refused):
            self.refusals[message.reason] += 1
            if message.reason in ("digest", "blocks", "topology") and "ranks" not in message.detail:
                self._disown(message.claim_id)

    def _disown(self, claim_id: str) -> None:
        real = self.claims.get(claim_id)
        hold = self._hold_of(real.ref) if real is not None else None
        if real is not None and hold is not None:
            claim = hold.claims.setdefault(claim_id, ClaimTruth(real.num_ranks))
            claim.granted_until = claim.proof_until
            claim.is_disowned = True

    def _promise(self, claim_id: str, lease_s: float) -> ClaimTruth:
        real = self.claims[claim_id]
        hold = self._hold_of(real.ref)
        check(hold is not None, "rule 3", f"claim {claim_id} is granted, nothing is held for it")
        assert hold is not None
        check(lease_s > 0, "rule 2", f"claim {claim_id} is granted {lease_s} s")
        claim = hold.claims.setdefault(claim_id, ClaimTruth(real.num_ranks))
        check(not claim.is_final, "rule 3", f"claim {claim_id} is granted after its release")
        check(not claim.is_disowned, "rule 5", f"claim {claim_id} is granted after it was refused")
        claim.granted_until = max(claim.granted_until, self.clock() + lease_s)
        return claim

    def _free(self, freed: FreeHold) -> None:
        key = (freed.ref.transfer_id, freed.ref.generation)
        hold = self.holds.pop(key, None)
        check(hold is not None, "rule 1", f"{key} is freed twice, or was never held")
        assert hold is not None
        check(hold.told_at is not None, "rule 1", f"{key} is freed before the machine knew it")
        self._check_free(key, hold, freed)
        self.outcomes[freed.outcome] += 1
        for block in hold.params.blocks:
            self.memory[block] = f"what came after {key}"
            self.free.append(block)

    def _check_free(self, key: tuple[str, int], hold: HoldTruth, freed: FreeHold) -> None:
        now = self.clock()
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
        assert hold.told_at is not None
        limit_s = self.leases.longest_hold_s if hold.claims else self.leases.first_hold_s
        latest = max(hold.told_at + limit_s, self.resumed_at)
        check(now <= latest + EPSILON_S, "deadline", f"{key} was held for {now - hold.told_at:.3f} s")

    def check_end(self) -> None:
        if not self.is_alive:
            return
        check(not self.holds, "leak", f"{self.name} still holds {sorted(self.holds)}")
        check(len(self.free) == len(self.memory), "leak", f"{self.name} has {len(self.free)} free blocks")
        engine = self.engine
        check(engine.num_holds == 0, "leak", f"{engine.num_holds} holds in the machine")
        check(engine.num_parked == 0, "leak", f"{engine.num_parked} messages parked")
        check(not engine._holds and not engine._parking._lots, "leak", "empty dicts are kept in the producer")
        check(len(engine._past) <= self.leases.max_remembered, "leak", f"{len(engine._past)} holds are remembered")
        check(engine.next_deadline() is None, "leak", "the producer still waits for something")


def noise(rng: Random, params: Params, claim_id: str) -> Message:
    """A message that no honest consumer sends: wrong ranks, another prompt, or nothing for a producer to answer."""
    ref, digest = params.ref, digest_of("another prompt", 1)
    rank, num_ranks = rng.choice([(7, 3), (8, 8), (0, 99), (0, 0)])
    return rng.choice(
        [
            Release(ref, claim_id, "x", "x", 1, rng.choice([(0, 1), (98,), (99,), ()]), num_ranks, "done", ""),
            Claim(ref, claim_id, "x", "x", 0, 1, 1, 4, digest, digest, digest),
            Claim(ref, claim_id, "x", "x", rank, num_ranks, 1, 4, digest, digest, digest),
            Renew("x", "x", 1, (RenewEntry(ref, claim_id, num_ranks),)),
            Grant(claim_id, 0, 1, 1, 86_400.0),
            Renewed(1, ()),
        ]
    )
