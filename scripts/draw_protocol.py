#!/usr/bin/env python3
"""Draws the protocol's transition tables into docs/protocol.md. With --check: only tells whether that is up to date."""

from __future__ import annotations

import argparse
import re
import sys
from enum import Enum
from pathlib import Path

from kvferry.protocol.consumer import USES
from kvferry.protocol.hold import CLAIMS, HOLDS
from kvferry.protocol.load import LOADS
from kvferry.protocol.transitions import Table
from kvferry.protocol.writer import JOBS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
TABLES: dict[str, Table] = {  # type: ignore[type-arg]
    "hold": HOLDS,
    "claim": CLAIMS,
    "use": USES,
    "load": LOADS,
    "write": JOBS,
}
DIAGRAM = re.compile(r"(<!-- diagram: (\w+) -->\n).*?(<!-- end of diagram -->)", re.DOTALL)


def mermaid(table: Table) -> str:  # type: ignore[type-arg]
    """A state diagram; states that nothing leaves are ends."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {_name(table.start)}"]
    for (before, trigger), after in table.moves.items():
        lines.append(f"    {_name(before)} --> {_name(after)}: {trigger.value}")
    left = {before for before, _ in table.moves}
    lines += [f"    {_name(state)} --> [*]" for state in type(table.start) if state not in left]
    return "\n".join([*lines, "```"])


def drawn(text: str) -> str:
    """The document's text with every diagram as the tables have it."""
    return DIAGRAM.sub(lambda found: f"{found[1]}{mermaid(TABLES[found[2]])}\n{found[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the document is out of date")
    options = parser.parse_args()
    text = DOCUMENT.read_text()
    if options.check:
        return 0 if drawn(text) == text else 1
    DOCUMENT.write_text(drawn(text))
    return 0


def _name(state: Enum) -> str:
    return str(state.value).replace(" ", "_")


if __name__ == "__main__":
    sys.exit(main())
