"""`kvferry plan` as a person uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import plan_models
import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.cli.plan import models, sides
from kvferry.cli.plan.caches import engine
from kvferry.cli.plan.requests import adjacent, scattered
from kvferry.cli.plan.survey import descriptors, survey

CASES_FILE = Path(__file__).parent.parent / "cases" / "plan.json"
CASES = json.loads(CASES_FILE.read_text())


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def run_json(*arguments: str) -> tuple[int, Any]:
    status, output = run(*arguments, "--json")
    return status, json.loads(output)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return str(plan_models.write(tmp_path / "llama", plan_models.LLAMA))


def name(case: dict[str, Any]) -> str:
    return case["name"]


def runs_by_layer(pair: dict[str, Any]) -> dict[str, list[list[int]]]:
    return {one["layers"][0]: one["runs"] for one in pair["descriptors"]}


@pytest.mark.parametrize("case", [case for case in CASES if "refused" not in case], ids=name)
def test_golden_cases_from_the_shell(case: dict[str, Any]) -> None:
    status, found = run_json("--case", str(CASES_FILE), "--name", case["name"], "--descriptors")
    assert (status, found["possible"], found["refused"]) == (0, True, [])
    expected = case["descriptors_by_source"] if "descriptors_by_source" in case else [case["descriptors"]]
    assert [runs_by_layer(pair) for pair in found["pairs"]] == expected
    assert found["total"]["bytes"] == case["num_bytes"]
    assert found["required_bytes"] == case.get("required_bytes", case["num_bytes"])
    if "source_ranks" in case:
        assert [pair["producer_rank"] for pair in found["pairs"]] == case["source_ranks"]


@pytest.mark.parametrize("case", [case for case in CASES if "refused" in case], ids=name)
def test_golden_refusals_from_the_shell(case: dict[str, Any]) -> None:
    status, output = run("--case", str(CASES_FILE), "--name", case["name"])
    assert status == 1
    line = next(line for line in output.splitlines() if line.startswith("refused: "))
    for word in case["refused"]:
        assert word in line


def test_all_cases_of_a_file() -> None:
    status, found = run_json("--case", str(CASES_FILE))
    assert status == 1
    assert [one["consumer"]["title"] for one in found] == [case["name"] for case in CASES]


def test_other_blocks_and_tokens_for_a_case() -> None:
    case = ("--case", str(CASES_FILE), "--name", "L1 separated K/V")
    status, found = run_json(*case, "--block-ids", "[[3]]:[[8]]")
    assert (status, found["tokens"]) == (0, [0, 16])
    assert runs_by_layer(found["pairs"][0]) == {"A": [[1536, 4096, 512], [6656, 9216, 512]]}
    status, found = run_json(*case, "--tokens", "16:32", "--descriptors")
    assert runs_by_layer(found["pairs"][0]) == {"A": [[1024, 2560, 512], [6144, 7680, 512]]}


def test_which_heads_and_layers_go_where(llama: str) -> None:
    status, found = run_json("--model", llama, "--consumer", "tp=4", "--producer", "tp=2,pp=2")
    assert (status, found["possible"]) == (0, True)
    assert [(pair["consumer_rank"], pair["labels"][1]) for pair in found["pairs"]] == [
        (rank, f"pp{stage}.tp{rank // 2}") for rank in range(4) for stage in (0, 1)
    ]
    for pair in found["pairs"]:
        (part,) = pair["parts"]
        assert {tuple(layer["heads"]) for layer in part["layers"]} == {(rank := 2 * pair["consumer_rank"], rank + 2)}
        numbers = [int(layer["name"].split(".")[2]) for layer in part["layers"]]
        first = 16 * int(pair["labels"][1][2])
        assert numbers == list(range(first, first + 16))
        assert part["block"] == {"tokens": 16, "descriptors": 16, "bytes": 16 * 16384, "run_bytes": [16384, 16384]}
        assert part["request"]["descriptors"] == 16 * 64
    assert found["total"] == {"tokens": 1024, "descriptors": 8192, "bytes": 1 << 27, "run_bytes": [16384, 16384]}


def test_what_a_person_reads(llama: str) -> None:
    status, output = run("--model", llama, "--consumer", "tp=4", "--producer", "tp=2,dp=3", "--tokens", "5008")
    assert status == 0
    for text in (
        "consumer  llama: tp 4, block 16, LBHNC, bfloat16, 4 ranks",
        "producer  llama: tp 2, dp 3, block 16, LBHNC, bfloat16, 2 ranks",
        "0-1 ← 0; 2-3 ← 1",
        "full attention",
        "0-31",
        "16 KiB",
        "32, 512 KiB",  # a block: each of 32 layers
        "10,016, 156 MiB",
        "Each row is what one consumer rank takes of one producer rank:",
        "descriptors, bytes of",
        "a block of 16",
        "5,008 tokens",
        "In all 40,064 descriptors and 626 MiB over 4 pairs of ranks.",
        "each of its 3 DP ranks is an engine of its own",
        "Block ids are taken as scattered",
    ):
        assert text in output, text
    assert "warning" not in output


def test_surplus_is_told(llama: str) -> None:
    """Of the last block only eight tokens were asked for, but its heads are copied whole."""
    _, output = run("--model", llama, "--consumer", "", "--producer", "tp=1", "--tokens", "24")
    assert "In all 64 descriptors and 4 MiB, 3 MiB of them for the tokens that were asked for" in output


def test_equal_sides_pair_rank_by_rank_and_rows_are_shared(llama: str) -> None:
    _, output = run("--model", llama, "--consumer", "tp=8", "--producer", "tp=8")
    assert "i ← i, i = 0-7" in output
    assert "1 of 8 each" in output
    assert output.count("full attention") == 1


def test_blocks_that_follow_one_another_join(llama: str) -> None:
    _, found = run_json("--model", llama, "--consumer", "", "--producer", "")
    assert (found["total"]["descriptors"], found["adjacent_descriptors"]) == (32 * 64, 32)


def test_a_window_asks_only_for_what_it_looks_at(tmp_path: Path) -> None:
    model = str(plan_models.write(tmp_path / "gemma", plan_models.GEMMA3))
    status, found = run_json("--model", model, "--tokens", "4096")
    assert status == 0
    blocks = {
        part["cache"]: part["request"]["descriptors"] / len(part["layers"]) for part in found["pairs"][0]["parts"]
    }
    assert blocks == {"window of 1,024": 64, "full attention": 256}


def test_a_state_moves_once(tmp_path: Path) -> None:
    model = str(plan_models.write(tmp_path / "qwen", plan_models.QWEN3_NEXT))
    found = [run_json("--model", model, "--tokens", str(tokens))[1] for tokens in (1000, 9000)]
    states = [one["pairs"][0]["parts"][0] for one in found]
    assert states[0]["cache"] == "GDN state"
    assert [(state["block"], state["request"]["bytes"]) for state in states] == [
        (None, 36 * (3 * 8192 + 32 * 128 * 128) * 2)
    ] * 2
    assert "A state is not cut into blocks: it moves whole, once for a request." in found[0]["notes"]


def test_a_latent_is_read_from_every_rank(tmp_path: Path) -> None:
    model = str(plan_models.write(tmp_path / "deepseek", plan_models.DEEPSEEK))
    _, found = run_json("--model", model, "--consumer", "tp=8", "--producer", "tp=4")
    assert [(pair["consumer_rank"], pair["producer_rank"]) for pair in found["pairs"]] == [
        (rank, rank // 2) for rank in range(8)
    ]


def test_context_parallel_ranks_share_the_tokens(tmp_path: Path) -> None:
    model = str(plan_models.write(tmp_path / "deepseek", plan_models.DEEPSEEK))
    _, found = run_json("--model", model, "--consumer", "tp=2,dcp=2", "--producer", "tp=1", "--tokens", "64")
    assert [pair["request"]["bytes"] for pair in found["pairs"]] == [61 * 32 * 1152] * 2
    assert found["advice"][0]["settings"] == [{"side": "consumer", "set": "interleave=16"}]


@pytest.mark.parametrize(
    ("consumer", "producer", "words"),
    [
        (
            "dtype=fp8",
            "",
            (
                "KV cache dtype: consumer has fp8_e4m3, producer has bfloat16",
                "layer model.layers.0.self_attn.attn: dtype",
            ),
        ),
        (
            "layout=cpu,block=32",
            "layout=cpu-amx,block=32",
            ("layer model.layers.0.self_attn.attn: fields: consumer has ['k', 'v'], producer has ['tile'] [",),
        ),
        (
            "layout=cpu-amx,block=32",
            "layout=cpu-amx,block=64",
            ("packing: consumer has CPU_ATTN:amx:torch.bfloat16:32",),
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(llama: str, consumer: str, producer: str, words: tuple[str, ...]) -> None:
    status, output = run("--model", llama, "--consumer", consumer, "--producer", producer)
    assert status == 1
    for word in words:
        assert word in output
    status, found = run_json("--model", llama, "--consumer", consumer, "--producer", producer)
    assert (status, found["possible"], found["pairs"]) == (1, False, [])
    assert found["refused"][0]["consumer"] != found["refused"][0]["producer"]


def test_different_models_are_refused(llama: str, tmp_path: Path) -> None:
    other = plan_models.write(tmp_path / "other", {**plan_models.LLAMA, "num_hidden_layers": 30})
    status, output = run("--consumer", f"{llama},tp=1", "--producer", f"model={other}")
    assert status == 1
    assert "refused: model: consumer has llama of 32 layers, producer has llama of 30 layers" in output
    assert "layer model.layers.30.self_attn.attn: consumer has KV head 0, producer has no such layer" in output


def test_exploding_descriptors_come_with_what_would_help(llama: str) -> None:
    arguments = ("--model", llama, "--consumer", "tp=4", "--producer", "tp=2,layout=NHD")
    status, found = run_json(*arguments)
    assert status == 0
    (warning,) = found["warnings"]
    assert warning["block"]["descriptors"] == 32 * 2 * 16
    first, second = found["advice"]
    assert first["settings"] == [{"side": "producer", "set": "layout=LBHNC"}]
    assert (first["now"]["descriptors"], first["then"]["descriptors"]) == (65536, 2048)
    assert second["settings"] == [{"side": side, "set": "layout=BHLNC"} for side in ("consumer", "producer")]
    assert second["then"] == {"tokens": 1024, "descriptors": 64, "bytes": 1 << 25, "run_bytes": [1 << 19, 1 << 19]}
    _, output = run(*arguments)
    assert (
        "warning: descriptors explode (full attention): a block of 16 tokens takes 1,024 of 512 B on average" in output
    )
    assert (
        "With layout=LBHNC on the producer, consumer rank 0 takes 2,048 descriptors of 16 KiB for 1,024 tok" in output
    )


def test_advice_keeps_what_it_promises(llama: str) -> None:
    sides = {"consumer": "tp=4,layout=NHD", "producer": "tp=2,layout=NHD"}
    for setting in run_json("--model", llama, "--consumer", sides["consumer"], "--producer", sides["producer"])[1][
        "advice"
    ]:
        better = dict(sides)
        for one in setting["settings"]:
            better[one["side"]] = better[one["side"]].replace("layout=NHD", one["set"])
        _, found = run_json("--model", llama, "--consumer", better["consumer"], "--producer", better["producer"])
        taken = [pair["request"]["descriptors"] for pair in found["pairs"] if pair["consumer_rank"] == 0]
        assert sum(taken) == setting["then"]["descriptors"]


@pytest.mark.parametrize(
    ("consumer", "producer", "setting"),
    [
        ("layout=cpu", "layout=cpu,block=32", ("producer", "block=128")),
        ("block=16", "block=64,layout=BLNHC", None),
    ],
)
def test_advice_on_blocks(llama: str, consumer: str, producer: str, setting: tuple[str, str] | None) -> None:
    _, found = run_json("--model", llama, "--consumer", consumer, "--producer", producer, "--tokens", "256")
    settings = [[(one["side"], one["set"]) for one in advice["settings"]] for advice in found["advice"]]
    assert found["warnings"]
    assert ([setting] in settings) if setting else settings


def test_orders_of_a_states_window(tmp_path: Path) -> None:
    config = {**plan_models.QWEN3_NEXT, "num_hidden_layers": 4}
    model = str(plan_models.write(tmp_path / "qwen", config))
    _, found = run_json("--model", model, "--consumer", "tp=2,conv=DS", "--producer", "tp=1")
    assert [warning["cache"] for warning in found["warnings"]] == ["GDN state"]
    assert [advice["settings"] for advice in found["advice"]] == [[{"side": "producer", "set": "conv=DS"}]]


def test_no_other_setting_helps(llama: str) -> None:
    arguments = ("--consumer", "layout=cpu,block=32", "--producer", "block=32", "--tokens", "32")
    status, output = run("--model", llama, *arguments)
    assert status == 0
    assert "Nothing else that was planned" in output


def test_exact_descriptors_of_given_blocks(llama: str) -> None:
    arguments = (
        "--model",
        llama,
        "--consumer",
        "",
        "--producer",
        "block=32",
        "--block-ids",
        "[[7,1]]:[[4]]",
        "--tokens",
        "8:32",
    )
    _, output = run(*arguments)
    page = 16 * 512 * 8  # tokens, K and V of 128 in two bytes, heads
    head = 16 * 512
    lines = [tuple(line.split()) for line in output.splitlines() if line.endswith("attn.attn")]
    assert "consumer 0 ← producer 0, region 0: 512 descriptors" in output
    assert len(lines) == 512
    for runs in (
        (7 * page + 8 * 512, 4 * 2 * page + 8 * 512, 8 * 512),  # from token 8 on, head 0 of layer 0
        (1 * page + 3 * head, 4 * 2 * page + 3 * 2 * head + 16 * 512, 16 * 512),  # its second half, head 3
    ):
        assert (*map(str, runs), "model.layers.0.self_attn.attn") in lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "which model? Give --model"),
        (("--model", "{missing}"), "can't be read"),
        (("--model", "{llama}", "--consumer", "tp=3"), "--consumer: tp 3 does not divide the model's 32 query heads"),
        (("--model", "{llama}", "--consumer", "sp=3"), "--consumer: sp is not known"),
        (("--model", "{llama}", "--tokens", "many"), "--tokens many: must be a number of tokens"),
        (("--model", "{llama}", "--tokens", "99999999999"), "--tokens 99999999999: more than 16,777,216"),
        (("--model", "{llama}", "--tokens", "9:9"), "--tokens 9:9: from token 9 to token 9 there is none"),
        (("--model", "{llama}", "--block-ids", "[[1]]"), "must be CONSUMER:PRODUCER"),
        (("--model", "{llama}", "--block-ids", "[1]:[[1]]"), "the consumer's must be one list of numbers"),
        (("--model", "{llama}", "--block-ids", '[[1]]:[["1"]]'), "the producer's must be one list of numbers"),
        (("--model", "{llama}", "--name", "L1"), "--name chooses a case"),
        (("--model", "{llama}", "--svg", "{missing}/x.svg"), "can't be written"),
        (("--case", "{cases}", "--model", "{llama}"), "--case and --model exclude each other"),
        (("--case", "{cases}", "--name", "L99"), "has no case 'L99'"),
        (("--case", "{missing}"), "can't be read"),
        (("--case", "{cases}", "--svg", "x.svg"), "--svg draws one case"),
        (("--model", "{llama}", "--tokens", "9" * 5000), "99: more than 16,777,216"),
        (("--model", "{llama}", "--tokens", "1:" + "9" * 5000), "99: more than 16,777,216"),
        (("--model", "{llama}", "--tokens", "x" * 5000), "xx: must be a number of tokens, or FIRST:END"),
        (("--model", "a" * 5000), "aa can't be read: File name too long"),
        (("--case", "a" * 5000), "aa can't be read: File name too long"),
        (("--model", "{llama}", "--svg", "a" * 5000), "aa can't be written: File name too long"),
        (("--model", "{llama}", "--producer", "tp=" + "9" * 5000), "must be a positive number, at most 4,096"),
        (("--model", "{llama}", "--producer", "pp_layers=" + "1+" * 5000 + "1"), "has 5,001 stages, at most 4,096"),
        (("--model", "{llama}", "--producer", "x" * 5000 + "=1"), "xx is not known"),
        (("--model", "{llama}", "--block-ids", "[" * 100_000 + ":[[1]]"), "the consumer's must be one list of numbers"),
        (("--model", "{llama}", "--block-ids", "[[1]]:[[9223372036854775808]]"), "Expected `int` <= 1099511627775"),
        (("--model", "{llama}", "--block-ids", "[[1]]:[[1]]:[[1]]"), "must be CONSUMER:PRODUCER"),
        (("--model", "{llama}", "--block-ids", "[[1099511627775]]:[[1]]"), "1,099,511,627,776 blocks of 16 tokens"),
        (("--model", "{many}", "--consumer", "tp=4096"), "tp 4096: 32 layers on so many ranks are 131,072 caches"),
        (
            ("--model", "{many}", "--consumer", "tp=512", "--producer", "tp=512"),
            "512 ranks of the consumer and 512 of the producer: 8,388,608 pairs of heads to compare, at most 2,097,152",
        ),
        (("--model", "{llama}", "--producer", "pp=4096"), "--producer: pp 4096: the model has 32 layers"),
        (
            ("--model", "{llama}", "--consumer", "block=1048576,layout=LHBNC", "--producer", "layout=NHD,block=1"),
            "--consumer: layout LHBNC in blocks of 1,048,576 tokens: ",
        ),
        (
            ("--model", "{llama}", "--producer", "layout=NHD", "--tokens", "8192", "--descriptors"),
            "2,097,152 descriptors to list, at most 262,144",
        ),
        (("--model", "\x1b[31m\n"), "\\x1b[31m\\n can't be read"),
        (("--model", "{llama}", "--consumer", "\x1b[31m\n=1"), "--consumer: \\x1b[31m\\n is not known"),
        (("--case", "{cases}", "--name", "\x1b[31m"), "has no case '\\x1b[31m'"),
    ],
)
def test_wrong_options(llama: str, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    many = {**plan_models.LLAMA, "num_attention_heads": 4096, "head_dim": 128}
    names = {
        "llama": llama,
        "many": str(plan_models.write(tmp_path / "many", many)),
        "missing": str(tmp_path / "missing"),
        "cases": str(CASES_FILE),
    }
    status, output = run(*(_named(argument, names) for argument in arguments))
    assert status == 2
    assert words in output
    assert "Traceback" not in output
    message = output.splitlines()[0]
    assert len(message) <= 500
    assert message.isprintable()


def _named(argument: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        argument = argument.replace("{" + name + "}", value)
    return argument


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("{", "is not JSON"),
        ({}, "the case: has no 'consumer'"),
        ([], "case.json has no cases"),
        ([1], "the case: Expected `object`, got `int`"),
        ({"consumer": {"layers": {}}, "producers": []}, "producers: none"),
        ({"consumer": {"layers": {}}, "producers": [{"layers": {}}]}, "layers: none"),
        ({"consumer": {"layers": {}}, "producers": [], "tokens": [1]}, "tokens [1]: Expected `array` of length 2"),
        (
            {"consumer": {"layers": {}}, "producers": [], "consumer_rank": "0"},
            "consumer_rank '0': Expected `array`, got `str`",
        ),
        (
            {"consumer": {"layers": {}}, "producers": [], "consumer_tables": [["a"]]},
            "consumer_tables[0][0] 'a': Expected `int`, got `str`",
        ),
        (
            {"consumer": {"layers": {"A": {"block_size": 0, "num_blocks": 4}}}, "producers": []},
            "layer A: block_size 0: Expected `int` >= 1",
        ),
        (
            {"name": "x", "consumer": {"layers": {"A": {}}}, "producers": []},
            "case x: consumer: layer A: has no 'block_size'",
        ),
        (
            {
                "consumer": {"layers": {"A": {"block_size": 16, "num_blocks": 4, "build": "system", "with": {}}}},
                "producers": [],
            },
            "build 'system' is none of separated",
        ),
        (
            {
                "consumer": {
                    "layers": {"A": {"block_size": 16, "num_blocks": 4, "build": "key_only", "with": {"size": 1}}}
                },
                "producers": [],
            },
            "with: ",
        ),
    ],
)
def test_a_case_that_is_wrong(tmp_path: Path, case: object, words: str) -> None:
    file = tmp_path / "case.json"
    file.write_text(case if isinstance(case, str) else json.dumps(case))
    status, output = run("--case", str(file))
    assert status == 2
    assert words in output


SIDE: dict[str, Any] = {
    "layers": {
        "A": {
            "block_size": 16,
            "num_blocks": 4,
            "build": "key_only",
            "with": {"block_size": 16, "content_bytes": 8},
        }
    }
}
STATE: dict[str, Any] = {
    "block_size": 1 << 40,
    "num_blocks": 4,
    "build": "state",
    "with": {
        "name": "ssm",
        "part": {"num_shards": 1, "num_channels": 8},
        "itemsize": 2,
        "base_bytes": 0,
        "slot_stride_bytes": 16,
    },
}


def with_layer(**changes: Any) -> dict[str, Any]:
    return {"layers": {"A": {**SIDE["layers"]["A"], **changes}}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"consumer": {"layers": []}}, "the case: consumer: layers []: Expected `object`, got `array`"),
        ({"consumer": {"layers": 1.5}}, "consumer: layers 1.5: Expected `object`, got `float`"),
        ({"consumer": 7}, "consumer: Expected `object`, got `int`"),
        ({"consumer": {"layers": {"A": 7}}}, "consumer: layer A: Expected `object`, got `int`"),
        ({"consumer": {"layers": {}}}, "layers: none"),
        ({"consumer": {"layers": {"A\x1b[31m": {}}}}, "layer A\\x1b[31m: the name is too long, or has characters"),
        ({"producers": [SIDE, with_layer(heads="2")]}, "producers[1]: layer A: heads '2': Expected `array`"),
        ({"consumer": with_layer(heads=[0, 1.5, 2])}, "layer A: heads[1] 1.5: Expected `int`, got `float`"),
        ({"consumer": with_layer(heads=[0, 1 << 40, 1 << 40])}, "heads[1] 1099511627776: Expected `int` <= 4096"),
        ({"consumer": with_layer(heads=[0])}, "heads [0]: Expected `array` of length 3, got 1"),
        ({"consumer": with_layer(context=[0, 0, 1])}, "context[1] 0: Expected `int` >= 1"),
        ({"consumer": with_layer(context=["0", 1, 1])}, "context[0] '0': Expected `int`, got `str`"),
        ({"consumer": with_layer(group=1 << 40)}, "group 1099511627776: Expected `int` <= 4095"),
        ({"consumer": with_layer(group="0")}, "group '0': Expected `int`, got `str`"),
        ({"consumer": with_layer(base=-1)}, "base -1: Expected `int` >= 0"),
        ({"consumer": with_layer(dtype="\x1b[31m")}, "dtype '\\x1b[31m' has characters that do not print"),
        ({"consumer": with_layer(dtype="a\ud800b")}, "dtype 'a\\ud800b' has characters that do not print"),
        ({"consumer": with_layer(heads="a\ud800b")}, "layer A: 'a\\ud800b' is not Unicode"),
        ({"consumer": with_layer(scales=[])}, "scales []: Expected `str`, got `array`"),
        ({"consumer": with_layer(kernel_block_size=0)}, "kernel_block_size 0: Expected `int` >= 1"),
        ({"consumer": with_layer(kernel_block_size=7)}, "layer A: kernel_block_size 7 does not divide block_size 16"),
        (
            {"consumer": with_layer(nonsense=7)},
            "layer A: has an unknown key 'nonsense': known are block_size, num_blocks, build, with,",
        ),
        (
            {"producer_table": [[1]]},
            "the case: has an unknown key 'producer_table': known are consumer, producers, name,",
        ),
        (
            {"consumer": {"layers": {"A": {**STATE, "with": {**STATE["with"], "part": {"shards": 2}}}}}},
            "layer A: with: part has an unknown key 'shards': known are num_shards, num_channels, num_steps, first_cha",
        ),
        ({"consumer": with_layer(build=["fused"])}, "build ['fused']: Expected `str`"),
        ({"consumer": with_layer(**{"with": []})}, "layer A: with: Expected `object`, got `array`"),
        (
            {"consumer": {"layers": {"A": {**STATE, "with": {**STATE["with"], "name": ["ssm"]}}}}},
            "layer A: with: name ['ssm']: Expected `str`, got `array`",
        ),
        (
            {"consumer": {"layers": {"A": {**STATE, "with": {**STATE["with"], "part": {"num_shards": "2"}}}}}},
            "with: part.num_shards '2': Expected `int`, got `str`",
        ),
        ({"consumer_rank": [0, 1 << 40]}, "consumer_rank[1] 1099511627776: Expected `int` <= 4096"),
        ({"tokens": [0, 1 << 33]}, "tokens[1] 8589934592: Expected `int` <= 16777216"),
        ({"consumer_tables": [[1, 1 << 40]]}, "consumer_tables[0][1] 1099511627776: Expected `int` <= 1099511627775"),
    ],
)
def test_a_case_is_checked_key_by_key(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"consumer": SIDE, "producers": [SIDE], **changes}))
    status, output = run("--case", str(file))
    assert (status, len(output.splitlines())) == (2, 1)
    assert words in output
    assert output.rstrip("\n").isprintable()


@pytest.mark.parametrize("option", ["--model", "--case"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, "is not JSON that can be read: it is nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON that can be read: a number of 5,000 digits"),
        (b"\xff", "is not JSON that can be read: 'utf-8' codec can't decode"),
        (b" " * (8 << 20) + b"{}", "is larger than 8 MiB"),
    ],
)
def test_files_that_are_no_use(tmp_path: Path, option: str, content: bytes, words: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    status, output = run(option, str(file))
    assert (status, len(output.splitlines())) == (2, 1)
    assert words in output


def test_tokens_of_a_case_are_bounded(tmp_path: Path) -> None:
    """A state's block has more tokens than any request; the other layers of the request have them one by one."""
    side = {"layers": {"A": STATE, "B": {**with_layer(block_size=1, num_blocks=1 << 40)["layers"]["A"], "group": 1}}}
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"consumer": side, "producers": [side]}))
    status, output = run("--case", str(file))
    assert status == 2
    assert "16777216 tokens need 16,777,217 of the consumer's blocks, at most 16,777,216 are understood" in output


