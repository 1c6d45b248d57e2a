"""Peers that die, never come, or come back: the survivor is healthy and the client gets a right answer or an error."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import caches
import pytest
from checks import (
    alone,
    assert_drained,
    assert_same,
    cpu_seconds,
    eventually,
    first_leg,
    generate,
    prompt_of,
    salt,
    second_leg,
    second_leg_alone,
)
from harness import PATIENT, PairConfig

from kvferry.cli import api, models
from kvferry.cli.servers import Cluster, ServerSpec
from kvferry.cli.servers import pair as servers_of

SHORT = {"first_hold_s": 4, "lease_s": 4, "renew_s": 1}
SLOW = {"transport_options": {"local": {"wire_mbps": 5.0}}}
"""1,500 tokens of this model, 49 MB, take ten seconds, so that something can happen meanwhile."""
RECOMPUTE = PairConfig(
    kind="llama-deep",
    policy="recompute",
    transport="local",
    extra={**SHORT, **SLOW},
    max_num_batched_tokens=256,
)
FAIL = PairConfig(policy="fail", transport="nixl", extra=SHORT)


@pytest.mark.parametrize("pair", [RECOMPUTE], indirect=True, ids=["recompute"])
class TestRecompute:
    def test_blocks_held_for_a_reader_that_never_comes_use_no_cpu_and_expire(self, pair: Cluster) -> None:
        first_leg(pair, prompt_of(600, seed=40))
        held = pair.prefill.used_blocks()
        assert held > 0
        before = cpu_seconds(pair.prefill)
        time.sleep(2.0)  # a span to measure over, not a wait for anything
        assert cpu_seconds(pair.prefill) - before < 1.0  # vLLM's own way uses a core and a quarter
        eventually(lambda: pair.prefill.used_blocks() == 0, "the hold expires")
        assert pair.prefill.metrics().get("vllm:kvferry_holds_total", outcome="expired") >= 1

    def test_a_second_leg_that_comes_too_late_recomputes(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=41)
        expected = alone(pair, prompt)
        body, params = first_leg(pair, prompt)
        eventually(lambda: pair.prefill.used_blocks() == 0, "the hold expires")
        assert_same(second_leg(pair, body, params), expected, "recomputed")
        assert_drained(pair)

    def test_a_producer_that_stops_answering_costs_only_its_own_requests(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=42)
        expected = alone(pair, prompt)
        body, params = first_leg(pair, prompt)
        pair.prefill.suspend()
        try:
            with ThreadPoolExecutor(1) as pool:
                stuck = pool.submit(second_leg, pair, body, params)
                # Others are served meanwhile.
                assert alone(pair, prompt) == expected
                assert not stuck.done() or api.tokens(stuck.result()) == expected
                pair.prefill.resume()
                assert api.tokens(stuck.result()) == expected
        finally:
            pair.prefill.resume()
        assert_drained(pair)

    def test_a_producer_killed_between_the_legs(self, pair: Cluster) -> None:
        prompt = prompt_of(600, seed=43)
        expected = alone(pair, prompt)
        assert_same(second_leg(pair, *first_leg(pair, prompt)), expected, "remote")
        body, params = first_leg(pair, prompt)
        pair.prefill.kill()
        assert_same(second_leg(pair, body, params), expected, "recomputed")
        assert alone(pair, prompt) == expected
        pair.restart(pair.prefill)
        assert_same(second_leg(pair, body, params), expected, "recomputed")  # the old start's parameters
        assert_same(second_leg(pair, *first_leg(pair, prompt)), expected, "remote")
        assert_drained(pair)


@pytest.mark.parametrize("pair", [FAIL], indirect=True, ids=["fail"])
class TestFail:
    def test_borrowed_parameters_are_an_error(self, pair: Cluster) -> None:
        _, borrowed = first_leg(pair, prompt_of(300, seed=50))
        body = api.completion_body(prompt_of(300, seed=51), cache_salt=salt())
        with pytest.raises(api.HttpError) as failed:
            second_leg(pair, body, borrowed)
        assert failed.value.status == 500
        assert "the prompt's KV could not be loaded" in failed.value.body
        assert "digest" in failed.value.body
        assert_drained(pair)

    def test_parameters_that_make_no_sense_are_an_error(self, pair: Cluster) -> None:
        body, params = first_leg(pair, prompt_of(300, seed=52))
        with pytest.raises(api.HttpError) as failed:
            second_leg(pair, body, {**params, "remote_block_ids": "none"})
        assert failed.value.status == 500
        assert "remote_block_ids" in failed.value.body
        prompt = prompt_of(300, seed=53)
        assert_same(second_leg(pair, *first_leg(pair, prompt)), alone(pair, prompt), "remote")
        assert_drained(pair)

    def test_a_producer_killed_between_the_legs(self, pair: Cluster) -> None:
        prompt = prompt_of(600, seed=54)
        expected = alone(pair, prompt)
        assert_same(second_leg(pair, *first_leg(pair, prompt)), expected, "remote")
        body, params = first_leg(pair, prompt)
        pair.prefill.kill()
        with pytest.raises(api.HttpError) as failed:
            second_leg(pair, body, params)
        assert failed.value.status == 500
        assert alone(pair, prompt) == expected
        eventually(lambda: pair.decode.used_blocks() == 0, "the failed load's blocks are free")


@pytest.mark.parametrize("pair", [RECOMPUTE], indirect=True, ids=["recompute"])
class TestWrite:
    """Both legs come at once, and the prefill server writes while it computes."""

    def test_a_first_leg_that_never_comes(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=70)
        expected = alone(pair, prompt)
        answer = api.post(f"{pair.decode.url}/v1/completions", second_leg_alone(pair, prompt))
        assert "unknown" in assert_same(answer, expected, "recomputed")["reason"]
        assert_drained(pair)

    @pytest.mark.wide
    def test_a_first_leg_whose_client_leaves(self, pair: Cluster) -> None:
        prompt = prompt_of(1500, seed=71)
        expected = alone(pair, prompt)
        with half_written(pair, prompt) as (first, second):
            first.drop()
            assert api.tokens(second.result()) == expected
        assert_drained(pair)

    @pytest.mark.wide
    def test_a_consumer_killed_after_its_announcement(self, pair: Cluster) -> None:
        body = second_leg_alone(pair, prompt_of(600, seed=72))
        lonely = api.Stream(pair.decode.url, body)
        wait_for_its_kv(pair)
        pair.decode.kill()
        lonely.drop()
        api.post(f"{pair.prefill.url}/v1/completions", first_leg_of(body))
        eventually(lambda: pair.prefill.used_blocks() == 0, "the blocks come back")
        pair.restart(pair.decode)
        prompt = prompt_of(300, seed=73)
        assert_same(generate(pair, prompt, "at once"), alone(pair, prompt), "remote")
        assert_drained(pair)

    def test_a_producer_killed_after_the_first_layer(self, pair: Cluster) -> None:
        prompt = prompt_of(1500, seed=74)
        expected = alone(pair, prompt)
        with half_written(pair, prompt) as (first, second):
            pair.prefill.kill()
            first.drop()
            assert_same(second.result(), expected, "recomputed")
        eventually(lambda: pair.decode.used_blocks() == 0, "the failed load's blocks are free")
        assert alone(pair, prompt) == expected  # the last test of this pair: nobody needs the prefill server again


@contextmanager
def half_written(pair: Cluster, prompt: list[int]) -> Iterator[tuple[api.Stream, Future[api.Json]]]:
    """Both legs run, and some of the prompt has been written, not all: the first leg, and the second one's answer."""
    body = second_leg_alone(pair, prompt)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(api.post, f"{pair.decode.url}/v1/completions", body)
        wait_for_its_kv(pair)
        landed = Landed(pair)
        first = api.Stream(pair.prefill.url, first_leg_of(body))
        eventually(landed, "something has been written")
        yield first, second


