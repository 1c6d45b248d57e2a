"""Real vLLM servers: the tokens are those of the decode server alone, and every block comes back, whether the decode
server reads or the prefill server writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from checks import (
    BLOCK,
    WAYS,
    alone,
    assert_drained,
    assert_same,
    eventually,
    first_leg,
    generate,
    mismatched_legs,
    prompt_of,
    salt,
    second_leg,
    second_leg_alone,
)
from harness import PLAIN, PairConfig

from kvferry.cli import api
from kvferry.cli.servers import Cluster

SPLITS = [PLAIN, PairConfig(tp_decode=2, transport="nixl"), PairConfig(tp_prefill=2)]


@pytest.mark.parametrize("pair", SPLITS, indirect=True, ids=lambda config: f"{config.tp_prefill}to{config.tp_decode}")
class TestEverySplit:
    @pytest.mark.parametrize(
        "num_tokens", [1, 24, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 1187], ids=lambda n: f"{n}tokens"
    )
    def test_tokens_are_those_of_one_server(self, pair: Cluster, num_tokens: int) -> None:
        prompt = prompt_of(num_tokens, seed=num_tokens)
        expected = alone(pair, prompt)
        answer = second_leg(pair, *first_leg(pair, prompt))
        # vLLM computes a prompt's last token itself, so of one token there is nothing to fetch.
        report = assert_same(answer, expected, "remote" if num_tokens > 1 else "local")
        assert (report["bytes"] > 0) == (num_tokens > 1)
        assert_drained(pair)

    def test_a_repeated_prompt_hits_the_local_cache(self, pair: Cluster) -> None:
        prompt, shared = prompt_of(2 * BLOCK + 1, seed=3), salt()
        expected = alone(pair, prompt)
        first = second_leg(pair, *first_leg(pair, prompt, cache_salt=shared))
        second = second_leg(pair, *first_leg(pair, prompt, cache_salt=shared))
        assert_same(first, expected, "remote")
        assert assert_same(second, expected, "local")["bytes"] == 0
        assert_drained(pair)

    def test_of_a_shared_prefix_only_the_suffix_moves(self, pair: Cluster) -> None:
        only_the_suffix_moves(pair, "read")

    def test_many_requests_at_once_in_every_way(self, pair: Cluster) -> None:
        prompts = [prompt_of(40 + 29 * index % 500, seed=index) for index in range(32)]
        expected = [alone(pair, prompt, max_tokens=6) for prompt in prompts]

        def run(index: int) -> tuple[list[int], str]:
            answer = generate(pair, prompts[index], WAYS[index % len(WAYS)], max_tokens=6)
            return api.tokens(answer), api.transfer_report(answer)["path"]

        with ThreadPoolExecutor(32) as pool:
            assert list(pool.map(run, range(32))) == [(tokens, "remote") for tokens in expected]
        assert_drained(pair)


def only_the_suffix_moves(pair: Cluster, way: str) -> None:
    prefix, shared = prompt_of(3 * BLOCK, seed=4), salt()
    whole = generate(pair, prefix + prompt_of(40, seed=5), way, cache_salt=shared)
    longer = prefix + prompt_of(BLOCK, seed=6)
    expected = alone(pair, longer)
    answer = generate(pair, longer, way, cache_salt=shared)
    report = assert_same(answer, expected, "remote")
    assert 0 < report["bytes"] < api.transfer_report(whole)["bytes"]
    assert_drained(pair)


WRITES = [
    *(pytest.param(PLAIN, way, tokens) for way in WAYS[1:] for tokens in (BLOCK, 1187)),
    *(pytest.param(split, "at once", 1187) for split in SPLITS[1:]),
    *(
        pytest.param(split, way, tokens, marks=pytest.mark.wide)
        for split in SPLITS
        for way in WAYS[1:]
        for tokens in (1, 24, BLOCK - 1, BLOCK + 1, 983)
    ),
]


@pytest.mark.parametrize(("pair", "way", "num_tokens"), WRITES, indirect=["pair"])
def test_what_is_written_gives_the_same_tokens(pair: Cluster, way: str, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    expected = alone(pair, prompt)
    report = assert_same(generate(pair, prompt, way), expected, "remote" if num_tokens > 1 else "local")
    assert (report["bytes"] > 0) == (num_tokens > 1)
    assert_drained(pair)


@pytest.mark.parametrize(("pair", "way"), [(PLAIN, way) for way in WAYS[1:]], indirect=["pair"], ids=WAYS[1:])
def test_of_a_shared_prefix_only_the_suffix_is_written(pair: Cluster, way: str) -> None:
    only_the_suffix_moves(pair, way)


@pytest.mark.parametrize("pair", [PLAIN], indirect=True, ids=["1to1"])
class TestOrdinaryTrouble:
    """What clients and routers do, and what ended a prototype's engine. All on one pair, which must live through it."""

    def test_a_second_leg_that_comes_twice(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=10)
        expected = alone(pair, prompt)
        body, params = first_leg(pair, prompt)
        assert_same(second_leg(pair, body, params), expected, "remote")
        again = second_leg(pair, body, params)
        assert api.tokens(again) == expected
        assert api.transfer_report(again)["path"] in ("local", "recomputed")
        assert_drained(pair)

    def test_second_legs_at_the_same_time(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=11)
        expected = alone(pair, prompt)
        body, params = first_leg(pair, prompt)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: second_leg(pair, body, params), range(4)))
        assert [api.tokens(answer) for answer in answers] == [expected] * 4
        assert_drained(pair)

    def test_several_choices_of_one_prompt(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=12)
        expected = alone(pair, prompt)
        one_way = {"n": 3, "temperature": 0.5, "top_k": 1}  # vLLM takes no n above 1 with temperature 0
        answer = second_leg(pair, *first_leg(pair, prompt), **one_way)
        assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * 3
        assert_drained(pair)

    def test_prompt_logprobs_bypass_the_cache_and_release(self, pair: Cluster) -> None:
        prompt = prompt_of(200, seed=13)
        expected = alone(pair, prompt)
        answer = second_leg(pair, *first_leg(pair, prompt), prompt_logprobs=1)
        assert_same(answer, expected, "recomputed")
        assert_drained(pair)

    def test_a_leg_that_the_frontend_rejects_releases(self, pair: Cluster) -> None:
        body, params = first_leg(pair, prompt_of(300, seed=14))
        with pytest.raises(api.HttpError) as rejected:
            second_leg(pair, body, params, max_tokens=100_000)
        assert rejected.value.status == 400
        assert_drained(pair)

    def test_a_request_without_parameters(self, pair: Cluster) -> None:
        prompt = prompt_of(150, seed=15)
        assert alone(pair, prompt) == api.tokens(api.complete(pair.prefill.url, prompt, cache_salt=salt()))
        assert_drained(pair)

    def test_anothers_parameters_never_give_anothers_answer(self, pair: Cluster) -> None:
        mine, theirs = prompt_of(300, seed=16), prompt_of(300, seed=17)
        expected = alone(pair, mine)
        _, borrowed = first_leg(pair, theirs)
        body = api.completion_body(mine, cache_salt=salt())
        report = assert_same(second_leg(pair, body, borrowed), expected, "recomputed")
        assert "digest" in report["reason"]
        # The local prefix cache was not poisoned either.
        assert api.tokens(api.complete(pair.decode.url, mine, cache_salt=body["cache_salt"])) == expected
        assert_drained(pair)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"remote_block_ids": [[1, 2, 3]]}, "block"),
            ({"remote_block_ids": [[1, 2, 999_999]]}, "block"),
            ({"remote_block_ids": []}, "groups"),
            ({"remote_num_tokens": 299}, "digest"),
            ({"remote_num_tokens": 5000}, "5000"),
            ({"remote_port": 1}, "connect"),
            ({"remote_host": "203.0.113.9"}, "allowed"),
            ({"remote_engine_id": "another"}, "another"),
            ({"kvferry": {}}, "version"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_parameters_that_a_client_changed(self, pair: Cluster, change: dict, named: str) -> None:
        prompt = prompt_of(300, seed=18)
        expected = alone(pair, prompt)
        body, params = first_leg(pair, prompt)
        report = assert_same(second_leg(pair, body, {**params, **change}), expected, "recomputed")
        assert named in report["reason"]

    def test_blocks_of_unread_holds_come_back_with_a_reset(self, pair: Cluster) -> None:
        first_leg(pair, prompt_of(300, seed=19))
        assert pair.prefill.used_blocks() > 0
        api.post(f"{pair.prefill.url}/reset_prefix_cache", {})
        assert pair.prefill.used_blocks() == 0

    def test_pausing_ends_unread_holds_and_resuming_goes_on(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=23)
        expected = alone(pair, prompt)
        body, params = first_leg(pair, prompt)
        api.post(f"{pair.prefill.url}/pause", {})
        api.post(f"{pair.prefill.url}/resume", {})
        assert pair.prefill.used_blocks() == 0
        assert_same(second_leg(pair, body, params), expected, "recomputed")
        assert_same(second_leg(pair, *first_leg(pair, prompt)), expected, "remote")
        assert_drained(pair)

    def test_a_client_that_leaves_before_during_and_after(self, pair: Cluster) -> None:
        prompt = prompt_of(600, seed=20)
        expected = alone(pair, prompt)
        body, params = first_leg(pair, prompt)
        api.Stream(pair.decode.url, {**body, "kv_transfer_params": params}).drop()  # before anything was scheduled

        body, params = first_leg(pair, prompt)
        pair.prefill.suspend()  # so that no claim is answered: the load can't end
        try:
            during = api.Stream(pair.decode.url, {**body, "kv_transfer_params": params})
            eventually(lambda: pair.decode.metrics().value("vllm:num_requests_waiting") >= 1, "the load is under way")
            during.drop()
            eventually(lambda: pair.decode.metrics().value("vllm:num_requests_waiting") == 0, "the request is gone")
        finally:
            pair.prefill.resume()

        body, params = first_leg(pair, prompt)
        after = api.Stream(pair.decode.url, {**body, "max_tokens": 400, "kv_transfer_params": params})
        assert after.read_event()
        after.drop()

        assert_same(second_leg(pair, *first_leg(pair, prompt)), expected, "remote")
        assert_drained(pair)

    def test_first_legs_that_are_dropped_hold_nothing(self, pair: Cluster) -> None:
        body = api.completion_body(prompt_of(1500, seed=21), cache_salt=salt(), max_tokens=1)
        stream = api.Stream(pair.prefill.url, {**body, "kv_transfer_params": dict(api.PREFILL_PARAMS)})
        stream.drop()
        assert_drained(pair)

    def test_figures_reach_the_metrics_page_and_the_log(self, pair: Cluster) -> None:
        before = pair.decode.metrics()
        second_leg(pair, *first_leg(pair, prompt_of(300, seed=22)))

        def grown(name: str) -> bool:
            return pair.decode.metrics().get(name) > before.get(name)

        eventually(lambda: grown("vllm:kvferry_bytes_total"), "bytes are counted")
        for name in ("loads_total", "descriptors_total", "load_seconds_count", "hook_seconds_count"):
            eventually(lambda name=name: grown(f"vllm:kvferry_{name}"), f"{name} is counted")
        eventually(lambda: pair.prefill.metrics().get("vllm:kvferry_holds_total", outcome="released") > 0, "holds")
        eventually(
            lambda: any("KV Transfer metrics: loads=" in line for line in pair.decode.log_lines(5000)), "the log line"
        )


@pytest.mark.parametrize("pair", [PLAIN], indirect=True, ids=["1to1"])
def test_through_the_router(pair: Cluster) -> None:
    for num_tokens in (24, 300):
        prompt = prompt_of(num_tokens, seed=30)
        expected = alone(pair, prompt)
        answer = api.complete(pair.router.url, prompt, cache_salt=salt())
        assert_same(answer, expected, "remote")
    assert_drained(pair)


WRITTEN = PairConfig(
    router=True,
    discovery=True,
    extra={"mode": "write", "first_hold_s": 8},
    args=("--num-gpu-blocks-override", "24"),  # small pools, for what preempts
)


@pytest.mark.parametrize("pair", [WRITTEN], indirect=True, ids=["write"])
class TestWritten:
    """What is special about a producer that writes, on a pair whose router sends both legs at once."""

    def test_through_the_router_that_sends_both_legs_at_once(self, pair: Cluster) -> None:
        for num_tokens in (24, 300, 1187):
            prompt = prompt_of(num_tokens, seed=31)
            expected = alone(pair, prompt)
            assert_same(api.complete(pair.router.url, prompt, cache_salt=salt()), expected, "remote")
        assert_drained(pair)

    def test_a_second_leg_that_comes_long_after_the_first(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=32)
        expected = alone(pair, prompt)
        assert_same(generate(pair, prompt, "at once", first="prefill"), expected, "remote")
        assert_drained(pair)

    def test_a_request_may_ask_to_be_read(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=33)
        expected = alone(pair, prompt)
        body, params = first_leg(pair, prompt)
        answer = second_leg(pair, body, params, vllm_xargs={"kvferry_mode": "read"})
        assert_same(answer, expected, "remote")
        assert_same(second_leg(pair, *first_leg(pair, prompt)), expected, "remote")
        assert_drained(pair)

    def test_several_choices_of_one_prompt(self, pair: Cluster) -> None:
        prompt = prompt_of(300, seed=34)
        expected = alone(pair, prompt)
        one_way = {"n": 3, "temperature": 0.5, "top_k": 1}
        answer = generate(pair, prompt, "at once", **one_way)
        assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * 3
        assert_drained(pair)

    def test_prompt_logprobs_bypass_the_cache_and_release(self, pair: Cluster) -> None:
        prompt = prompt_of(200, seed=35)
        expected = alone(pair, prompt)
        assert_same(generate(pair, prompt, "at once", prompt_logprobs=1), expected, "recomputed")
        assert_drained(pair)

    def test_a_leg_that_the_frontend_rejects_releases(self, pair: Cluster) -> None:
        with pytest.raises(api.HttpError) as rejected:
            generate(pair, prompt_of(300, seed=36), "at once", max_tokens=100_000, first="prefill")
        assert rejected.value.status == 400
        assert_drained(pair)

    def test_two_different_prompts_under_one_name(self, pair: Cluster) -> None:
        """Each leg has a prompt of its own: the decode server must not take the other's KV."""
        mine, theirs = prompt_of(300, seed=37), prompt_of(300, seed=38)
        expected = alone(pair, mine)
        answer = mismatched_legs(pair, theirs, mine)
        report = assert_same(answer, expected, "recomputed")
        assert "digest" in report["reason"]
        assert_drained(pair)

    def test_a_client_that_leaves_while_the_producer_waits_or_writes(self, pair: Cluster) -> None:
        prompt = prompt_of(1187, seed=39)
        expected = alone(pair, prompt)
        lonely = api.Stream(pair.decode.url, second_leg_alone(pair, prompt))
        eventually(lambda: pair.decode.metrics().value("vllm:num_requests_waiting") >= 1, "it waits for its KV")
        lonely.drop()
        eventually(lambda: pair.decode.metrics().value("vllm:num_requests_waiting") == 0, "the request is gone")
        assert_same(generate(pair, prompt, "at once"), expected, "remote")
        assert_drained(pair)


@pytest.mark.wide
@pytest.mark.parametrize("pair", [PairConfig(router=True, discovery=True)], indirect=True, ids=["discovery"])
def test_through_the_router_that_finds_its_servers(pair: Cluster) -> None:
    """MoRI-IO's contract in READ: first one leg, then the other."""
    prompt = prompt_of(300, seed=70)
    expected = alone(pair, prompt)
    assert_same(api.complete(pair.router.url, prompt, cache_salt=salt()), expected, "remote")
    assert_drained(pair)


@pytest.mark.parametrize("pair", [WRITTEN], indirect=True, ids=["write"])
def test_a_producer_that_preempts_writes_again(pair: Cluster) -> None:
    """Prompts of 9 blocks for a pool of 23, in chunks and all at once: the prefill side preempts some half done."""
    prompts = [prompt_of(1100, seed=80 + index) for index in range(4)]
    expected = [alone(pair, prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: generate(pair, prompt, "at once"), prompts))
    assert [api.tokens(answer) for answer in answers] == expected
    assert "remote" in {api.transfer_report(answer)["path"] for answer in answers}
    assert_drained(pair)


@pytest.mark.parametrize("pair", [WRITTEN], indirect=True, ids=["write"])
def test_preemption_and_full_pools_change_no_token(pair: Cluster) -> None:
    """23 blocks a side for 6 requests of 4 to 7: the prefill side may hold 4, which come to the decode side at once,
    and that preempts; the others are held, or refused and recomputed."""
    prompts = [prompt_of(400, seed=60 + index) for index in range(6)]
    expected = [alone(pair, prompt, max_tokens=400) for prompt in prompts]
    held = [first_leg(pair, prompt, max_tokens=400) for prompt in prompts[:4]]

    def run(index: int) -> tuple[list[int], dict]:
        if index < len(held):
            body, params = held[index]
        else:
            body = api.completion_body(prompts[index], cache_salt=salt(), max_tokens=400)
            params = api.prefill_leg(pair.prefill.url, body)["kv_transfer_params"]
        answer = second_leg(pair, body, {**params, "mode": "read"})
        return api.tokens(answer), api.transfer_report(answer)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(run, range(6)))
    assert [tokens for tokens, _ in answers] == expected
    reports = [report for _, report in answers]
    assert "remote" in {report["path"] for report in reports}, reports
    assert pair.decode.metrics().value("vllm:num_preemptions_total") > 0
    assert_drained(pair)
