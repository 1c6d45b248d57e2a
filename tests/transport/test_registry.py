"""Transports by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.transport import registry
from kvferry.transport.base import TransportError, TransportUnavailable


def test_known_names_can_be_asked_for_their_options() -> None:
    assert set(registry.known()) >= {"local", "nixl"}
    for name in registry.known():
        assert isinstance(registry.options(name), tuple)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(TransportError, match="unknown transport 'rdma'; known are local, nixl"):
        registry.make("rdma")


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(
        TransportError, match=r"local: unknown option 'gates'; known are ptracer_any, max_inflight, gate"
    ):
        registry.make("local", {"gates": 1})


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl", "nixl._api", "nixl_cu12", "nixl_cu13", "nixl_rocm"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TransportUnavailable, match=r"pip install 'kvferry\[nixl\]'"):
        registry.make("nixl")


def test_libraries_are_imported_when_a_transport_is_made() -> None:
    program = (
        "import sys\n"
        "from kvferry.transport.registry import make, known, options\n"
        "[options(name) for name in known()]; make('local')\n"
        "print([m for m in sys.modules if m.startswith(('nixl', 'torch', 'vllm', 'mori', 'mooncake'))])\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
