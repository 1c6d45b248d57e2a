"""Records that no worker of ours writes, in each transport's own reader: refused before a library sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvferry.layout import Region
from kvferry.transport import local, mooncake_data, mori_data, nixl_data
from kvferry.transport.base import BadTransfer, TransportError
from kvferry.transport.devices import gpu_number
from kvferry.transport.remote import decode_record

READERS: dict[str, Callable[[bytes], Any]] = {
    "local": lambda record: decode_record(record, local._Record, "local", local._KIND),
    "nixl": nixl_data.decode,
    "mori": mori_data.decode,
    "mooncake": mooncake_data.decode,
}
NESTED = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
"""{"x": [[[...]]]}: a key that no record has."""
NUMBER_WITHOUT_END = "cuda:" + "9" * 5000


@pytest.mark.parametrize("name", READERS)
def test_one_that_is_nested_without_end(name: str) -> None:
    with pytest.raises(BadTransfer, match=f"{name}: malformed record of {len(NESTED)} bytes"):
        READERS[name](NESTED)


@pytest.mark.parametrize("name", READERS)
def test_one_of_another_format(name: str) -> None:
    with pytest.raises(BadTransfer, match=f"{name}: malformed record of 1 bytes"):
        READERS[name](msgspec.msgpack.encode(5))


@pytest.mark.parametrize("device", [NUMBER_WITHOUT_END, "cuda:-1", "cuda:٣", "cuda: 1", "cuda:1\n", "tpu:0"])
def test_a_device_that_is_none(device: str) -> None:
    """Python refuses to read a number of 5000 digits, with an error of its own."""
    assert gpu_number(device, "cuda") is None
    with pytest.raises(TransportError, match=r"nixl: region 0: device '.* is neither 'cpu' nor 'cuda:N'"):
        nixl_data.memory_of(Region(0, 1, device), "region 0")
    with pytest.raises(TransportError, match=r"mori: region 0: device '.* is neither 'cpu' nor 'cuda:N' nor 'hip:N'"):
        mori_data.memory_of(Region(0, 1, device), "region 0", "rdma")


def test_numbers_of_gpus() -> None:
    assert [gpu_number(device, "cuda", "hip") for device in ("cuda", "cuda:0", "hip:17")] == [0, 0, 17]
    assert gpu_number("hip:1", "cuda") is None
    assert nixl_data.memory_of(Region(0, 1, "cuda:3"), "region 0") == ("VRAM", 3)
