"""The client, against a real HTTP server that records what it gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from recorder import Recorder

from kvferry.cli import api
from kvferry.cli.ports import free_ports

PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}


def completion(**fields: object) -> Callable[[object], tuple[int, str]]:
    answer = {"choices": [{"text": "hi", "token_ids": [1, 2]}], **fields}
    return lambda _: (200, json.dumps(answer))


def test_a_completion_is_greedy_unless_told_otherwise(new_server: Callable[[], Recorder]) -> None:
    server = new_server()
    server.answers["/v1/completions"] = completion()
    answer = api.complete(server.url, "hello", max_tokens=3, cache_salt="s")
    assert (api.text(answer), api.tokens(answer)) == ("hi", [1, 2])
    _, _, body = server.requests[0]
    assert body == {
        "model": "default",
        "prompt": "hello",
        "max_tokens": 3,
        "temperature": 0.0,
        "return_token_ids": True,
        "cache_salt": "s",
    }


def test_two_legs_are_what_a_router_sends(new_server: Callable[[], Recorder]) -> None:
    prefill, decode = new_server(), new_server()
    prefill.answers["/v1/completions"] = completion(kv_transfer_params=PARAMS)
    decode.answers["/v1/completions"] = completion(kv_transfer_params={"kvferry": {"path": "remote"}})
    legs = api.two_legs(prefill.url, decode.url, [1, 2, 3], max_tokens=9, stream=False)
    ((_, prefill_headers, first),) = prefill.requests
    ((_, decode_headers, second),) = decode.requests
    assert (first["max_tokens"], first["min_tokens"], first["prompt"]) == (1, 1, [1, 2, 3])
    assert "stream" not in first
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert first["kv_transfer_params"]["remote_block_ids"] is None
    assert (second["max_tokens"], second["kv_transfer_params"]) == (9, PARAMS)
    assert prefill_headers["X-Request-Id"] == decode_headers["X-Request-Id"]
    assert api.transfer_report(legs.decode) == {"path": "remote"}


def test_without_parameters_from_prefill_decode_gets_none(new_server: Callable[[], Recorder]) -> None:
    prefill, decode = new_server(), new_server()
    prefill.answers["/v1/completions"] = completion(kv_transfer_params=None)
    decode.answers["/v1/completions"] = completion()
    legs = api.two_legs(prefill.url, decode.url, "x")
    assert "kv_transfer_params" not in decode.requests[0][2]
    assert api.transfer_report(legs.decode) == {}


def test_an_error_status_is_an_http_error_with_its_body(new_server: Callable[[], Recorder]) -> None:
    server = new_server()
    server.answers["/v1/completions"] = lambda _: (500, "engine dead")
    with pytest.raises(api.HttpError, match="HTTP 500: engine dead") as raised:
        api.complete(server.url, "x")
    assert (raised.value.status, raised.value.body) == (500, "engine dead")


def test_no_server_is_an_http_error_of_status_0() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(api.HttpError, match="no answer") as raised:
        api.get(url)
    assert raised.value.status == 0
    assert not api.is_healthy(url)


def test_loopback_is_reached_without_the_proxy_of_the_environment(
    new_server: Callable[[], Recorder],
) -> None:
    server = new_server()
    server.answers["/health"] = lambda _: (200, "")
    environment = {**os.environ, "http_proxy": f"http://127.0.0.1:{free_ports(1)[0]}", "no_proxy": ""}
    code = f"from kvferry.cli import api; print(api.is_healthy({server.url!r}))"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "True\n"


PAGE = """\
# HELP vllm:x_total Some counter
# TYPE vllm:x_total counter
vllm:x_total{engine="0",reason="a"} 2.0
vllm:x_total{engine="0",reason="b, \\"c\\" {d}"} 3.0
vllm:cache_config_info{block_size="128",num_gpu_blocks="2048"} 1.0
process_start_time_seconds 1.7e+09
vllm:latency_bucket{le="+Inf"} 4
"""


def test_metrics_are_summed_over_the_labels_that_are_not_named() -> None:
    page = api.parse_metrics(PAGE)
    assert page.value("vllm:x_total") == 5.0
    assert page.value("vllm:x_total", reason="a") == 2.0
    assert page.value("vllm:x_total", engine="0", reason='b, "c" {d}') == 3.0
    assert page.value("process_start_time_seconds") == 1.7e9
    assert page.value("vllm:latency_bucket", le="+Inf") == 4
    assert page.label("vllm:cache_config_info", "num_gpu_blocks") == "2048"
    assert page.names("vllm:x") == ["vllm:x_total"]


def test_a_metric_that_is_not_there() -> None:
    page = api.parse_metrics(PAGE)
    with pytest.raises(KeyError, match="vllm:x_total"):
        page.value("vllm:x_total", reason="c")
    assert page.get("vllm:y_total") == 0.0
    with pytest.raises(KeyError):
        page.label("vllm:x_total", "colour")
