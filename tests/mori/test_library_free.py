"""What needs no library: settings, pieces, what a queue is charged, and what is said where MoRI is missing."""

from __future__ import annotations

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mori_env import environment
from transport_harness import batch

from kvferry.layout import Region
from kvferry.transport import registry
from kvferry.transport.base import TransportError, TransportUnavailable
from kvferry.transport.mori_data import CALL_BYTES, Memory, Piece, memory_of, pieces
from kvferry.transport.mori_engine import Settings
from kvferry.transport.mori_transfer import MoriHandle

DEFAULTS = {"qp_per_transfer": 1, "post_batch_size": -1, "num_workers": 1, "max_send_wr": 64}


def settings(backend: str = "rdma", **changes: int) -> Settings:
    return Settings(backend, "127.0.0.1", **{**DEFAULTS, **changes})


@pytest.mark.parametrize(
    ("python", "remedy"),
    [
        ((3, 10, 4), "with them: pip install 'amd-mori>=1.2.4,<1.3'"),
        (
            (3, 12, 1),
            "AMD's wheels on PyPI are for Python 3.10, this is 3.12: take the MoRI 1.2 of your ROCm image, or build it "
            "for this Python",
        ),
    ],
)
def test_without_the_library_it_says_how_this_python_gets_it(
    python: tuple[int, ...], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mori", "mori.io"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "version_info", python)
    with pytest.raises(TransportUnavailable) as raised:
        registry.make("mori")
    assert str(raised.value).endswith(f". MoRI-IO needs ROCm's libraries; {remedy}")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "tcp"}, "backend 'tcp' is none of rdma, xgmi"),
        ({"qp_per_transfer": 0}, "qp_per_transfer is 0, must be from 1 to 128"),
        ({"qp_per_transfer": 100_000}, "qp_per_transfer is 100000, must be from 1 to 128"),
        ({"qp_per_transfer": "4"}, "mori: option qp_per_transfer: Expected `int`, got `str`: '4'"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"num_workers": 2000}, "num_workers is 2000, must be from 1 to 128"),
        ({"max_send_wr": 1}, "max_send_wr is 1, must be from 2 to 2147483647"),
        ({"max_send_wr": 2**31}, "max_send_wr is 2147483648"),
        ({"post_batch_size": 0}, "post_batch_size is 0, must be -1 or from 1 to 2147483647"),
        ({"post_batch_size": 2**31}, "post_batch_size is 2147483648"),
        ({"post_batch_size": None}, "mori: option post_batch_size: Expected `int`, got `null`: None"),
        ({"host": 5}, "mori: option host: Expected `str`, got `int`: 5"),
        ({"streams": 3}, "unknown option 'streams'"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TransportError, match=text):
        registry.make("mori", options)