def wait_for_its_kv(pair: Cluster) -> None:
    eventually(lambda: pair.decode.metrics().value("vllm:num_requests_waiting") >= 1, "a request waits for its KV")


def first_leg_of(second: api.Json) -> api.Json:
    """The prefill leg that belongs to a decode leg of the concurrent contract."""
    name = second["kv_transfer_params"]["transfer_id"]
    return {**second, "max_tokens": 1, "kv_transfer_params": {**api.PREFILL_PARAMS, "transfer_id": name}}


class Landed:
    """Whether something was written into the decode server's first layer since this was made."""

    def __init__(self, pair: Cluster) -> None:
        record = caches.record_of(pair.decode)
        self._worker, self._layer = record.workers[0], record.layouts[0].layers[0]
        self._before = caches.blocks(self._worker, self._layer)

    def __call__(self) -> bool:
        return caches.blocks(self._worker, self._layer) != self._before


def two_models(model: Path) -> list[ServerSpec]:
    """The decode server has the same architecture with other weights."""
    sides = servers_of(model, transport="local", policy="fail", extra=PATIENT)
    return [sides[0], replace(sides[1], model=models.tiny("llama", seed=1))]


@pytest.mark.parametrize("pair", [PairConfig(specs=two_models)], indirect=True, ids=["models"])
def test_a_pair_that_does_not_fit_is_refused_by_name_on_both_sides_and_to_the_client(pair: Cluster) -> None:
    body, params = first_leg(pair, prompt_of(300, seed=60))
    with pytest.raises(api.HttpError) as failed:
        second_leg(pair, body, params)
    refusal = re.search(r"model: consumer has (\w+), producer has (\w+)", failed.value.body)
    assert refusal is not None, failed.value.body
    for server in (pair.prefill, pair.decode):
        eventually(
            lambda server=server: any(refusal.group() in line for line in server.log_lines(2000)),
            f"{server.name} logs the reason",
        )
    assert_drained(pair)
