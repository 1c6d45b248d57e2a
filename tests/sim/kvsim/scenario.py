"""What happens in one schedule, drawn from its seed: as data, so that a failing one can be made smaller."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import msgspec

from kvferry.protocol.lease import Leases
from kvferry.protocol.loader import LONGEST_CANCEL_S
from kvsim.prefill import Compute
from kvsim.prompts import Habits, Setting
from kvsim.world import Weather


@dataclass(frozen=True)
class Second:
    """Second legs of a transfer: `copies` requests at once, `after_s` after the first leg.

    flavour: good, or in what the parameters are wrong.
    """

    consumer: int
    after_s: float
    copies: int
    queue_s: float
    fate: str
    abort_s: float
    flavour: str
    is_written: bool


@dataclass(frozen=True)
class Transfer:
    """compute: None where the second legs wait for the first; else the router sends all at once, and transfer_id is the
    router's."""

    at: float
    producer: int
    num_blocks: int
    transfer_id: str
    generation: int
    seconds: tuple[Second, ...]
    compute: Compute | None = None


@dataclass(frozen=True)
class Fault:
    """kind: what happens, a method of `simulate.Run`. who: an index into what it may hit."""

    at: float
    kind: str
    who: int
    for_s: float


@dataclass(frozen=True)
class Scenario:
    """is_calm: nothing goes wrong, so nothing may fail either."""

    seed: int
    is_calm: bool
    setting: Setting
    producer_ranks: tuple[int, ...]  # of each producer
    ranks: tuple[int, ...]  # of each consumer
    transfers: tuple[Transfer, ...]
    faults: tuple[Fault, ...]
    until: float


OTHER_FAULTS = ["die", "noise_to_writer", "void", "lose", "lose_writer", "close"]
RACE_FAULTS = ["die", "die", "die", "crash", "pause_writer", "pause", "lose_writer"]
FLAVOURS = ("wrong_prompt", "wrong_blocks", "older", "newer", "wrong_incarnation")


def draw(seed: int, kind: str = "") -> Scenario:
    """kind: calm, edge, race, crowd or storm; "" for any."""
    rng = Random(f"scenario {seed}")
    kind = kind or rng.choices(["calm", "edge", "race", "crowd", "storm"], [15, 20, 20, 5, 40])[0]
    lease_s = rng.choice([2.0, 4.0, 30.0])
    if kind == "edge":
        return _edge(rng, seed, lease_s)
    if kind == "race":
        return _race(rng, seed, lease_s)
    is_calm = kind == "calm"
    leases = _leases(rng, lease_s, is_calm)
    producer_ranks = tuple(rng.choice([1, 2]) for _ in range(rng.choice([1, 1, 2])))
    ranks = tuple(rng.choice([1, 2, 3]) for _ in range(rng.choice([1, 1, 2])))
    transfers = tuple(
        _transfer(rng, index, lease_s, is_calm, len(producer_ranks), len(ranks))
        for index in range(rng.choice([1, 2, 3, 4]))
    )
    weather = Weather() if is_calm else _weather(rng, lease_s)
    habits = Habits() if is_calm else _habits(rng, lease_s)
    transfers = _reuse_ids(rng, transfers, is_calm)
    pool_blocks = 16
    if kind == "crowd":
        pool_blocks = rng.choice([3, 4, 5])
        transfers = tuple(_at_once(rng, transfer, lease_s) for transfer in transfers)
    return Scenario(
        seed=seed,
        is_calm=is_calm,
        setting=Setting(leases, weather, habits, pool_blocks),
        producer_ranks=producer_ranks,
        ranks=ranks,
        transfers=transfers,
        faults=() if is_calm else tuple(_fault(rng, lease_s) for _ in range(rng.choice([0, 1, 1, 2, 3, 5]))),
        until=60 * lease_s + 4 * leases.first_hold_s + 3 * LONGEST_CANCEL_S,
    )


def _edge(rng: Random, seed: int, lease_s: float) -> Scenario:
    """Reads that end about when their lease does, while nobody renews it: what time proves, and what it doesn't."""
    second = Second(
        consumer=0, after_s=0.0, copies=1, queue_s=0.0, fate="load", abort_s=0.0, flavour="good", is_written=False
    )
    leases = Leases(
        first_hold_s=lease_s, lease_s=lease_s, renew_s=lease_s / 2, claim_reply_s=lease_s * 4, load_s=lease_s * 6
    )
    read_s = rng.choice([(0.0, 1.2 * lease_s), (0.85 * lease_s, 1.05 * lease_s)])
    weather = Weather(slow=rng.choice([0.0, 0.5, 0.7]), slow_s=lease_s * 0.9, delay_s=(0.0005, 0.02))
    return Scenario(
        seed=seed,
        is_calm=False,
        setting=Setting(leases, weather, Habits(slow_read=1.0, slow_read_s=read_s)),
        producer_ranks=(1,),
        ranks=(rng.choice([1, 2]),),
        transfers=(Transfer(0.0, 0, 3, "t0", 1, (second,)),),
        faults=(
            Fault(0.001, "pause_scheduler", 0, lease_s * 10),
            *(_fault(rng, lease_s) for _ in range(rng.choice([0, 0, 1]))),
        ),
        until=60 * lease_s,
    )