def test_the_environment_of_the_library_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_IO_QP_MAX_SEND_WR", "20")
    monkeypatch.setenv("MORI_IO_QP_PER_TRANSFER", "3")
    monkeypatch.setenv("MORI_IO_POST_BATCH_SIZE", "")
    found = settings()
    assert (found.max_send_wr, found.qp_per_transfer, found.post_batch_size) == (20, 3, -1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("--5", "MORI_IO_QP_PER_TRANSFER is '--5', must be an integer"),
        ("4 ", "MORI_IO_QP_PER_TRANSFER is '4 ', must be an integer"),
        ("9" * 5000, "MORI_IO_QP_PER_TRANSFER is '999"),
        ("-5", "qp_per_transfer is -5, must be from 1 to 128"),
    ],
    ids=["signs", "space", "digits", "negative"],
)
def test_a_variable_of_the_library_that_cannot_be_is_named(
    value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_IO_QP_PER_TRANSFER", value)
    with pytest.raises(TransportError, match=text):
        settings()


@pytest.mark.parametrize(
    ("changes", "descriptors", "share", "one_post"),
    [
        ({}, 1, 1, True),
        ({}, 64, 64, True),
        ({}, 65, 65, False),
        ({"qp_per_transfer": 4}, 10, 3, False),
        ({"qp_per_transfer": 4}, 1, 1, True),
        ({"post_batch_size": 8}, 20, 20, False),
        ({"post_batch_size": 8}, 8, 8, True),
        # 20 in posts of 8, dealt to two: two posts and one.
        ({"post_batch_size": 8, "qp_per_transfer": 2}, 20, 16, False),
        ({"post_batch_size": 8, "qp_per_transfer": 2}, 5, 5, True),
    ],
)
def test_what_a_queue_is_charged(changes: dict[str, int], descriptors: int, share: int, one_post: bool) -> None:
    found = settings(**changes)
    assert found.queue_share(descriptors) == share
    assert found.in_one_post(descriptors) is one_post


def test_a_piece_always_fits_an_empty_queue() -> None:
    for qps in (1, 2, 3, 8):
        for post in (-1, 1, 7, 64, 1000):
            for most in (2, 3, 64):
                found = settings(qp_per_transfer=qps, post_batch_size=post, max_send_wr=most)
                assert all(found.queue_share(n) <= most for n in range(1, found.piece_descriptors() + 1)), found


def test_xgmi_has_no_queue() -> None:
    assert settings("xgmi").queue_share(10**6) == 0


def test_pieces_keep_order_and_regions() -> None:
    batches = [batch([1, 2, 3], [4, 5, 6], [7, 8, 9], (0, 1)), batch([10], [11], [12], (1, 0))]
    assert [tuple(piece) for piece in pieces(batches, 2)] == [
        ((0, 1), [1, 2], [4, 5], [7, 8]),
        ((0, 1), [3], [6], [9]),
        ((1, 0), [10], [11], [12]),
    ]


def test_a_piece_is_cut_in_order() -> None:
    piece = Piece((0, 1), [1, 2, 3], [4, 5, 6], [7, 8, 9])
    assert piece.cut(2) == (Piece((0, 1), [1, 2], [4, 5], [7, 8]), Piece((0, 1), [3], [6], [9]))


def refused(code: str, found: Settings) -> MoriHandle:
    """A read whose one call the library ends at once with this code, on a link that stands in for one."""
    status = SimpleNamespace(Code=lambda: SimpleNamespace(name=code), Message=lambda: "no")
    session = SimpleNamespace(batch_read=lambda *lists: status, allocate_transfer_uid=lambda: 1)
    link = SimpleNamespace(key="k", queued=0, dead="", session=lambda *pair: session)
    engine = SimpleNamespace(settings=found, failed=set(), closed=False)
    peer: Any = SimpleNamespace(name="peer", link=link, engine=engine)
    handle = MoriHandle(peer, deque([Piece((0, 0), [0], [0], [1])]), write=False)
    assert handle.send()
    return handle


@pytest.mark.parametrize(
    ("code", "changes", "quiet"),
    [
        ("ERR_INVALID_ARGS", {}, True),
        ("ERR_NOT_FOUND", {"num_workers": 4}, True),
        ("ERR_INVALID_ARGS", {"qp_per_transfer": 2, "num_workers": 2}, False),
        ("ERR_BAD_STATE", {}, False),
        ("ERR_BAD_STATE", {"qp_per_transfer": 2, "num_workers": 2}, False),
    ],
)
def test_a_refused_call_is_quiet_only_if_no_part_of_it_can_have_started(
    code: str, changes: dict[str, int], quiet: bool
) -> None:
    """MoRI's threads post their parts alone, and the code of one that was dropped stands for all."""
    handle = refused(code, settings(**changes))
    assert f"{code}: no" in handle.failure
    assert handle.quiet() is quiet
    handle.peer.engine.closed = True
    assert handle.quiet()


def test_no_piece_is_longer_than_a_message() -> None:
    """The library joins neighbours of one call, and cuts lengths to 32 bits."""
    long = 5 * CALL_BYTES // 2
    batches = [batch([0, long, 9 * CALL_BYTES], [7, 7 + long, 0], [long, long, 1])]
    found = list(pieces(batches, 1000))
    assert all(sum(piece.lengths) <= CALL_BYTES for piece in found)
    covered = np.concatenate(
        [np.array([piece.local_offsets, piece.remote_offsets, piece.lengths]) for piece in found], 1
    )
    local, remote, lengths = covered
    ends = np.cumsum(lengths)
    assert int(ends[-1]) == 2 * long + 1
    begins = np.concatenate([[0], ends[:-1]])
    assert (local[:-1] == begins[:-1]).all()
    assert (remote[:-1] == begins[:-1] + 7).all()
    assert (local[-1], remote[-1], lengths[-1]) == (9 * CALL_BYTES, 0, 1)


def test_kinds_of_memory() -> None:
    for device, found in (("cpu", (False, -1)), ("cuda:3", (True, 3)), ("cuda", (True, 0)), ("hip:1", (True, 1))):
        assert memory_of(Region(0, 1, device), "region 0", "rdma") == Memory(*found)
    for device in ("cpu:1", "tpu:0", "cuda:x", "cuda:" + "9" * 5000):
        with pytest.raises(TransportError, match=f"region 0: device '{device}'"):
            memory_of(Region(0, 1, device), "region 0", "rdma")


@pytest.mark.timeout(1200)  # it may be the first to build it
def test_the_environment_leaves_torch_alone_when_asked() -> None:
    """vLLM runs in it with its own torch, the tests with a stand-in."""
    assert "torch_stub" in environment()["PYTHONPATH"]
    assert "torch_stub" not in environment(real_torch=True)["PYTHONPATH"]