def test_tokens_of_given_blocks_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"consumer": {"layers": {"A": STATE}}, "producers": [{"layers": {"A": STATE}}]}))
    status, found = run_json("--case", str(file), "--block-ids", "[[1]]:[[2]]")
    assert (status, found["tokens"]) == (0, [0, 1 << 24])
    assert runs_by_layer(found["pairs"][0]) == {"A": [[16, 32, 16]]}


def test_names_of_a_model_are_printable_everywhere(tmp_path: Path) -> None:
    config = {**plan_models.LLAMA, "_name_or_path": "a\ud800b\x1b[31m\n<c"}
    model, picture = str(plan_models.write(tmp_path / "model", config)), tmp_path / "plan.svg"
    title = "a\\ud800b\\x1b[31m\\n<c"
    status, found = run_json("--model", model, "--svg", str(picture))
    assert (status, found["consumer"]["title"]) == (0, title)
    texts = [one.text for one in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert f"Which KV cache moves where: {title}" in texts
    assert f"consumer  {title}: tp 1" in run("--model", model)[1]


def test_what_the_planner_refuses_of_a_request_is_a_row(llama: str) -> None:
    status, output = run("--model", llama, "--block-ids", "[[1]]:[[1]]", "--tokens", "32")
    assert status == 1
    assert "refused: group 0: length of the block table: consumer has 1 blocks, 2 needed" in output


def test_a_second_request_that_is_refused_has_no_number() -> None:
    one = engine("consumer", models.parse(plan_models.LLAMA, "x"), sides.parse("--consumer", "", None), 64)
    found = survey(one, one, scattered(one, one, 0, 64))
    assert found.total.descriptors == 32 * 4
    assert descriptors(found, adjacent(one, one, 0, 64)) == 32
    assert descriptors(found, adjacent(one, one, 0, 64)._replace(consumer_tables=[])) is None


def test_a_single_case_without_blocks(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"consumer": SIDE, "producers": [SIDE]}))
    status, found = run_json("--case", str(file))
    assert (status, found["tokens"], found["total"]["bytes"]) == (0, [0, 16], 128)
    status, output = run("--case", str(file), "--tokens", "80")
    assert status == 2
    assert "80 tokens need 5 blocks, the consumer's cache has 4" in output


