"""Transports by name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.transport import registry
from kvferry.transport.base import TransportError, TransportUnavailable
from kvferry.transport.local import LocalTransport


def test_known_names_can_be_asked_for_their_options() -> None:
    assert set(registry.known()) >= {"local", "nixl"}
    for name in registry.known():
        assert isinstance(registry.options(name), tuple)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(TransportError, match="unknown transport 'rdma'; known are local, nixl"):
        registry.make("rdma")


@pytest.mark.parametrize(("name", "meant"), [("Nixl", "nixl"), ("NIXL", "nixl"), ("mooncacke", "mooncake")])
def test_an_unknown_name_that_is_near_a_known_one(name: str, meant: str) -> None:
    with pytest.raises(TransportError) as raised:
        registry.make(name)
    assert str(raised.value).startswith(f"unknown transport '{name}' (did you mean '{meant}'?); known are local, ")
    assert str(raised.value).endswith(', or "package.module:Class"')


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(
        TransportError, match=r"local: unknown option 'gates'; known are ptracer_any, max_inflight, gate"
    ):
        registry.make("local", {"gates": 1})


@pytest.mark.parametrize(
    ("name", "option", "value", "text"),
    [
        ("nixl", "backend_params", "TLS=tcp", "Expected `object | null`, got `str`: 'TLS=tcp'"),
        ("nixl", "backend_params", {"num_workers": 1}, "Expected `str`, got `int` - at `$[...]`: {'num_workers': 1}"),
        ("nixl", "backend", None, "Expected `str`, got `null`: None"),
        ("mori", "qp_per_transfer", True, "Expected `int`, got `bool`: True"),
        ("mooncake", "device", ["mlx5_0"], "Expected `str`, got `array`: ['mlx5_0']"),
        ("mooncake", "max_inflight", "9" * 1000, f"Expected `int`, got `str`: '{'9' * 199}..."),
    ],
)
def test_a_value_of_another_type_is_named_before_the_library_is_wanted(
    name: str, option: str, value: object, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("nixl", "nixl._api", "mori", "mori.io", "mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportError) as raised:
        registry.make(name, {option: value})
    assert str(raised.value) == f"{name}: option {option}: {text}"
    assert type(raised.value) is TransportError


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl", "nixl._api", "nixl_cu12", "nixl_cu13", "nixl_rocm"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportUnavailable, match=r"pip install 'nixl>=1\.0,<2'"):
        registry.make("nixl")


def test_libraries_are_imported_when_a_transport_is_made() -> None:
    program = (
        "import sys\n"
        "from kvferry.transport.registry import make, known, options\n"
        "[options(name) for name in known()]; make('local')\n"
        "print([m for m in sys.modules if m.startswith(('nixl', 'torch', 'vllm', 'mori', 'mooncake'))])\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


class OfOthers:
    """Puts packages, whose names begin with "carrier-", on the path as an installer would: a module, and metadata with
    its entry points."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def install(self, package: str, code: str, **entry_points: str) -> None:
        module = package.replace("-", "_")
        (self._path / f"{module}.py").write_text(code)
        metadata = self._path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
        (metadata / "entry_points.txt").write_text(f"[kvferry.transports]\n{lines}")
        importlib.invalidate_caches()


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OfOthers]:
    """Packages of others; forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    yield OfOthers(tmp_path)
    for module in [name for name in sys.modules if name.startswith("carrier_")]:
        del sys.modules[module]


def transport_named(name: str) -> str:
    """Code of a transport of that name: kvferry's local one, with a further option."""
    return (
        "from kvferry.transport.local import LocalTransport\n"
        "class Mine(LocalTransport):\n"
        f"    name = {name!r}\n"
        "    options = (*LocalTransport.options, 'pigeons')\n"
        "    def __init__(self, pigeons=0, **more):\n"
        "        super().__init__(**more)\n"
        "        self.pigeons = pigeons\n"
    )


