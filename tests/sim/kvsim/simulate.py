"""Runs a schedule and tells whether a rule was broken; makes a failing one smaller."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from kvferry.protocol.messages import Renew
from kvsim.consumer import Ask, Consumer
from kvsim.producer import Params, Producer, RealClaim, noise
from kvsim.scenario import Fault, Scenario, Second, Transfer, draw
from kvsim.world import Process, Violation, World, check

Item = TypeVar("Item")


@dataclass
class Result:
    """violation: "" if every rule held. ends: of requests, by state; outcomes: of holds."""

    seed: int
    violation: str = ""
    num_events: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Sum up the counts of another schedule."""
        self.num_events += other.num_events
        self.ends.update(other.ends)
        self.outcomes.update(other.outcomes)
        self.refusals.update(other.refusals)


class Run:
    def __init__(self, scenario: Scenario, trace: bool) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, trace)
        self.claims: dict[str, RealClaim] = {}
        self.producers = [
            Producer(self.world, f"p{index}", scenario.setting.leases, self.claims)
            for index in range(scenario.num_producers)
        ]
        by_address = {producer.address: producer for producer in self.producers}
        self.consumers = [
            Consumer(self.world, f"d{index}", scenario.setting, ranks, by_address, self.claims)
            for index, ranks in enumerate(scenario.ranks)
        ]
        self._rng = self.world.rng("run")
        self._made: list[Params] = []

    def run(self) -> None:
        for index, transfer in enumerate(self.scenario.transfers):
            self.world.at(transfer.at, lambda transfer=transfer, index=index: self._first_leg(transfer, index))
        for fault in self.scenario.faults:
            self.world.at(fault.at, lambda fault=fault: self._strike(fault))
        self.world.run(self.scenario.until)
        for side in (*self.producers, *self.consumers):
            side.check_end()
        if self.scenario.is_calm:
            self._check_calm()

    def _first_leg(self, transfer: Transfer, index: int) -> None:
        producer = self.producers[transfer.producer]
        params = producer.prefill(f"prompt {index}", transfer.num_blocks, transfer.transfer_id, transfer.generation)
        if params is not None:
            self._made.append(params)
            for second in transfer.seconds:
                self.world.after(second.after_s, lambda second=second: self._second_leg(params, second))

    def _second_leg(self, params: Params, second: Second) -> None:
        prompt = params.prompt if second.flavour != "wrong_prompt" else "another prompt"
        ask = Ask(_spoil(params, second.flavour), prompt, second.queue_s, second.fate, second.abort_s)
        for _ in range(second.copies):
            self.consumers[second.consumer].ask(ask)

    # Faults

    def _strike(self, fault: Fault) -> None:
        self.world.log("fault", fault)
        getattr(self, f"_{fault.kind}")(fault)

    def _processes(self) -> list[Process]:
        return [*self.producers, *self.consumers, *(worker for each in self.consumers for worker in each.workers)]

    def _pause(self, fault: Fault) -> None:
        processes = self._processes()
        processes[fault.who % len(processes)].pause(fault.for_s)

    def _pause_scheduler(self, fault: Fault) -> None:
        """And let its workers go on."""
        consumer = self.consumers[fault.who % len(self.consumers)]
        self.world.after(fault.for_s / 1000, lambda: consumer.pause(fault.for_s))

    def _die(self, fault: Fault) -> None:
        self._crash(replace(fault, for_s=float("inf")))

    def _cut(self, fault: Fault) -> None:
        clients = [client for each in self.consumers for client in (each, *each.workers)]
        for link in clients[fault.who % len(clients)].links.values():
            link.cut_until = self.world.now + fault.for_s

    def _crash(self, fault: Fault) -> None:
        sides = [*self.producers, *self.consumers]
        side = sides[fault.who % len(sides)]
        if not side.is_alive:
            return
        if isinstance(side, Producer):
            side.crash()
            self.world.after(fault.for_s, side.start)
        else:
            side.crash_all()
            self.world.after(fault.for_s, side.start_all)

    def _void(self, fault: Fault) -> None:
        self.producers[fault.who % len(self.producers)].void()

    def _close(self, fault: Fault) -> None:
        self.producers[fault.who % len(self.producers)].close()

    def _noise(self, fault: Fault) -> None:
        if not self._made:
            return
        params = self._made[fault.who % len(self._made)]
        own = [claim_id for claim_id, real in self.claims.items() if real.ref == params.ref]
        claim_id = self._rng.choice([*own, f"foreign-{len(self.claims)}"])
        consumer = self.consumers[fault.who % len(self.consumers)]
        if consumer.is_alive:
            link = consumer.link(consumer, consumer.links, params.address, consumer.driver.feed)
            message = noise(self._rng, params, claim_id)
            part = message.entries[0] if isinstance(message, Renew) else message
            self.claims.setdefault(claim_id, RealClaim(params.ref, getattr(part, "num_ranks", 1)))
            link.to_server(message)

    def _lose(self, fault: Fault) -> None:
        clients = [client for each in self.consumers for client in (each, *each.workers)]
        client = clients[fault.who % len(clients)]
        if client.is_alive:
            client.lose(self.producers[fault.who % len(self.producers)].address)

    # What must be so when nothing goes wrong

    def _check_calm(self) -> None:
        ended = [request for consumer in self.consumers for request in consumer.ended]
        for request in ended:
            wanted = {"load": {"accepted"}, "abort_loading": {"accepted", "failed"}}.get(request.ask.fate, {"unused"})
            check(request.state in wanted, "calm", f"{request.claim_id} is {request.state}: {request.reason}")
        claimed = {real.ref.transfer_id for real in self.claims.values()}
        outcomes = sum((producer.outcomes for producer in self.producers), Counter())
        check(outcomes["lapsed"] == outcomes["voided"] == 0, "calm", f"holds ended as {outcomes}")
        check(outcomes["released"] >= len(claimed), "rule 10", f"{len(claimed)} were claimed, ends are {outcomes}")


