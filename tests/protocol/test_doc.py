import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _script():
    spec = importlib.util.spec_from_file_location("draw_protocol", ROOT / "scripts" / "draw_protocol.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_diagrams_are_those_of_the_tables():
    script = _script()
    text = script.DOCUMENT.read_text()
    assert script.drawn(text) == text, "run scripts/draw_protocol.py"
    assert all(f"<!-- diagram: {name} -->" in text for name in script.TABLES)


def test_a_diagram_shows_every_transition():
    script = _script()
    for table in script.TABLES.values():
        assert script.mermaid(table).count(" --> ") >= len(table.moves) + 2