def test_a_refusal_comes_first(llama: str, tmp_path: Path) -> None:
    other = plan_models.write(tmp_path / "other", {**plan_models.LLAMA, "num_hidden_layers": 31})
    status, output = run("--consumer", str(other), "--producer", llama)
    assert status == 1
    refusal, heading = (output.index(text) for text in ("refused: model", "What is not refused would move like this."))
    assert refusal < heading < output.index("full attention")


class TestModels:
    """What the two config.json say, as far as the handshake's digest of them is sure to differ."""

    @pytest.fixture
    def other(self, tmp_path: Path) -> Any:
        def written(**changes: Any) -> str:
            return str(plan_models.write(tmp_path / "other", {**plan_models.LLAMA, "vocab_size": 32000, **changes}))

        return written

    @pytest.fixture
    def llama(self, tmp_path: Path) -> str:
        config = {**plan_models.LLAMA, "vocab_size": 128256, "rope_scaling": {"factor": 8.0, "dtype": "x"}}
        return str(plan_models.write(tmp_path / "llama", config))

    def test_another_value_is_refused(self, llama: str, other: Any) -> None:
        status, found = run_json("--consumer", llama, "--producer", other(rope_scaling={"factor": 4.0}))
        assert status == 1
        (refused,) = found["refused"]
        assert refused["field"] == "model"
        assert refused["consumer"] == "llama of 32 layers with vocab_size 128256, rope_scaling.factor 8.0"
        assert refused["producer"] == "llama of 32 layers with vocab_size 32000, rope_scaling.factor 4.0"
        assert found["pairs"]

    def test_of_many_some_are_named(self, llama: str, tmp_path: Path) -> None:
        configs = ({**plan_models.LLAMA, **{f"key{i}": i + side for i in range(9)}} for side in (0, 1))
        paths = [str(plan_models.write(tmp_path / str(side), config)) for side, config in enumerate(configs)]
        _, output = run("--consumer", paths[0], "--producer", paths[1])
        assert "consumer has llama of 32 layers with key0 0, key1 1, key2 2, key3 3, 5 more keys, producer" in output

    def test_how_it_was_loaded_does_not_matter(self, llama: str, other: Any) -> None:
        config = {"vocab_size": 128256, "_name_or_path": "elsewhere", "transformers_version": "1", "_x": 1}
        assert run("--consumer", llama, "--producer", other(**config))[0] == 0

    def test_a_common_model_id_stands_for_all_of_it(self, llama: str, other: Any) -> None:
        sides = f"{llama},model_id=mine", f"{other()},model_id=mine"
        status, found = run_json("--consumer", sides[0], "--producer", sides[1])
        assert (status, found["refused"]) == (0, [])
        assert "Of the models only their model_id is compared, as at the handshake." in found["notes"]
        status, output = run("--consumer", sides[0], "--producer", other())
        assert status == 1
        assert "refused: model: consumer has mine, producer has llama of 32 layers" in output
        assert "give both the same model_id" in output

    def test_what_is_not_compared_is_said(self, llama: str, other: Any) -> None:
        _, output = run("--model", llama)
        assert "The models' weights are not compared" in output
        _, output = run("--consumer", llama, "--producer", other(vocab_size=128256, quantization_config={}))
        assert "Only the consumer's config.json has rope_scaling: the handshake refuses that unless" in output
        assert "Only the producer's config.json has quantization_config: " in output


