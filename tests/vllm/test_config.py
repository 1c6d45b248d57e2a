"""The connector's settings, and that the documentation names each of them with its default."""

import re
from pathlib import Path

import msgspec
import pytest

from kvferry.vllm.config import Config, ConfigError, parse

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_nothing_set_is_the_default() -> None:
    assert parse({}) == Config()


def test_settings_are_read() -> None:
    config = parse(
        {"transports": ["nixl"], "lease_s": 12, "renew_s": 3, "transport_options": {"nixl": {"backend": "UCX"}}}
    )
    assert (config.transports, config.leases().lease_s, config.leases().renew_s) == (("nixl",), 12, 3)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"trasports": ["nixl"]}, "trasports.*known keys.*transports"),
        ({"transports": []}, "transports is empty"),
        ({"transports": "nixl"}, "transports"),
        ({"lease_s": -1}, "lease_s"),
        ({"lease_s": 5, "renew_s": 4}, "renew_s"),
        ({"lease_s": "soon"}, "lease_s"),
        ({"max_held": 0}, "max_held is 0"),
        ({"max_quarantined": 1.5}, "max_quarantined is 1.5"),
        ({"port": "any"}, "port"),
    ],
)
def test_what_means_nothing_is_named(extra: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(extra)


def test_every_setting_is_documented_with_its_default() -> None:
    documented: dict[str, str] = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 4:
            continue
        names, defaults = re.findall(r"`(\w+)`", cells[1]), [default.strip(" `") for default in cells[2].split(",")]
        if len(names) > 1:
            documented.update(zip(names, defaults, strict=True))
        elif names:
            documented[names[0]] = cells[2].strip("`")
    assert documented.keys() == set(Config.__struct_fields__)
    for name, default in zip(Config.__struct_fields__, msgspec.structs.fields(Config), strict=True):
        if isinstance(default.default, float):
            assert float(documented[name]) == default.default, name
