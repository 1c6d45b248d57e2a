"""The demo's prompts, verdict and output; its servers are one real HTTP server with canned answers."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorder import Recorder
from rich.console import Console

from kvferry.cli import demo, prompts
from kvferry.cli.errors import Problem
from kvferry.cli.report import Silent

ROW = demo.Row(
    kind="short",
    prompt="The capital",
    prompt_tokens=5,
    text=" Paris",
    alone=" Paris",
    equal=True,
    path="remote",
    transport="local",
    bytes=3 << 20,
    descriptors=30,
    transfer_ms=12.5,
    reason="",
    is_repeat=False,
)
LOCAL = replace(ROW, path="local", bytes=0, descriptors=0, transfer_ms=0.0, is_repeat=True)
DIFFERENT = replace(ROW, text=" Rome", equal=False)
RECOMPUTED = replace(LOCAL, path="recomputed", reason="the claim was refused")


def byte_tokens(text: str) -> list[int]:
    return list(text.encode())


def byte_text(ids: Any) -> str:
    return bytes(ids).decode()


def made_prompts(block_size: int = 128, chunk_tokens: int = 512) -> list[prompts.Prompt]:
    return prompts.demo_prompts(byte_tokens, byte_text, block_size, chunk_tokens)


def test_prompts_are_of_the_lengths_that_they_are_for() -> None:
    short, blocks, chunks, again = made_prompts()
    assert len(short.token_ids) < 128
    assert len(blocks.token_ids) == 2 * 128 + 1
    assert len(chunks.token_ids) > 2 * 512
    assert len(chunks.token_ids) % 128 not in (0, 1)
    assert again.token_ids == blocks.token_ids
    assert again.is_repeat


def test_only_the_repeated_prompt_shares_a_cache_salt() -> None:
    short, blocks, chunks, again = made_prompts()
    assert again.cache_salt == blocks.cache_salt
    assert len({short.cache_salt, blocks.cache_salt, chunks.cache_salt}) == 3
    assert made_prompts()[1].cache_salt != blocks.cache_salt


def test_no_two_prompts_begin_alike_but_the_repeated_one() -> None:
    chosen = made_prompts()
    assert len({prompt.token_ids[:32] for prompt in chosen[:3]}) == 3


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([ROW, LOCAL], 0),
        ([ROW, RECOMPUTED], 0),
        ([ROW, DIFFERENT], 1),
        ([RECOMPUTED, LOCAL], 1),
        ([], 1),
    ],
)
def test_the_status_is_0_only_if_all_are_equal_and_some_kv_was_ferried(rows: list[demo.Row], status: int) -> None:
    assert demo.exit_status(rows) == status


def shown(rows: list[demo.Row], width: int) -> str:
    output = io.StringIO()
    demo.show(rows, Console(file=output, width=width))
    return output.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_shows_every_figure_whole(width: int) -> None:
    large = replace(ROW, bytes=1023 << 20, descriptors=123456, transfer_ms=1234.5, prompt="[bold]" * 30)
    output = shown([ROW, LOCAL, large, RECOMPUTED], width)
    for figure in ("3.0 MiB", "30", "12.5 ms", "local hit", "1023 MiB", "123456", "1.2 s", "recomputed", "yes"):
        assert figure in output
    assert "[bold]" in output
    assert max(map(len, output.splitlines())) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_a_time_that_contains_the_prefill_is_called_so(width: int) -> None:
    large = replace(ROW, bytes=1023 << 20, descriptors=123456, transfer_ms=1234.5, is_written=True)
    output = shown([large], width)
    assert re.search(r"descrip-\s+time \+\s.*tors\s+prefill", output, re.DOTALL)
    assert "1023 MiB in 1.2 s, prefill included, by local" in " ".join(output.split())
    assert max(map(len, output.splitlines())) <= width
    assert "prefill included" not in shown([ROW], width)


def test_what_differs_and_what_was_not_ferried_is_told_with_the_reason() -> None:
    output = shown([DIFFERENT, RECOMPUTED], 120)
    assert "NO" in output
    assert "DIFFERS (short): alone it is ' Paris', through both it is ' Rome'" in output
    assert "not from the prefill server (short): recomputed, since the claim was refused" in output
    assert "1 of 2 texts equal" in output


def test_the_json_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    demo.write_json(file, demo.as_json([ROW, LOCAL], 1, 2, Path("/m")))
    content = json.loads(file.read_text())
    assert content["totals"] == {
        "requests": 2,
        "equal": 2,
        "remote": 1,
        "bytes": 3 << 20,
        "descriptors": 30,
        "transfer_ms": 12.5,
    }
    first = content["requests"][0]
    assert {key: first[key] for key in ("equal", "path", "bytes", "descriptors", "transfer_ms", "prompt", "text")} == {
        "equal": True,
        "path": "remote",
        "bytes": 3 << 20,
        "descriptors": 30,
        "transfer_ms": 12.5,
        "prompt": "The capital",
        "text": " Paris",
    }
    assert content["versions"]["kvferry"]
    assert (content["tp_prefill"], content["tp_decode"]) == (1, 2)


def test_a_json_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="can't be written: Is a directory"):
        demo.write_json(tmp_path, {})


def test_a_file_that_cannot_be_written_is_known_before_the_demo_runs(tmp_path: Path) -> None:
    demo.require_writable(tmp_path / "new.json")
    with pytest.raises(Problem, match=r"--json .*missing/a.json can't be written: No such file or directory"):
        demo.require_writable(tmp_path / "missing" / "a.json")


class Standing:
    """A cluster whose router and decode server are HTTP servers of the test."""

    def __init__(self, router: Recorder, decode: Recorder) -> None:
        self.router = router
        self.decode = Decode(decode)


class Decode:
    def __init__(self, recorder: Recorder) -> None:
        self.url = recorder.url

    def metrics(self) -> Any:
        from kvferry.cli.api import parse_metrics

        return parse_metrics('vllm:cache_config_info{block_size="128"} 1.0\n')


@pytest.fixture
def standing(new_server: Callable[[], Recorder]) -> tuple[Recorder, Recorder]:
    router, decode = new_server(), new_server()
    decode.answers["/tokenize"] = lambda body: (200, json.dumps({"tokens": byte_tokens(body["prompt"])}))
    decode.answers["/detokenize"] = lambda body: (200, json.dumps({"prompt": byte_text(body["tokens"])}))
    report = {"path": "remote", "transport": "nixl", "bytes": 7, "descriptors": 2, "transfer_ms": 0.5, "reason": ""}
    answer = {"choices": [{"text": "hi", "token_ids": [1]}]}
    router.answers["/v1/completions"] = lambda _: (
        200,
        json.dumps({**answer, "kv_transfer_params": {"kvferry": report}}),
    )
    decode.answers["/v1/completions"] = lambda _: (200, json.dumps(answer))
    return router, decode


def test_each_prompt_goes_both_ways_and_the_reference_shares_no_salt(standing: tuple[Recorder, Recorder]) -> None:
    router, decode = standing
    rows = demo.run(Standing(router, decode), 512, Silent())  # type: ignore[arg-type]
    assert [row.is_repeat for row in rows] == [False, False, False, True]
    assert {(row.equal, row.path, row.transport, row.bytes, row.descriptors) for row in rows} == {
        (True, "remote", "nixl", 7, 2)
    }
    ferried = [body for path, _, body in router.requests]
    alone = [body for path, _, body in decode.requests if path == "/v1/completions"]
    assert [body["prompt"] for body in ferried] == [body["prompt"] for body in alone]
    assert {body["cache_salt"] for body in ferried}.isdisjoint({body["cache_salt"] for body in alone})
    assert len({body["cache_salt"] for body in alone}) == 4


def test_other_tokens_are_a_difference_even_if_the_text_is_alike(standing: tuple[Recorder, Recorder]) -> None:
    router, decode = standing
    decode.answers["/v1/completions"] = lambda _: (200, '{"choices": [{"text": "hi", "token_ids": [2]}]}')
    rows = demo.run(Standing(router, decode), 512, Silent())  # type: ignore[arg-type]
    assert [row.equal for row in rows] == [False] * 4


def test_an_answer_without_a_report_is_no_transfer(standing: tuple[Recorder, Recorder]) -> None:
    router, decode = standing
    router.answers["/v1/completions"] = decode.answers["/v1/completions"]
    rows = demo.run(Standing(router, decode), 512, Silent())  # type: ignore[arg-type]
    assert {(row.path, row.reason) for row in rows} == {("unknown", "the response carries no report of kvferry")}
    assert demo.exit_status(rows) == 1


def test_a_request_that_fails_is_a_problem_that_says_which(standing: tuple[Recorder, Recorder]) -> None:
    router, decode = standing
    router.answers["/v1/completions"] = lambda _: (500, "no KV")
    with pytest.raises(Problem, match=r"the router did not answer the prompt 'short': .* HTTP 500: no KV"):
        demo.run(Standing(router, decode), 512, Silent())  # type: ignore[arg-type]