def test_too_many_descriptors_are_refused_with_advice(llama: str) -> None:
    arguments = ("--model", llama, "--producer", "tp=2,layout=NHD", "--consumer", "tp=4", "--tokens", "131072")
    status, output = run(*arguments)
    assert status == 1
    assert "8388608 descriptors, the most allowed are 4194304" in output
    assert "see kvferry plan" not in output
    assert (
        "With layout=LBHNC on the producer, consumer rank 0 takes 262,144 descriptors of 16 KiB for 131,072 tokens.\n"
    ) in output
    _, found = run_json(*arguments)
    assert "see kvferry plan" not in found["refused"][0]["text"]
    assert [one["now"] for one in found["advice"]] == [None, None]


def test_advice_says_over_how_many_producers(llama: str) -> None:
    _, output = run("--model", llama, "--producer", "tp=4,layout=NHD", "--consumer", "tp=2")
    assert "for 1,024 tokens from its 2 producer ranks together, instead of 131,072 of 512 B." in output


@pytest.mark.parametrize(
    ("consumer", "producer", "block", "descriptors"),
    [
        ("block=16", "block=16", "a block of 16", 32 * 64),
        ("block=32", "block=16", "a block of 32", 32 * 64),
        ("block=16", "block=32", "a block of 16", 32 * 64),
        ("block=16", "block=17", "the first block of 16", 32 * 121),
        ("block=17", "block=16", "the first block of 17", 32 * 121),
    ],
)
def test_blocks_are_scattered_on_both_sides(
    llama: str, consumer: str, producer: str, block: str, descriptors: int
) -> None:
    """No two of them are copied as one, whichever side has the larger ones."""
    config = {"num_key_value_heads": 1}
    model = str(plan_models.write(Path(llama).parent / "one-head", {**plan_models.LLAMA, **config}))
    arguments = ("--model", model, "--consumer", consumer, "--producer", producer)
    assert run_json(*arguments)[1]["total"]["descriptors"] == descriptors
    assert block in run(*arguments)[1]