def test_another_package_offers_a_transport_by_an_entry_point(others: OfOthers) -> None:
    others.install("carrier-air", transport_named("air"), air="carrier_air:Mine")
    assert registry.known()[-1] == "air"
    assert "carrier_air" not in sys.modules
    assert registry.options("air")[-1] == "pigeons"
    transport = registry.make("air", {"pigeons": 3, "max_inflight": 2})
    assert (transport.name, transport.pigeons) == ("air", 3)  # type: ignore[attr-defined]
    with pytest.raises(TransportError, match=r"air: unknown option 'gulls'; known are ptracer_any, .*, pigeons"):
        registry.make("air", {"gulls": 1})


def test_only_annotations_that_can_be_told_are_checked(others: OfOthers) -> None:
    """Another package's constructor may say nothing, or what only its type checker understands."""
    annotated = transport_named("air").replace("pigeons=0", "pigeons: int = 0")
    others.install("carrier-air", annotated)
    others.install("carrier-sea", transport_named("air"))
    others.install("carrier-sky", annotated.replace("pigeons: int", "pigeons: 'Flock'"))
    with pytest.raises(TransportError, match="option pigeons: Expected `int`, got `str`: 'many'"):
        registry.make("carrier_air:Mine", {"pigeons": "many"})
    for path in ("carrier_sea:Mine", "carrier_sky:Mine"):
        assert registry.make(path, {"pigeons": "many"}).pigeons == "many"  # type: ignore[attr-defined]


def test_a_transport_by_its_import_path(others: OfOthers) -> None:
    others.install("carrier-air", transport_named("air"))
    assert "air" not in registry.known()
    assert registry.make("carrier_air:Mine", {"pigeons": 3}).pigeons == 3  # type: ignore[attr-defined]
    assert registry.options("carrier_air:Mine")[-1] == "pigeons"


def test_built_in_names_win(others: OfOthers) -> None:
    others.install("carrier-air", transport_named("local"), local="carrier_air:Mine")
    assert registry.known().count("local") == 1
    assert type(registry.make("local")) is LocalTransport
    with pytest.raises(TransportError, match="'carrier_air:Mine' calls itself 'local', as one of kvferry's own"):
        registry.make("carrier_air:Mine")


BROKEN = {
    "code": ("raise RuntimeError('no wings')\n", "carrier_air:Mine can't be loaded: RuntimeError: no wings"),
    "import": ("import no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing'"),
    "class": ("Yours = 1\n", "AttributeError: module 'carrier_air' has no attribute 'Mine'"),
    "methods": (
        "class Mine:\n    name, options = 'air', ()\n    def poll(self, handle): ...\n",
        "is no transport: it has no close, connect, disconnect, gone, progress, reaches, read, record, register, "
        "release, write",
    ),
    "name": (transport_named("water"), "carrier_air:Mine calls itself 'water'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_entry_point_names_its_package_when_it_is_asked_for(others: OfOthers, what: str) -> None:
    code, text = BROKEN[what]
    others.install("carrier-air", code, air="carrier_air:Mine")
    others.install("carrier-sea", transport_named("sea"), sea="carrier_sea:Mine")
    assert set(registry.known()) >= {"air", "sea", "local"}
    assert registry.make("sea").name == "sea"
    for ask in (registry.make, registry.options):
        with pytest.raises(TransportError, match="transport 'air' of package carrier-air: ") as raised:
            ask("air")
        assert text in str(raised.value)


def test_two_packages_that_offer_one_name_are_both_named(others: OfOthers) -> None:
    others.install("carrier-air", transport_named("air"), air="carrier_air:Mine")
    others.install("carrier-wind", transport_named("air"), air="carrier_wind:Mine")
    expected = r"'air' is offered by carrier-air \(carrier_air:Mine\) and carrier-wind \(carrier_wind:Mine\)"
    with pytest.raises(TransportError, match=expected):
        registry.make("air")
    assert registry.make("carrier_wind:Mine").name == "air"


@pytest.mark.parametrize("path", ["no_such_thing:Mine", ":Mine", "kvferry.transport.local:", "kvferry:a:b"])
def test_a_wrong_import_path_is_named(path: str) -> None:
    with pytest.raises(TransportError, match=f"transport '{path}': {path} can't be loaded: "):
        registry.make(path)
