"""Runs a schedule and tells whether a rule was broken; makes a failing one smaller."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from kvferry.protocol.events import WriterLost
from kvferry.protocol.messages import Renew, TransferRef
from kvsim.consumer import Ask, Consumer
from kvsim.loads import Worker
from kvsim.producer import Producer, noise, noise_to_writer
from kvsim.prompts import Params, RealClaim
from kvsim.scenario import Fault, Scenario, Second, Transfer, draw
from kvsim.world import Process, Violation, World, check
from kvsim.writes import ProducerWorker

Item = TypeVar("Item")


@dataclass
class Result:
    """violation: "" if every rule held. ends: of requests, by mode and state; outcomes: of holds; num_stuck: loads in
    quarantine for ever, since nobody can prove that their writer is gone."""

    seed: int
    violation: str = ""
    num_events: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    num_stuck: int = 0
    trace: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Sum up the counts of another schedule."""
        self.num_events += other.num_events
        self.ends.update(other.ends)
        self.outcomes.update(other.outcomes)
        self.refusals.update(other.refusals)
        self.num_stuck += other.num_stuck


class Run:
    def __init__(self, scenario: Scenario, trace: bool) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, trace)
        self.claims: dict[str, RealClaim] = {}
        servers: dict[str, Any] = {}
        consumers: dict[str, Consumer] = {}
        setting = scenario.setting
        self.producers = [
            Producer(self.world, f"p{index}", setting, ranks, self.claims, servers, consumers)
            for index, ranks in enumerate(scenario.producer_ranks)
        ]
        by_address = {producer.address: producer for producer in self.producers}
        self.consumers = [
            Consumer(self.world, f"d{index}", setting, ranks, by_address, self.claims, servers)
            for index, ranks in enumerate(scenario.ranks)
        ]
        consumers.update({consumer.address: consumer for consumer in self.consumers})
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
        prompt, num_blocks, compute = f"prompt {index}", transfer.num_blocks, transfer.compute
        params: Params | None
        if compute is None:
            params = producer.prefill(prompt, num_blocks, transfer.transfer_id, transfer.generation)
        else:
            params = Params(TransferRef("", "", transfer.transfer_id, 0), producer.address, prompt, num_blocks, None)
            self.world.after(
                compute.delay_s, lambda: producer.compute(transfer.transfer_id, prompt, num_blocks, compute)
            )
        if params is not None:
            self._made.append(params)
            for second in transfer.seconds:
                self.world.after(second.after_s, lambda second=second: self._second_leg(params, second))

    def _second_leg(self, params: Params, second: Second) -> None:
        prompt = params.prompt if second.flavour != "wrong_prompt" else "another prompt"
        is_written = second.is_written or params.blocks is None
        ask = Ask(_spoil(params, second.flavour), prompt, second.queue_s, second.fate, second.abort_s, is_written)
        for _ in range(second.copies):
            self.consumers[second.consumer].ask(ask)

    # Faults

    def _strike(self, fault: Fault) -> None:
        self.world.log("fault", fault)
        getattr(self, f"_{fault.kind}")(fault)

    def _processes(self) -> list[Process]:
        return [*self.producers, *self.consumers, *self._producer_workers(), *self._consumer_workers()]

    def _producer_workers(self) -> list[ProducerWorker]:
        return [worker for each in self.producers for worker in each.workers]

    def _consumer_workers(self) -> list[Worker]:
        return [worker for each in self.consumers for worker in each.workers]

    def _pause_writer(self, fault: Fault) -> None:
        """Also between its leave to write and what it posts then."""
        workers = self._producer_workers()
        workers[fault.who % len(workers)].pause(fault.for_s)

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
        clients = [*self.consumers, *self._consumer_workers(), *self._producer_workers()]
        for link in clients[fault.who % len(clients)].links.values():
            link.cut_until = self.world.now + fault.for_s

    def _crash(self, fault: Fault) -> None:
        sides = [*self.producers, *self.consumers]
        side = sides[fault.who % len(sides)]
        if not side.is_alive:
            return
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

    def _noise_to_writer(self, fault: Fault) -> None:
        if not self._made:
            return
        params = self._made[fault.who % len(self._made)]
        own = [claim_id for claim_id, real in self.claims.items() if real.ref == params.ref]
        claim_id = self._rng.choice([*own, f"foreign-{len(self.claims)}"])
        consumer = self.consumers[fault.who % len(self.consumers)]
        workers = self._producer_workers()
        worker = workers[fault.who % len(workers)]
        if consumer.is_alive:
            message = noise_to_writer(self._rng, params, claim_id, worker, consumer)
            self.claims.setdefault(claim_id, RealClaim(params.ref, message.num_ranks))
            client = consumer.workers[0]
            consumer.link(client, client.links, worker.address, client.driver.feed).to_server(message)

    def _lose(self, fault: Fault) -> None:
        clients = [*self.consumers, *self._consumer_workers()]
        client = clients[fault.who % len(clients)]
        if client.is_alive:
            client.lose(self.producers[fault.who % len(self.producers)].address)

    def _lose_writer(self, fault: Fault) -> None:
        """A connection between ranks, or that of a producer's rank to a consumer's engine."""
        writers, readers = self._producer_workers(), self._consumer_workers()
        writer, reader = writers[fault.who % len(writers)], readers[fault.who % len(readers)]
        if self._rng.random() < 0.5:
            reader.do(lambda: reader.driver.feed(WriterLost(writer.address, "connection lost")))
        else:
            writer.lose(reader.consumer.address)

    # What must be so when nothing goes wrong

    def _check_calm(self) -> None:
        ended = [request for consumer in self.consumers for request in consumer.ended]
        for request in ended:
            wanted = {"load": {"accepted"}, "abort_loading": {"accepted", "failed"}}.get(request.ask.fate, {"unused"})
            check(request.state in wanted, "calm", f"{request.claim_id} is {request.state}: {request.reason}")
        claimed = {real.ref.transfer_id for real in self.claims.values()}
        outcomes = sum((producer.outcomes for producer in self.producers), Counter())
        check(outcomes["lapsed"] == outcomes["voided"] == outcomes["failed"] == 0, "calm", f"holds ended as {outcomes}")
        check(outcomes["released"] >= len(claimed), "rule 10", f"{len(claimed)} were claimed, ends are {outcomes}")


def _spoil(params: Params, flavour: str) -> Params:
    ref = params.ref
    if ref.is_routers:
        other = msgspec.structs.replace(ref, transfer_id=f"not {ref.transfer_id}")
        return params if flavour in ("good", "wrong_prompt") else replace(params, ref=other)
    match flavour:
        case "wrong_blocks" if params.blocks is not None:
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
        modes = [("written" if request.ask.is_written else "read", request.state) for request in consumer.ended]
        result.ends.update(" ".join(mode) for mode in modes)
        result.num_stuck += sum(len(worker.stuck_loads()) for worker in consumer.workers if consumer.is_alive)
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
