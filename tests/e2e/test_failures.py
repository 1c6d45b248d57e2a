"""Peers that die, never come, or come back: the survivor is healthy and the client gets a right answer or an error."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from checks import alone, assert_drained, assert_same, cpu_seconds, eventually, first_leg, prompt_of, salt, second_leg
from harness import PATIENT, PairConfig

from kvferry.cli import api, models
from kvferry.cli.servers import Cluster, ServerSpec
from kvferry.cli.servers import pair as servers_of

SHORT = {"first_hold_s": 4, "lease_s": 4, "renew_s": 1}
RECOMPUTE = PairConfig(policy="recompute", extra=SHORT)
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