def _spoil(params: Params, flavour: str) -> Params:
    ref = params.ref
    match flavour:
        case "wrong_blocks":
            return replace(params, blocks=tuple(block ^ 1 for block in params.blocks))
        case "older":
            return replace(params, ref=msgspec.structs.replace(ref, generation=ref.generation - 1))
        case "newer":
            return replace(params, ref=msgspec.structs.replace(ref, generation=ref.generation + 1))
        case "wrong_incarnation":
            return replace(params, ref=msgspec.structs.replace(ref, incarnation="an earlier life"))
    return params


def run(scenario: Scenario, trace: bool = False) -> Result:
    """Never raises: whatever the machines or the checks raise is the result's violation."""
    one = Run(scenario, trace)
    result = Result(scenario.seed)
    try:
        one.run()
    except Violation as violation:
        result.violation = str(violation)
    except Exception:
        result.violation = f"raised: {traceback.format_exc(limit=-3)}"
    result.num_events = one.world.num_events
    result.trace = one.world.trace or []
    for consumer in one.consumers:
        result.ends.update(request.state for request in consumer.ended)
    for producer in one.producers:
        result.outcomes.update(producer.outcomes)
        result.refusals.update(producer.refusals)
    return result


def run_seed(seed: int, trace: bool = False) -> Result:
    return run(draw(seed), trace)


def shrink(scenario: Scenario) -> Scenario:
    """A scenario that still breaks a rule, and from which no transfer, second leg or fault can be left out."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _without_one(scenario):
            if run(candidate).violation:
                scenario, smaller = candidate, True
                break
    return scenario


def _without_one(scenario: Scenario) -> list[Scenario]:
    candidates = [replace(scenario, faults=_drop(scenario.faults, index)) for index in range(len(scenario.faults))]
    transfers = scenario.transfers
    candidates += [replace(scenario, transfers=_drop(transfers, index)) for index in range(len(transfers))]
    for index, transfer in enumerate(transfers):
        for which in range(len(transfer.seconds)):
            less = replace(transfer, seconds=_drop(transfer.seconds, which))
            candidates.append(replace(scenario, transfers=(*transfers[:index], less, *transfers[index + 1 :])))
    return candidates


def _drop(items: tuple[Item, ...], index: int) -> tuple[Item, ...]:
    return items[:index] + items[index + 1 :]