def _race(rng: Random, seed: int, lease_s: float) -> Scenario:
    """One prompt that is written while it is computed, slowly, over a network that keeps no order: it is preempted,
    dropped or no longer wanted meanwhile, or somebody dies."""
    second = Second(
        consumer=0,
        after_s=rng.uniform(0.0, 0.1) * lease_s,
        copies=1,
        queue_s=0.0,
        fate=rng.choice(["load", "load", "abort_loading"]),
        abort_s=rng.uniform(0.0, rng.choice([0.05, 0.7])) * lease_s,
        flavour=rng.choice([*["good"] * 7, "wrong_prompt"]),
        is_written=True,
    )
    compute = Compute(
        delay_s=rng.uniform(0.0, 0.1) * lease_s,
        steps=3,
        step_s=rng.uniform(0.01, rng.choice([0.02, 0.3])) * lease_s,
        preempted_at=rng.choice([-1, 1, 2, 3]),
        dropped_at=rng.choice([-1, -1, 1, 2]),
        resume_s=0.01,
    )
    is_sequential = rng.random() < 0.3
    weather = Weather(
        loss=rng.choice([0.0, 0.25, 0.5]),
        duplication=rng.choice([0.0, 0.2]),
        slow=rng.choice([0.3, 0.7]),
        slow_s=lease_s * rng.choice([0.5, 1.0]),
        is_fifo=False,
        delay_s=(0.0005, 0.02),
        ends_at=40 * lease_s,
    )
    habits = Habits(
        slow_write=1.0,
        slow_write_s=(0.0, lease_s * rng.choice([0.1, 0.8])),
        write_fails=rng.choice([0.0, 0.1]),
        unable=rng.choice([0.0, 0.0, 0.2]),
    )
    leases = msgspec.structs.replace(_leases(rng, lease_s, False), max_parked=1024, max_claims=256)
    faults = [Fault(rng.uniform(0.0, 0.8) * lease_s, kind, rng.choice([0, 1, 1]), lease_s) for kind in RACE_FAULTS]
    return Scenario(
        seed=seed,
        is_calm=False,
        setting=Setting(leases, weather, habits),
        producer_ranks=(rng.choice([1, 2]),),
        ranks=(rng.choice([1, 2]),),
        transfers=(Transfer(0.0, 0, 3, "t0", 1, (second,), None if is_sequential else compute),),
        faults=tuple(rng.sample(faults, rng.choice([0, 1, 1, 1]))),
        until=64 * lease_s + 3 * LONGEST_CANCEL_S,
    )


def _leases(rng: Random, lease_s: float, is_calm: bool) -> Leases:
    first_hold_s = lease_s * rng.choice([1.0, 2.0])
    return Leases(
        first_hold_s=first_hold_s,
        lease_s=lease_s,
        renew_s=lease_s / rng.choice([2.5, 6.0]),
        claim_reply_s=lease_s / rng.choice([4.0, 15.0]),
        parking_s=lease_s / rng.choice([2.0, 6.0]),
        handshake_s=lease_s / 2,
        longest_hold_s=lease_s * (20.0 if is_calm else rng.choice([2.0, 20.0])),
        load_s=lease_s * rng.choice([1.0, 2.0, 4.0]),
        write_s=lease_s * (8.0 if is_calm else rng.choice([1.0, 2.0, 4.0, 8.0])),
        max_parked=1024 if is_calm else rng.choice([2, 1024, 1024, 1024]),
        max_claims=256 if is_calm else rng.choice([1, 256, 256, 256]),
        max_remembered=4096 if is_calm else rng.choice([1, 4096, 4096]),
    )


def _weather(rng: Random, lease_s: float) -> Weather:
    return Weather(
        loss=rng.choice([0.0, 0.05, 0.25]),
        duplication=rng.choice([0.0, 0.1, 0.4]),
        slow=rng.choice([0.0, 0.05, 0.3]),
        slow_s=lease_s * rng.choice([0.1, 0.5, 1.5]),
        is_fifo=rng.random() < 0.6,
        delay_s=(0.0005, 0.02),
        ends_at=40 * lease_s,
    )


