"""The cluster's life, with cheap real processes in place of vLLM."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from recorder import Recorder
from waiting import wait_until

from kvferry.cli import preflight, proc
from kvferry.cli.children import Children
from kvferry.cli.errors import Problem
from kvferry.cli.servers import Cluster, Server, ServerSpec, kvferry_config, pair

FAKE = str(Path(__file__).with_name("fake_server.py"))


@dataclass(frozen=True)
class FakeSpec(ServerSpec):
    way: str = "serve"

    def command(self, port: int) -> list[str]:
        return [sys.executable, FAKE, str(port), self.way]


class Said:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.states: list[tuple[str, str, bool]] = []

    def say(self, message: str) -> None:
        self.lines.append(message)

    def state(self, name: str, text: str, done: bool = False) -> None:
        self.states.append((name, text, done))

    def show(self, view: object) -> None: ...


@pytest.fixture(autouse=True)
def vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests start no vLLM, so they also run where it can't be installed."""
    monkeypatch.setattr(preflight, "require_vllm", lambda: None)
    monkeypatch.setattr(preflight, "require_matching_torch", lambda: None)


@pytest.fixture(autouse=True)
def logs_in_a_place_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def both(model: Path, prefill: str = "serve", decode: str = "serve") -> list[ServerSpec]:
    return [FakeSpec("prefill", model, way=prefill), FakeSpec("decode", model, way=decode)]


def test_a_cluster_is_up_when_entered_and_gone_when_left(model: Path) -> None:
    said = Said()
    with Cluster(both(model), reporter=said) as cluster:
        assert cluster.alive()
        assert cluster.prefill.ready()
        assert cluster.decode.ready()
        assert cluster.prefill.url != cluster.decode.url
        servers, log_dir = cluster.everything, cluster.log_dir
        assert len(cluster.prefill.child.pids()) == 2
    assert [pid for server in servers for pid in server.child.pids()] == []
    assert [server.name for server in servers if proc.listeners(server.port)] == []
    assert not log_dir.exists()
    assert {name for name, _, done in said.states if done} == {"prefill", "decode"}


def test_a_server_that_ends_while_starting_is_a_problem_that_names_its_error(model: Path) -> None:
    said = Said()
    cluster = Cluster(both(model, decode="fail"), reporter=said)
    with pytest.raises(Problem) as raised, cluster:
        pytest.fail("entered")
    problem = raised.value
    assert "the decode server ended with status 1 while it was starting" in problem.message
    assert "ValueError: No available memory for the cache blocks." in problem.message
    assert "too little memory" in problem.advice
    assert 'raise ValueError("No available memory' in problem.details
    assert f"the logs are in {cluster.log_dir}" in said.lines
    assert (cluster.log_dir / "decode.log").exists()
    assert [pid for server in cluster.servers for pid in server.child.pids()] == []


def test_a_server_that_never_answers_is_a_problem(model: Path) -> None:
    for way in ("hang", "deaf"):
        cluster = Cluster(both(model, prefill=way), start_timeout_s=2)
        with pytest.raises(Problem, match="the prefill server does not answer after 2 s"), cluster:
            pytest.fail("entered")
        assert [pid for server in cluster.servers for pid in server.child.pids()] == []


def test_a_port_that_is_taken_is_a_problem_before_anything_starts(
    model: Path, new_server: Callable[[], Recorder]
) -> None:
    taken = new_server().port
    cluster = Cluster([FakeSpec("prefill", model, port=taken)])
    with (
        pytest.raises(Problem, match=f"port {taken} .* wanted for prefill, is in use by process {os.getpid()}"),
        cluster,
    ):
        pytest.fail("entered")
    assert cluster.servers == []


def test_an_answer_of_a_foreign_server_is_not_taken_for_ours(
    children: Children, new_server: Callable[[], Recorder]
) -> None:
    foreign = new_server()
    foreign.answers["/health"] = lambda _: (200, "")
    child = children.start("prefill", [sys.executable, "-c", "import time; time.sleep(600)"])
    assert not Server(child, foreign.port, children, None).ready()