def test_a_block_over_context_ranks(tmp_path: Path) -> None:
    model = str(plan_models.write(tmp_path / "deepseek", plan_models.DEEPSEEK))
    output = run("--model", model, "--consumer", "tp=8,dcp=8", "--producer", "tp=8,dcp=4,interleave=16")[1]
    assert "a block of 128 (8 ranks)" in output
    assert "0-3 ← 0-3; 4-7 ← 4-7" in output
    assert "With interleave=16 on the consumer, consumer rank 0 takes" in output  # the producer has it already


def test_rows_are_not_broken_where_output_is_piped(llama: str) -> None:
    output = run("--model", llama, "--producer", "tp=2,layout=NHD", "--consumer", "tp=4")[1]
    (row,) = (line for line in output.splitlines() if "full attention  0-31" in line)
    assert "0-1 | 2-3 | 4-5 | 6-7 of 8" in row


class TestBlockIds:
    """Of a model with several KV cache groups."""

    @pytest.fixture
    def gemma(self, tmp_path: Path) -> str:
        return str(plan_models.write(tmp_path / "gemma", plan_models.GEMMA3))

    def test_a_list_for_each_group(self, gemma: str) -> None:
        status, output = run("--model", gemma, "--block-ids", "[[1]]:[[1]]")
        assert status == 2
        groups = "7 KV cache groups: 6 window of 1,024, 1 full attention"
        assert f"--block-ids: the consumer has {groups}; 1 list is given" in output
        lists = ",".join(f"[{number}]" for number in range(1, 8))
        status, output = run("--model", gemma, "--block-ids", f"[{lists}]:[[1],[2]]")
        assert f"--block-ids: the producer has {groups}; 2 lists are given" in output
        assert run("--model", gemma, "--block-ids", f"[{lists}]:[{lists}]")[0] == 0

    def test_the_layer_stands_beside_its_descriptors(self, gemma: str) -> None:
        lists = ",".join(f"[{number}]" for number in range(1, 8))
        _, output = run("--model", gemma, "--block-ids", f"[{lists}]:[{lists}]")
        listed = [line.split() for line in output.splitlines() if line.endswith(".attn")]
        assert len(listed) == 62
        assert listed[0] == [str(1 << 17), str(1 << 17), str(1 << 17), "language_model.model.layers.0.self_attn.attn"]

    def test_layers_that_move_as_one(self, llama: str) -> None:
        arguments = ("--model", llama, "--consumer", "layout=BLHNC", "--producer", "layout=BLHNC")
        _, output = run(*arguments, "--block-ids", "[[1]]:[[2]]")
        size = 32 * 16 * 8 * 512
        assert output.splitlines()[-1].split() == [str(size), str(2 * size), str(size), "layers", "0-31"]


