"""The picture of a plan: what is in it, and that nothing lies over anything else."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import plan_models
import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.cli.plan import models, sides, strips
from kvferry.cli.plan.caches import engine
from kvferry.cli.plan.canvas import AMBER, Canvas
from kvferry.layout import Layer

CASES_FILE = Path(__file__).parent.parent / "cases" / "plan.json"
SVG = "{http://www.w3.org/2000/svg}"
LETTER = 0.6  # width of a letter in units of its size, as in DejaVu Sans and Verdana
TIP = "l-10,-5 l0,10 z"


class Word(NamedTuple):
    """A text and the box that it takes."""

    text: str
    left: float
    right: float
    top: float
    bottom: float

    def overlaps(self, other: Word) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class Picture:
    """A drawn plan, taken apart."""

    def __init__(self, file: Path) -> None:
        self.source = file.read_text()
        self.root = ElementTree.fromstring(self.source)
        self.words = [self._word(one) for one in self.root.iter(f"{SVG}text")]

    @staticmethod
    def _word(one: ElementTree.Element) -> Word:
        text, size, x, y = (
            one.text or "",
            float(one.get("font-size", "0")),
            float(one.get("x", "0")),
            float(one.get("y", "0")),
        )
        width = len(text) * size * LETTER
        left = {"start": x, "middle": x - width / 2, "end": x - width}[one.get("text-anchor", "start")]
        return Word(text, left, left + width, y - 0.8 * size, y + 0.2 * size)

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]

    @property
    def num_arrows(self) -> int:
        return self.source.count(TIP)

    def check(self) -> None:
        """Nothing lies over other words or outside the picture, and nothing is fetched from elsewhere."""
        _, _, width, height = map(float, self.root.get("viewBox", "").split())
        for word in self.words:
            assert word.left >= 0, word
            assert word.right <= width, word
            assert word.top >= 0, word
            assert word.bottom <= height, word
        for one, other in combinations(self.words, 2):
            assert not one.overlaps(other), (one, other)
        assert "href" not in self.source
        assert "<script" not in self.source
        assert re.findall(r"https?://[^\"]+", self.source) == ["http://www.w3.org/2000/svg"]


@pytest.fixture
def draw(tmp_path: Path) -> Any:
    def drawn(config: dict[str, Any], *arguments: str, status: int = 0) -> Picture:
        model = plan_models.write(tmp_path / "model", config)
        file = tmp_path / "plan.svg"
        result = CliRunner().invoke(app, ["plan", "--model", str(model), "--svg", str(file), *arguments])
        assert result.exit_code == status, result.output
        picture = Picture(file)
        picture.check()
        return picture

    return drawn


def test_ranks_heads_and_arrows(draw: Any) -> None:
    picture = draw(plan_models.LLAMA, "--producer", "tp=2,pp=2,layout=NHD", "--consumer", "tp=4")
    for text in ("Which KV cache moves where: model", "can be moved", "rank pp0.tp0", "rank pp1.tp1", "rank 3"):
        assert text in picture.texts
    assert picture.num_arrows == 8
    for text in ("heads 4-7", "layers 16-31", "heads 6-7", "32 MiB, 65,536 descriptors"):
        assert text in picture.texts
    for head in range(8):  # once in each of two stages, and in the rank that takes it
        assert picture.texts.count(str(head)) == 3


def test_a_block_byte_by_byte(draw: Any) -> None:
    picture = draw(plan_models.LLAMA, "--producer", "tp=2,layout=NHD", "--consumer", "tp=4")
    assert "How a block of layer 0 (full attention) lies in memory, and what is copied" in picture.texts
    assert "1 block of 16 tokens, 32 KiB; from the outside in: tokens > heads > keys, values" in picture.texts
    assert "1 block of 16 tokens, 16 KiB; from the outside in: heads > tokens > keys, values" in picture.texts
    assert any("32 descriptors of 512 B" in text for text in picture.texts)
    assert len(list(picture.root.iter(f"{SVG}polygon"))) == 32 + 2  # a band for each descriptor, and two lenses
    lens = [text for text in picture.texts if text.startswith("token ")]
    assert lens == ["token 0"] * 8 + [f"token {token}" for token in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_warnings_are_in_the_picture(draw: Any) -> None:
    picture = draw(plan_models.LLAMA, "--producer", "layout=NHD", "--consumer", "tp=2")
    joined = " ".join(picture.texts)
    assert "warning: descriptors explode (full attention)" in joined
    assert "With layout=LBHNC on the producer" in joined


def test_the_badge_warns(draw: Any) -> None:
    explodes = draw(plan_models.LLAMA, "--producer", "layout=NHD", "--consumer", "tp=2")
    assert [
        one.source.count(f'fill="{AMBER}" stroke="none" rx="6"') for one in (explodes, draw(plan_models.LLAMA))
    ] == [
        1,
        0,
    ]


def test_colours_are_known_to_every_viewer(draw: Any) -> None:
    picture = draw(plan_models.LLAMA, "--producer", "layout=NHD", "--consumer", "tp=2")
    colours = {one.get(what) for one in picture.root.iter() for what in ("fill", "stroke")} - {None, "none"}
    assert len(colours) > 20
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour in colours)


@pytest.mark.parametrize(("consumer", "producer"), [(784, 1568), (1568, 784)])
def test_blocks_of_the_picture_lie_apart_as_those_of_the_table(draw: Any, consumer: int, producer: int) -> None:
    config = {**plan_models.LLAMA, "num_key_value_heads": 1}
    picture = draw(config, "--producer", f"block={producer}", "--consumer", f"block={consumer}", "--tokens", "1568")
    assert any("Between the two bars: 2 descriptors of 392 KiB, each" in text for text in picture.texts)
    assert "392 KiB" in picture.texts


def test_many_ranks_are_drawn_small(draw: Any) -> None:
    few, many = (draw(plan_models.LLAMA, "--producer", f"tp={tp}", "--consumer", f"tp={tp}") for tp in (4, 16))
    heights = [float(one.root.get("height", "0")) for one in (few, many)]
    assert heights[1] < 1.5 * heights[0]
    assert "rank 15: head 7" in many.texts


def test_numbers_of_heads_do_not_touch(draw: Any) -> None:
    picture = draw(plan_models.GEMMA3, "--producer", "tp=1", "--consumer", "tp=2")
    shown = [text for text in picture.texts if text.isdecimal()]
    assert "15" not in shown
    assert {"0", "2", "14"} <= set(shown)


def test_states_that_are_not_drawn_are_named(draw: Any) -> None:
    picture = draw(plan_models.QWEN3_NEXT, "--producer", "tp=2")
    assert "Not drawn, but counted: GDN state." in " ".join(picture.texts)


def test_a_refusal_has_no_arrows(draw: Any) -> None:
    picture = draw(plan_models.LLAMA, "--producer", "tp=2", "--consumer", "dtype=fp8", status=1)
    assert "refused" in picture.texts
    assert "can be moved" not in picture.texts
    assert picture.num_arrows == 0
    assert "nothing" in picture.texts
    assert any("KV cache dtype: consumer has fp8_e4m3, producer has bfloat16" in text for text in picture.texts)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        (plan_models.LLAMA, ("--producer", "tp=16", "--consumer", "tp=16,pp=1,layout=BHLNC")),
        (plan_models.LLAMA, ("--producer", "layout=separated", "--consumer", "tp=8,layout=interleaved")),
        (plan_models.LLAMA, ("--producer", "layout=cpu,block=32", "--consumer", "layout=cpu", "--tokens", "256")),
        (plan_models.LLAMA, ("--producer", "layout=cpu-amx", "--consumer", "layout=cpu-amx", "--tokens", "256")),
        (plan_models.DEEPSEEK, ("--producer", "tp=4,block=64", "--consumer", "tp=8,dcp=2,interleave=16")),
        (plan_models.GEMMA3, ("--producer", "tp=8,pp=2,layout=LHBNC", "--consumer", "tp=16")),
        (plan_models.QWEN3_NEXT, ("--producer", "tp=2", "--consumer", "tp=1,layout=BLHNC")),
        (plan_models.MAMBA2, ("--producer", "tp=2,conv=DS", "--consumer", "tp=1")),
        (plan_models.FALCON_H1, ("--producer", "tp=2,dtype=bf16", "--consumer", "tp=4,dtype=bf16")),
    ],
)
def test_nothing_overlaps(draw: Any, config: dict[str, Any], arguments: tuple[str, ...]) -> None:
    picture = draw(config, *arguments)
    assert picture.num_arrows > 0


def test_of_many_ranks_some_are_left_out(draw: Any) -> None:
    picture = draw(plan_models.LLAMA, "--producer", "tp=8,pp=4", "--consumer", "tp=32")
    assert picture.texts.count("… 17 more ranks …") == 2
    assert "rank pp3.tp7: head 7" in picture.texts
    assert not any(text.startswith("rank 20") for text in picture.texts)


def test_a_case_can_be_drawn(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    arguments = ["plan", "--case", str(CASES_FILE), "--name", "L7 head merge", "--svg", str(file)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    picture = Picture(file)
    picture.check()
    assert picture.num_arrows == 4
    assert "Which KV cache moves where: L7 head merge" in picture.texts


def layer(text: str, config: dict[str, Any] = plan_models.LLAMA) -> Layer:
    built = engine("consumer", models.parse(config, "x"), sides.parse("--consumer", text, None), 64)
    return built.layouts[-1].layers[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=4", "heads > tokens > keys, values"),
        ("tp=4,layout=NHD", "tokens > heads > keys, values"),
        ("tp=8", "tokens > keys, values"),
        ("tp=4,layout=separated", "keys, values > tokens > heads"),
        ("tp=4,layout=interleaved-hnd", "keys, values > heads > tokens"),
        ("tp=4,layout=cpu", "heads > keys, values (keys: elements > tokens; values: tokens)"),
        ("tp=4,layout=cpu-amx", "heads"),
    ],
)
def test_nesting_in_words(text: str, words: str) -> None:
    assert strips.nesting(layer(text)) == words


def test_areas_cover_a_block_once() -> None:
    for text in ("tp=4", "tp=4,layout=NHD", "tp=4,layout=cpu", "tp=4,layout=separated", "tp=4,layout=LHBNC"):
        one = layer(text)
        block_bytes = one.block_size * 2 * 2 * 256
        areas = strips.areas(one, (1,))
        assert sum(area.length for area in areas) == block_bytes
        assert all(first.end <= second.offset for first, second in pairwise(areas))
        assert {area.head for area in areas} == {6, 7}  # of the last rank
        first = strips.pieces(one, (1,), areas[0].offset, 3)
        assert first[0].offset == areas[0].offset


def test_pieces_say_what_lies_where() -> None:
    one = layer("tp=4,layout=NHD")
    start = one.base_bytes + one.fields[0].block_stride_bytes
    found = [
        (piece.offset - start, piece.head, piece.field, piece.token) for piece in strips.pieces(one, (1,), start, 5)
    ]
    assert found == [(0, 6, "k", 0), (256, 6, "v", 0), (512, 7, "k", 0), (768, 7, "v", 0), (1024, 6, "k", 1)]
    transposed = layer("layout=cpu")
    start = transposed.base_bytes
    found = [(piece.length, piece.token, piece.content) for piece in strips.pieces(transposed, (0,), start + 252, 3)]
    assert found == [(2, 126, 0), (2, 127, 0), (2, 0, 2)]


def test_tokens_of_a_context_parallel_rank() -> None:
    one = layer("tp=2,dcp=2,interleave=2", plan_models.DEEPSEEK)
    pieces = strips.pieces(one, (0, 1), one.base_bytes, 20)
    assert [piece.token for piece in pieces[:5]] == [2, 3, 6, 7, 10]
    assert pieces[16].token == 32 + 2


def test_what_does_not_print_is_written_out() -> None:
    canvas = Canvas(100)
    canvas.text(0, 0, "a\x1b[31m\ud800<&")
    canvas.rect(0, 0, 1, 1, "red", title="b\x00\uffff>")
    root = ElementTree.fromstring(canvas.svg(10).encode())
    assert [one.text for one in root.iter(f"{SVG}text")] == ["a\\x1b[31m\\ud800<&"]
    assert [one.text for one in root.iter(f"{SVG}title")] == ["b\\x00\\uffff>"]
