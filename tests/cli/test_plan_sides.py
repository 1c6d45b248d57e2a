"""What a person types about one engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cli.errors import Problem
from kvferry.cli.plan.sides import Side, parse


def test_everything_has_a_default() -> None:
    assert parse("--consumer", "", Path("m")) == Side(model=Path("m"), tp=1, pp=1, dp=1, layout="LBHNC", conv="SD")


def test_all_keys() -> None:
    text = "dir/config.json,tp=4,pp_layers=10+22,dp=2,dcp=2,interleave=8,block=64,layout=NHD,dtype=fp8,blocks=9"
    assert parse("--consumer", f"{text},conv=DS,ssm=fp32", Path("m")) == Side(
        model=Path("dir/config.json"),
        tp=4,
        pp=2,
        pp_layers=(10, 22),
        dp=2,
        dcp=2,
        interleave=8,
        block=64,
        layout="LBNHC",
        dtype="fp8_e4m3",
        blocks=9,
        conv="DS",
        ssm="float32",
    )


def test_upper_and_lower_case() -> None:
    typed = "TP=2,Layout=nhd,dtype=BF16,conv=ds"
    assert parse("--consumer", typed, None) == Side(tp=2, layout="LBNHC", dtype="bfloat16", conv="DS")
    assert parse("--consumer", "layout=CPU-amx,MODEL_ID=Mine", None) == Side(layout="cpu-amx", model_id="Mine")


def test_a_file_may_come_first(tmp_path: Path) -> None:
    assert parse("--consumer", str(tmp_path), None).model == tmp_path
    assert parse("--consumer", "missing.json", None).model == Path("missing.json")


def test_spaces_and_a_model_by_key() -> None:
    assert parse("--consumer", " tp=2 , model=x ", None) == Side(model=Path("x"), tp=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=4,foo=3", ("--producer: foo is not known", "tp, pp, pp_layers")),
        ("tp=0", ("tp '0'", "positive")),
        ("tp=99999999", ("tp '99999999'", "at most 4,096")),
        ("tp=two", ("tp 'two'", "positive")),
        ("tp=2,tp=3", ("tp is given twice, as 2 and 3",)),
        ("tp=2,nonsense", ("'nonsense' is not KEY=VALUE",)),
        ("tp:2", ("'tp:2' is neither KEY=VALUE nor a file", "tp, pp")),
        ("2", ("'2' is neither KEY=VALUE nor a file", "tp, pp")),
        ("model_id=a\x1b[31m", ("model_id", "letters that print")),
        ("tp=", ("'tp=' is not KEY=VALUE",)),
        ("layout=XYZ", ("layout 'XYZ'", "LBHNC", "cpu", "interleaved")),
        ("dtype=int4", ("dtype 'int4'", "bf16")),
        ("ssm=fp8", ("ssm 'fp8'",)),
        ("pp=3,pp_layers=1+2", ("pp is 3", "pp_layers 1+2 has 2 stages")),
        ("pp_layers=1+x", ("pp_layers '1+x'",)),
    ],
)
def test_what_is_wrong_is_named_with_its_value(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(Problem) as problem:
        parse("--producer", text, None)
    for word in words:
        assert word in str(problem.value)