def _habits(rng: Random, lease_s: float) -> Habits:
    return Habits(
        slow_read=rng.choice([0.0, 0.3, 0.8]),
        slow_read_s=(0.0, lease_s * rng.choice([0.6, 1.6])),
        read_fails=rng.choice([0.0, 0.1, 0.3]),
        slow_write=rng.choice([0.0, 0.3, 0.8]),
        slow_write_s=(0.0, lease_s * rng.choice([0.1, 0.6, 1.6])),
        write_fails=rng.choice([0.0, 0.1, 0.3]),
        unable=rng.choice([0.0, 0.0, 0.1, 0.3]),
        wrong_topology=rng.choice([0.0, 0.0, 0.1]),
        silent_handshake=rng.choice([0.0, 0.0, 0.1]),
    )


def _transfer(rng: Random, index: int, lease_s: float, is_calm: bool, producers: int, consumers: int) -> Transfer:
    num_seconds = rng.choice([0, 1, 1, 1]) if is_calm else rng.choice([0, 1, 1, 2, 3])
    return Transfer(
        at=rng.uniform(0.0, 6 * lease_s),
        producer=rng.randrange(producers),
        num_blocks=rng.choice([1, 2, 3]),
        transfer_id=f"t{index}",
        generation=1,
        seconds=tuple(_second(rng, lease_s, is_calm, consumers) for _ in range(num_seconds)),
        compute=_compute(rng, lease_s, is_calm) if rng.random() < 0.35 else None,
    )


def _compute(rng: Random, lease_s: float, is_calm: bool) -> Compute:
    steps = rng.choice([1, 2, 3])
    longest_s = 0.1 if is_calm else rng.choice([0.02, 0.1, lease_s * 0.5])
    return Compute(
        delay_s=rng.choice([0.0, rng.uniform(0.0, 0.3)]) * lease_s if is_calm or rng.random() < 0.9 else 1.2 * lease_s,
        steps=steps,
        step_s=rng.uniform(0.001, longest_s),
        preempted_at=rng.choice([-1, -1, 0, *range(1, steps + 1)]),
        dropped_at=-1 if is_calm else rng.choice([-1, -1, -1, *range(steps + 1)]),
        resume_s=rng.uniform(0.0, longest_s),
    )


def _at_once(rng: Random, transfer: Transfer, lease_s: float) -> Transfer:
    """Prompts that all come together, to a pool that does not hold them all: some wait for what others hold."""
    return replace(transfer, at=rng.uniform(0.0, 0.2) * lease_s, compute=_compute(rng, lease_s, False))


def _second(rng: Random, lease_s: float, is_calm: bool, consumers: int) -> Second:
    is_late = not is_calm and rng.random() < 0.25
    return Second(
        consumer=rng.randrange(consumers),
        after_s=rng.uniform(0.5, 5.0) * lease_s if is_late else rng.uniform(0.0, 0.3) * lease_s,
        copies=rng.choice([1, 1, 2, 3]),
        queue_s=rng.choice([0.0, rng.uniform(0.0, 0.3), rng.uniform(0.0, 2.5)]) * lease_s,
        fate=rng.choice(["load"] * 7 + ["unused", "abort_queued", "abort_loading"]),
        abort_s=rng.uniform(0.0, 0.05),
        flavour="good" if is_calm or rng.random() < 0.75 else rng.choice(FLAVOURS),
        is_written=rng.random() < 0.5,
    )


def _fault(rng: Random, lease_s: float) -> Fault:
    return Fault(
        at=rng.uniform(0.0, 8 * lease_s),
        kind=rng.choice(
            ["pause"] * 5 + ["pause_writer"] * 3 + ["cut"] * 4 + ["crash"] * 2 + ["noise"] * 2 + OTHER_FAULTS
        ),
        who=rng.randrange(100),
        for_s=lease_s * rng.choice([rng.uniform(0.05, 0.5), rng.uniform(0.5, 2.5)]),
    )


def _reuse_ids(rng: Random, transfers: tuple[Transfer, ...], is_calm: bool) -> tuple[Transfer, ...]:
    """Now and then a router uses an id again: the same name, the next generation. Its own names it must not use again:
    who asks by one is refused while it is remembered."""
    if len(transfers) < 2 or rng.random() < 0.7 or (is_calm and transfers[1].compute is not None):
        return transfers
    first, second, *others = transfers
    first, second = sorted((first, second), key=lambda transfer: transfer.at)  # generations count upwards
    second = replace(second, producer=first.producer, transfer_id=first.transfer_id, generation=2)
    return (first, second, *others)
