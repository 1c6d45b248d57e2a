"""Real vLLM servers over each transport, on the real libraries: the same tokens, read and written, at unequal TP."""

from __future__ import annotations

import mori_env
import pytest
import verbs_stand_in
from checks import WAYS, alone, assert_drained, assert_same, generate, prompt_of
from harness import PairConfig

from kvferry.cli.servers import Cluster


def for_mori() -> dict[str, str]:
    environment = mori_env.environment(real_torch=True)
    return {name: environment[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH")}


ENVIRONMENTS = {"local": dict, "nixl": dict, "mooncake": verbs_stand_in.environment, "mori": for_mori}


@pytest.fixture
def pair(request: pytest.FixtureRequest, pair_pool) -> Cluster:
    """What a transport's library needs around it is made when a test asks for it."""
    transport, tp_prefill, tp_decode = request.param
    env = tuple(sorted(ENVIRONMENTS[transport]().items()))
    return pair_pool.get(PairConfig(tp_prefill=tp_prefill, tp_decode=tp_decode, transport=transport, env=dict(env)))


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "pair",
    [(name, *sizes) for name in ENVIRONMENTS for sizes in ((1, 1), (1, 2), (2, 1))],
    indirect=True,
    ids=lambda value: f"{value[0]}-{value[1]}to{value[2]}",
)
def test_tokens_are_those_of_one_server(pair: Cluster, way: str, request: pytest.FixtureRequest) -> None:
    transport, *_ = request.node.callspec.params["pair"]
    for num_tokens in (24, 983):
        prompt = prompt_of(num_tokens, seed=num_tokens)
        expected = alone(pair, prompt)
        report = assert_same(generate(pair, prompt, way), expected, "remote")
        assert report["transport"] == transport
    assert_drained(pair)
