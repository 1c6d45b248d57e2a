"""Every builder against the tensor it describes: the fields' addresses are those of numpy's own indexing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry import layout as layouts
from kvferry.layout import (
    PHYSICAL_ORDERS,
    Axis,
    Field,
    LayoutError,
    Spec,
    cpu_tiles,
    from_shape,
    fused,
    interleaved,
    key_only,
    opaque_tiles,
    physical_strides,
    separated,
    with_kernel_blocks,
)

CASES = json.loads((Path(__file__).parent.parent / "cases" / "layout.json").read_text())
B, N, H, D, ITEMSIZE = 3, 4, 2, 5, 2


def numbered(*shape: int) -> npt.NDArray[np.int64]:
    """A contiguous tensor of items of ITEMSIZE bytes, each holding its own byte offset."""
    return np.arange(np.prod(shape)).reshape(shape) * ITEMSIZE


def table(field: Field, num_blocks: int = B, block_size: int = N, heads: int = H) -> npt.NDArray[np.int64]:
    """[block, token, head, item]: the byte offset of each item, found by walking the field's axes."""
    found = np.full((num_blocks, block_size, heads, field.content_bytes // ITEMSIZE), -1)
    shape = [axis.size for axis in field.axes]
    for digits in np.ndindex(*shape):
        at = {"token": 0, "head": 0, "content": 0}
        offset = field.base_bytes
        for axis, digit in zip(field.axes, digits, strict=True):
            at[axis.dim] += axis.step * digit
            offset += axis.stride_bytes * digit
        if at["content"] % ITEMSIZE == 0:
            for block in range(num_blocks):
                where = (block, at["token"], at["head"], at["content"] // ITEMSIZE)
                assert found[where] == -1
                found[where] = offset + block * field.block_stride_bytes
        else:  # the other bytes of an item follow its first one
            first = (0, at["token"], at["head"], at["content"] // ITEMSIZE)
            assert found[first] in (-1, offset - at["content"] % ITEMSIZE)
    assert (found >= 0).all()
    return found


@pytest.mark.parametrize("head_major", [False, True])
def test_separated(head_major: bool) -> None:
    tensor = numbered(2, B, H, N, D).transpose(0, 1, 3, 2, 4) if head_major else numbered(2, B, N, H, D)
    key, value = separated(B, N, H, D, ITEMSIZE, head_major=head_major)
    assert (key.name, value.name) == ("k", "v")
    np.testing.assert_array_equal(table(key), tensor[0])
    np.testing.assert_array_equal(table(value), tensor[1])


@pytest.mark.parametrize("head_major", [False, True])
def test_interleaved(head_major: bool) -> None:
    tensor = numbered(B, 2, H, N, D).transpose(0, 1, 3, 2, 4) if head_major else numbered(B, 2, N, H, D)
    key, value = interleaved(B, N, H, D, ITEMSIZE, head_major=head_major)
    np.testing.assert_array_equal(table(key), tensor[:, 0])
    np.testing.assert_array_equal(table(value), tensor[:, 1])


def test_key_only_with_a_padded_page() -> None:
    (field,) = key_only(N, D * ITEMSIZE, block_stride_bytes=N * D * ITEMSIZE + 6)
    padded = numbered(B, N * D + 3)[:, : N * D].reshape(B, N, 1, D)
    np.testing.assert_array_equal(table(field, heads=1), padded)
    assert key_only(N, 10)[0].block_stride_bytes == N * 10


@pytest.mark.parametrize("order", PHYSICAL_ORDERS)
@pytest.mark.parametrize("head_size_v", [5, 3, 0])
def test_fused_in_each_physical_order(order: str, head_size_v: int) -> None:
    sizes = {"L": 2, "B": B, "H": H, "N": N, "C": D + head_size_v}
    tensor = numbered(*(sizes[letter] for letter in order)).transpose([order.index(letter) for letter in "LBNHC"])
    strides, layer_stride = physical_strides(order, (B, H, N, sizes["C"]), 2, ITEMSIZE)
    fields = fused((B, H, N, sizes["C"]), strides, D, head_size_v, ITEMSIZE)
    assert [field.name for field in fields] == (["k", "v"] if head_size_v else ["latent"])
    for layer in range(2):
        for field, part in zip(fields, np.split(tensor[layer], [D], axis=3), strict=False):
            np.testing.assert_array_equal(table(field) + layer * layer_stride, part)


def test_fused_with_strided_content() -> None:
    """Content outermost, so that no two items of a head are neighbours."""
    tensor = numbered(2 * D, B, N, H).transpose(1, 2, 3, 0)
    strides = [stride // tensor.itemsize * ITEMSIZE for stride in tensor.strides]
    key, value = fused((B, H, N, 2 * D), (strides[0], strides[2], strides[1], strides[3]), D, D, ITEMSIZE)
    np.testing.assert_array_equal(table(key), tensor[..., :D])
    np.testing.assert_array_equal(table(value), tensor[..., D:])


def test_cpu_tiles_have_transposed_keys() -> None:
    """As measured on vLLM: element (t, d) of K at d*N + t of its tile, of V at N*D + t*D + d."""
    strides, _ = physical_strides("LBHNC", (B, H, N, 2 * D), 1, ITEMSIZE)
    key, value = cpu_tiles((B, H, N, 2 * D), strides, D, ITEMSIZE)
    tiles = numbered(B, H, 2 * N * D)
    keys = tiles[..., : N * D].reshape(B, H, D, N).transpose(0, 3, 1, 2)
    values = tiles[..., N * D :].reshape(B, H, N, D).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(table(key), keys)
    np.testing.assert_array_equal(table(value), values)


def test_opaque_tiles() -> None:
    strides, _ = physical_strides("LBHNC", (B, H, N, 2 * D), 1, ITEMSIZE)
    (field,) = opaque_tiles((B, H, N, 2 * D), strides, "amx")
    assert (field.opaque, field.content_bytes) == ("amx", N * 2 * D * ITEMSIZE)
    found = table(field, block_size=1)
    np.testing.assert_array_equal(found, numbered(B, 1, H, N * 2 * D))


def test_kernel_blocks_are_rows_of_a_block() -> None:
    rows = separated(2 * B, N, H, D, ITEMSIZE)
    key, value = with_kernel_blocks(rows, N, 2 * N)
    tensor = numbered(2, B, 2 * N, H, D)
    assert key.axes[0] == Axis("token", 2, N, rows[0].block_stride_bytes)
    np.testing.assert_array_equal(table(key, block_size=2 * N), tensor[0])
    np.testing.assert_array_equal(table(value, block_size=2 * N), tensor[1])


def test_a_kernel_block_of_a_whole_block_changes_nothing() -> None:
    fields = separated(B, N, H, D, ITEMSIZE)
    assert with_kernel_blocks(fields, N, N) == fields


@pytest.mark.parametrize("case", CASES["strides"], ids=lambda case: case["name"])
def test_physical_strides(case: dict[str, Any]) -> None:
    strides, layer_stride = physical_strides(case["order"], case["shape"], case["num_layers"], ITEMSIZE)
    assert list(strides) == case["strides_bytes"]
    assert layer_stride == case["layer_stride_bytes"]


@pytest.mark.parametrize("case", CASES["from_shape"], ids=lambda case: case["name"])
def test_from_shape(case: dict[str, Any]) -> None:
    builder, arguments = case["same_as"]
    assert from_shape(case["shape"], None, Spec(**case["spec"])) == getattr(layouts, builder)(**arguments)


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: case["name"])
def test_ambiguous_or_wrong_shapes_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(LayoutError) as error:
        from_shape(case["shape"], None, Spec(**case["spec"]))
    for word in case["names"]:
        assert word in str(error.value)


def test_from_shape_takes_the_tensors_strides() -> None:
    """A logical [2, B, N, H, D] over memory that is [B, 2, H, N, D], as vLLM permutes it."""
    tensor = numbered(B, 2, H, N, D).transpose(1, 0, 3, 2, 4)
    strides = [stride // tensor.itemsize * ITEMSIZE for stride in tensor.strides]
    fields = from_shape(tensor.shape, strides, Spec(N, H, D, ITEMSIZE, B))
    for field, plane in zip(fields, tensor, strict=True):
        np.testing.assert_array_equal(table(field), plane)


DENSE = (160, 80, 20, 2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: fused((3, 2, 4, 12), (192, 96, 24, 2), 5, 5, 2), "content of 12 elements, but head_size 5"),
        (lambda: fused((3, 2, 4), DENSE, 5, 5, 2), "3 entries"),
        (lambda: cpu_tiles((3, 2, 4, 10), (160, 20, 40, 2), 5, 2), r"tile strides \(40, 2\)"),
        (lambda: cpu_tiles((3, 2, 4, 10), DENSE, 4, 2), "twice head_size 4 is 8"),
        (lambda: opaque_tiles((3, 2, 4, 10), (160, 20, 40, 2), "x"), "contiguous tile"),
        (lambda: opaque_tiles((3, 2, 4, 10), DENSE, ""), "tag"),
        (lambda: with_kernel_blocks(key_only(3, 2), 3, 8), "kernel_block_size 3 does not divide block_size 8"),
        (lambda: with_kernel_blocks(key_only(8, 2), 8, 4), "kernel_block_size 8 does not divide block_size 4"),
        (lambda: physical_strides("NHD", (1, 1, 1, 1), 1, 2), "'NHD' is none of LBHNC"),
    ],
)
def test_errors_name_both_values(build: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        build()
