"""Real vLLM servers over each transport, on the real libraries: the same tokens, read and written, at unequal TP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mori_env
import pytest
import verbs_stand_in
from checks import WAYS, alone, assert_drained, assert_same, generate, prompt_of, salt
from harness import PATIENT, PairConfig

from kvferry.cli import api
from kvferry.cli.ports import free_ports
from kvferry.cli.servers import Cluster
from kvferry.cli.servers import pair as pair_of
from kvferry.cli.specs import ServerSpec


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


@pytest.mark.wide
@pytest.mark.parametrize("transport", ENVIRONMENTS)
def test_the_demo(transport: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Every text equals the decode server's own, and all that moved went this way."""
    result = tmp_path / "demo.json"
    command = [sys.executable, "-m", "kvferry.cli.main", "demo", "--model", str(tiny_llama)]
    command += ["--transport", transport, "--tp-decode", "2", "--json", str(result)]
    environment = {**os.environ, **ENVIRONMENTS[transport]()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(result.read_bytes())["requests"]
    assert {row["equal"] for row in rows} == {True}
    assert {row["transport"] for row in rows if row["bytes"]} == {transport}


def vendors(model: Path) -> list[ServerSpec]:
    """Prefill on one vendor and decode on another: each has its own first, and NIXL besides."""
    sides = []
    for side, transport in zip(pair_of(model), ("mori", "mooncake"), strict=True):
        extra = {**PATIENT, "transports": [transport, "nixl"]}
        config = {**side.kv_config, "kv_connector_extra_config": extra}
        sides.append(replace(side, kv_config=config, env=ENVIRONMENTS[transport]()))
    return sides


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS)
def test_unlike_vendors_settle_on_what_both_have(pair_pool, way: str) -> None:
    pair = pair_pool.get(VENDORS)
    logs = {server.name: "\n".join(server.log_lines(10_000)) for server in pair.servers}
    for name, first in (("prefill", "mori"), ("decode", "mooncake")):
        assert f"offers the transports {first}, nixl" in logs[name], logs[name]
    prompt = prompt_of(983, seed=983)
    report = assert_same(generate(pair, prompt, way), alone(pair, prompt), "remote")
    assert report["transport"] == "nixl"
    assert_drained(pair)


def moriio(read_mode: bool) -> Callable[[Path], list[ServerSpec]]:
    """What a user of vLLM's MoRIIO connector has, with one more line: where the class of that name is."""

    def specs(model: Path) -> list[ServerSpec]:
        sides = []
        for side, port in zip(pair_of(model, env=for_mori()), free_ports(2), strict=True):
            extra = {**PATIENT, "read_mode": read_mode, "backend": "rdma", "qp_per_transfer": 1, "handshake_port": port}
            config = {
                **side.kv_config,
                "kv_connector": "MoRIIOConnector",
                "kv_connector_module_path": "kvferry.vllm.moriio",
                "kv_connector_extra_config": extra,
            }
            sides.append(replace(side, kv_config=config))
        return sides

    return specs


VENDORS = PairConfig(specs=vendors)
MORIIO = {read_mode: PairConfig(router=True, discovery=True, specs=moriio(read_mode)) for read_mode in (True, False)}


@pytest.fixture
def moriio_pair(request: pytest.FixtureRequest, pair_pool) -> Cluster:
    return pair_pool.get(MORIIO[request.param])


@pytest.mark.wide
@pytest.mark.parametrize("moriio_pair", [True, False], indirect=True, ids=["read", "write"])
def test_a_moriio_user_changes_one_line(moriio_pair: Cluster) -> None:
    """Under the router that finds its servers, over MoRI-IO."""
    for num_tokens in (24, 983):
        prompt = prompt_of(num_tokens, seed=num_tokens)
        expected = alone(moriio_pair, prompt)
        answer = api.complete(moriio_pair.router.url, prompt, cache_salt=salt())
        assert assert_same(answer, expected, "remote")["transport"] == "mori"
    assert_drained(moriio_pair)