def test_a_killed_server_is_seen_and_can_be_restarted_on_its_port(model: Path) -> None:
    with Cluster(both(model)) as cluster:
        before = cluster.prefill
        before.kill()
        assert not before.alive()
        assert not cluster.alive()
        assert cluster.decode.ready()
        after = cluster.restart(before)
        assert cluster.prefill is after
        assert after.ready()
        assert (after.port, after.alive(), cluster.alive()) == (before.port, True, True)
        assert after.child.pid != before.child.pid


def test_a_suspended_server_does_not_answer_until_it_is_resumed(model: Path) -> None:
    with Cluster([FakeSpec("decode", model)]) as cluster:
        cluster.decode.suspend()
        wait_until(lambda: not cluster.decode.ready(), "silence")
        cluster.decode.resume()
        wait_until(cluster.decode.ready, "an answer")


def test_logs_are_kept_after_an_exception_and_told(model: Path) -> None:
    said = Said()
    cluster = Cluster(both(model), reporter=said)
    with pytest.raises(RuntimeError, match="a test failed"), cluster:
        raise RuntimeError("a test failed")
    assert said.lines[-1] == f"the logs are in {cluster.log_dir}"
    assert (cluster.log_dir / "prefill.log").read_text() == "Application startup complete\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_leaves_nothing(model: Path, error: type[BaseException]) -> None:
    cluster = Cluster(both(model))
    with pytest.raises(error), cluster:
        raise error
    assert not cluster.log_dir.exists()
    assert [pid for server in cluster.servers for pid in server.child.pids()] == []


def test_a_failure_report_has_the_last_lines_of_each_log(model: Path) -> None:
    with Cluster(both(model)) as cluster:
        report = cluster.failure_report()
    assert report.count("Application startup complete") == 2
    assert "--- prefill (" in report


def test_what_is_no_model_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=f"{tmp_path} is no model directory"), Cluster(both(tmp_path)):
        pytest.fail("entered")


def test_too_little_memory_is_a_problem(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: preflight.GIB)
    with pytest.raises(Problem, match=r"need about [\d.]+ GiB, 1.0 GiB are available"), Cluster(both(model)):
        pytest.fail("entered")


def test_the_router_is_missing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Problem, match="vllm-router is not installed"), Cluster(both(model), router=True):
        pytest.fail("entered")


def test_two_servers_of_one_name_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="different names"), Cluster([FakeSpec("decode", model)] * 2):
        pytest.fail("entered")


def test_a_role_that_is_none(model: Path) -> None:
    with pytest.raises(ValueError, match="role: 'both'"):
        ServerSpec("both", model)


def test_a_cluster_without_a_router_says_so(model: Path) -> None:
    with Cluster([FakeSpec("decode", model)]) as cluster:
        with pytest.raises(ValueError, match="without a router"):
            _ = cluster.router
        with pytest.raises(ValueError, match="no prefill server"):
            _ = cluster.prefill


def test_the_command_line_of_a_real_server(model: Path) -> None:
    prefill, decode = pair(model, 1, 2, "nixl", "fail", {"lease_s": 3.0}, args=("--block-size", "32"), env={"A": "b"})
    command = decode.command(1234)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = dict(pairwise(command))
    assert (options["--host"], options["--port"], options["--tensor-parallel-size"]) == ("127.0.0.1", "1234", "2")
    assert command[-2:] == ["--block-size", "32"]
    assert json.loads(options["--kv-transfer-config"]) == {
        "kv_connector": "KVFerryConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"transports": ["nixl"], "lease_s": 3.0},
        "kv_load_failure_policy": "fail",
    }
    assert kvferry_config("prefill")["kv_connector_extra_config"] == {}
    environment = prefill.environment(Path("/scratch"))
    assert (environment["A"], environment["TMPDIR"], environment["VLLM_HOST_IP"]) == ("b", "/scratch", "127.0.0.1")
    assert "--kv-transfer-config" not in ServerSpec("decode", model).command(1)


def test_a_child_killed_from_outside_is_put_down_to_memory(model: Path) -> None:
    @dataclass(frozen=True)
    class KilledSpec(FakeSpec):
        def command(self, port: int) -> list[str]:
            return [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"]

    with pytest.raises(Problem) as raised, Cluster([KilledSpec("decode", model)]):
        pytest.fail("entered")
    assert "ended with status -9" in raised.value.message
    assert "ran out of memory" in raised.value.advice