class TestAnswers:
    """What a case says will come of it."""

    @pytest.fixture
    def say(self, tmp_path: Path) -> Any:
        def said(*arguments: str, **changes: Any) -> tuple[int, str]:
            file = tmp_path / "case.json"
            file.write_text(json.dumps({**CASES[0], **changes}))
            return run("--case", str(file), *arguments)

        return said

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"num_bytes": 3000}, "differs: num_bytes: the case says 3000, planned is 3072"),
            ({"required_bytes": 1}, "differs: required_bytes: the case says 1, planned is 3072"),
            ({"source_ranks": [1]}, "differs: source_ranks: the case says [1], planned is [0]"),
            (
                {"descriptors_by_source": []},
                "differs: pairs of ranks: the case says 0, planned is 1",
            ),
            (
                {"descriptors": {"A": [[512, 2048, 1024], [3584, 4608, 500]]}},
                "layer A: number 1: of 2 the case says [3584, 4608, 500], of 4 planned is [3584, 4608, 512]",
            ),
            (
                {"descriptors": {"A": CASES[0]["descriptors"]["A"][:3]}},
                "layer A: number 3: of 3 the case says none, of 4 planned is [8704, 9728, 512]",
            ),
            (
                {"descriptors": {"B": []}},
                "layer A: number 0: of 0 the case says none, of 4 planned is [512, 2048, 1024]",
            ),
            ({"refused": ["block id"]}, "differs: the case says a refusal with ['block id'], there is a plan"),
            ({"consumer_tables": [[1, 1, 7]]}, "differs: the case says a plan, there is a refusal"),
        ],
    )
    def test_another_answer_fails(self, say: Any, changes: dict[str, Any], text: str) -> None:
        status, output = say(**changes)
        assert (status, text in output) == (1, True), output

    def test_all_of_the_golden_ones_come_true(self) -> None:
        _, found = run_json("--case", str(CASES_FILE))
        assert [one["differs"] for one in found] == [[]] * len(CASES)

    def test_other_tokens_are_not_compared(self, say: Any) -> None:
        status, output = say("--tokens", "0:16", num_bytes=3000)
        assert (status, "differs" in output) == (0, False)
        assert "The answers in the file are not compared" in output


def test_cases_are_listed_one_a_line() -> None:
    status, output = run("--case", str(CASES_FILE), "--name", "nosuch")
    assert status == 2
    assert [line.strip() for line in output.splitlines()[1:]] == ["It has:", *(case["name"] for case in CASES)]


def test_an_empty_line_between_cases() -> None:
    _, output = run("--case", str(CASES_FILE), "--name", "L11")
    paragraphs = output.split("\n\n")
    assert [one.split(":")[0] for one in paragraphs] == [
        f"consumer  L11 crossing replication, consumer rank {i}" for i in range(8)
    ]


def test_help_names_every_key() -> None:
    output = " ".join(run("--help")[1].replace("│", " ").split())
    for key in sides.Side._fields:
        assert re.search(rf"[ :]{key}[ ,.]", output), key
