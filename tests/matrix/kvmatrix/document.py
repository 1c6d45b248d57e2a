"""docs/matrix.md: written from the combinations and their results, and read back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path

from kvmatrix import prose, wording
from kvmatrix.combination import Combination
from kvmatrix.combinations import (
    BLOCK_SIZES,
    BY_NAME,
    COMBINATIONS,
    CONTEXT_SIZES,
    HEADS,
    LAYOUTS,
    NIXL_SUFFIX,
    OVER_NIXL,
    TP_SIZES,
    blocks_name,
    context_name,
    latent_split_name,
    layouts_name,
    legal,
    split_name,
)
from kvmatrix.driver import Outcome
from kvmatrix.real_vllm import REAL_VLLM

PATH = Path(__file__).parents[3] / "docs" / "matrix.md"

Tell = Callable[[Combination], str]


class Outdated(ValueError):
    """The file is not about the combinations that there are; the text says where it differs."""


def told(outcome: Outcome) -> str:
    """A result as the file has it."""
    if outcome.result == "ok":
        return f"{outcome.num_bytes} / {outcome.num_descriptors}"
    return _escaped(outcome.result)


def write(outcomes: Mapping[str, Outcome]) -> str:
    """The file's text. outcomes: of every combination, by name."""
    return _text(lambda combination: told(outcomes[combination.name]))


def read(text: str) -> dict[str, str]:
    """Combination -> its result, from the file's text. Raises Outdated if the file is about other combinations."""
    parts = re.split("\0(.*?)\0", _text(lambda combination: f"\0{combination.name}\0"))
    fixed, names = parts[::2], parts[1::2]
    results: dict[str, str] = {}
    at = _behind(text, 0, fixed[0])
    for name, following in zip(names, fixed[1:], strict=True):
        end = text.find(" |", at)  # every result is in a table
        bold = 2 if following.startswith("**") else 0
        results[name] = text[at : end - bold]
        at = _behind(text, end - bold, following)
    if at != len(text):
        raise Outdated(f"the file goes on where it should end: {text[at : at + 80]!r}")
    return results


def _behind(text: str, at: int, fixed: str) -> int:
    """Where `fixed` ends, which must begin at `at`."""
    if at >= 0 and text.startswith(fixed, at):
        return at + len(fixed)
    found, wanted = text[max(at, 0) :].splitlines() or [""], fixed.splitlines()
    differing = next((pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]), ("its end", wanted[-1]))
    raise Outdated(f"the file has {differing[0]!r} where {differing[1]!r} should be: run `make matrix`")


def _text(tell: Tell) -> str:
    return "".join(
        (
            prose.INTRO.format(count=len(COMBINATIONS), tested=_table(("", *prose.WAYS), _tested())),
            prose.SPLITS,
            *(_split_grid(heads, tell) for heads in HEADS),
            prose.LATENT_SPLITS,
            _grid(TP_SIZES, latent_split_name, _bold_if_real(tell)),
            prose.LAYOUTS,
            _grid(LAYOUTS, layouts_name, tell),
            prose.BLOCK_SIZES,
            _grid(BLOCK_SIZES, blocks_name, tell),
            prose.CONTEXT,
            _grid(CONTEXT_SIZES, context_name, tell),
            prose.SPECIAL,
            *(_cases(section, tell) for section in _special_sections()),
            prose.NIXL,
            _table(
                ("combination", "bytes / descriptors"),
                ((one.name.removesuffix(NIXL_SUFFIX), tell(one)) for one in OVER_NIXL),
            ),
            prose.REFUSED,
            _table(("what differs", "answer"), ((_case(one), tell(one)) for one in _of("refused"))),
            prose.REAL,
            _table(
                ("test", "P TP", "D TP", "KV heads", "layout", "transport", "model"),
                ((one.test, *map(str, one.tp), str(one.heads or "none"), *one[3:6]) for one in REAL_VLLM),
            ),
        )
    )


def _title(section: str) -> str:
    """The heading under which a section's combinations are."""
    return "Splits" if section.startswith("splits of ") else section[0].upper() + section[1:]


def _tested() -> Iterator[tuple[str, ...]]:
    for title in dict.fromkeys(_title(one.section) for one in COMBINATIONS):
        count = sum(_title(one.section) == title for one in COMBINATIONS)
        yield title, prose.ORACLE.get(title, "none"), str(count), _with_real_vllm(title) or "none"


def _with_real_vllm(title: str) -> str:
    if title == "Splits":
        return ", ".join(dict.fromkeys(f"{one.tp[0]} to {one.tp[1]}" for one in REAL_VLLM if one.heads))
    if title == "Layouts":
        return ", ".join(dict.fromkeys(f"{one.layout} to {one.layout}" for one in REAL_VLLM))
    return ", ".join(dict.fromkeys(one.model for one in REAL_VLLM if title in one.headings))


def _special_sections() -> list[str]:
    grids = ("splits", "layouts", "block sizes", "refused")
    return [name for name in dict.fromkeys(one.section for one in COMBINATIONS) if not name.startswith(grids)]


def _of(section: str) -> list[Combination]:
    elsewhere = {*OVER_NIXL, *(BY_NAME[context_name(*sizes)] for sizes in product(CONTEXT_SIZES, CONTEXT_SIZES))}
    return [one for one in COMBINATIONS if one.section == section and one not in elsewhere]


def _case(combination: Combination) -> str:
    return combination.name.partition(": ")[2]


def _split_grid(heads: int, tell: Tell) -> str:
    sizes = [tp for tp in TP_SIZES if legal(heads, tp)]
    title = f"\n### {heads} KV head{'s' if heads > 1 else ''}\n\n"
    return title + _grid(sizes, lambda *tp: split_name(heads, *tp), _bold_if_real(tell))


def _bold_if_real(tell: Tell) -> Tell:
    """In bold what was also run with real vLLM."""
    real = {split_name(one.heads, *one.tp) if one.heads else latent_split_name(*one.tp) for one in REAL_VLLM}
    return lambda one: f"**{tell(one)}**" if one.name in real else tell(one)


def _grid(values: Sequence[int | str], name: Callable[..., str], tell: Tell) -> str:
    """The producer's values down, the consumer's across."""
    rows = ((f"**{ours}**", *(tell(BY_NAME[name(ours, theirs)]) for theirs in values)) for ours in values)
    return _table(("P \\ D", *map(str, values)), rows)


def _cases(section: str, tell: Tell) -> str:
    models = groupby(_of(section), wording.model)
    title = _title(section)
    return f"\n### {title}\n{prose.NOTES.get(title, '')}" + "".join(
        _model_table(model, cases, tell) for model, cases in models
    )


def _model_table(model: str, cases: Iterable[Combination], tell: Tell) -> str:
    rows = (
        (_case(one), wording.engine(one.producer), wording.engine(one.consumer), wording.tokens(one), tell(one))
        for one in cases
    )
    head = ("case", "producer", "consumer", "tokens", "bytes / descriptors")
    return f"\n{model}.\n\n{_table(head, rows)}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))
