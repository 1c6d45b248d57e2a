"""Checks that every transport makes before it posts: what cannot be right is refused before a byte moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.layout import Region
from kvferry.transport.base import BadTransfer, Batch, Offsets

_FIELDS = ("local_offsets", "remote_offsets", "lengths")


def check_batches(batches: Sequence[Batch], local: Sequence[Region], remote: Sequence[Region]) -> list[Batch]:
    """The batches as contiguous int64 arrays, without descriptors of no bytes and without empty batches.

    Order is kept and nothing is merged. Raises BadTransfer that names the batch, the first bad index and the values.
    """
    checked = [_check_batch(i, batch, local, remote) for i, batch in enumerate(batches)]
    return [batch for batch in checked if len(batch.lengths)]


def _check_batch(index: int, batch: Batch, local: Sequence[Region], remote: Sequence[Region]) -> Batch:
    where = f"batch {index}"
    local_region = _region(where, "local_region", batch.local_region, local)
    remote_region = _region(where, "remote_region", batch.remote_region, remote)
    arrays = [_int64(where, name, getattr(batch, name)) for name in _FIELDS]
    sizes = [len(array) for array in arrays]
    if len(set(sizes)) != 1:
        raise BadTransfer(f"{where}: lists of unequal length: {dict(zip(_FIELDS, sizes, strict=True))}")
    local_offsets, remote_offsets, lengths = arrays
    _refuse_first(where, "lengths", lengths, lengths < 0, "is negative")
    _inside(where, "local_offsets", local_offsets, lengths, local_region)
    _inside(where, "remote_offsets", remote_offsets, lengths, remote_region)
    some = lengths > 0
    if not some.all():
        local_offsets, remote_offsets, lengths = local_offsets[some], remote_offsets[some], lengths[some]
    return Batch(batch.local_region, batch.remote_region, local_offsets, remote_offsets, lengths)


def _region(where: str, name: str, index: int, regions: Sequence[Region]) -> Region:
    if not 0 <= index < len(regions):
        raise BadTransfer(f"{where}: {name} {index} is none of the {len(regions)} registered")
    return regions[index]


def _int64(where: str, name: str, values: Offsets) -> Offsets:
    array = np.asarray(values)
    # An empty list has no integer dtype of its own.
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadTransfer(f"{where}: {name} must be a list of integers, got shape {array.shape} of {array.dtype}")
    # A uint64 above the range of int64 turns negative here, and is refused for that.
    return np.ascontiguousarray(array, dtype=np.int64)


def _inside(where: str, name: str, offsets: Offsets, lengths: Offsets, region: Region) -> None:
    _refuse_first(where, name, offsets, offsets < 0, "is negative")
    # Not offset + length > size, which could overflow.
    outside = offsets > region.length_bytes - lengths
    if outside.any():
        at = int(np.argmax(outside))
        raise BadTransfer(
            f"{where}: {name}[{at}] = {offsets[at]} with length {lengths[at]} "
            f"ends outside its region of {region.length_bytes} bytes"
        )


def _refuse_first(where: str, name: str, values: Offsets, bad: npt.NDArray[np.bool_], what: str) -> None:
    if bad.any():
        at = int(np.argmax(bad))
        raise BadTransfer(f"{where}: {name}[{at}] = {values[at]} {what}")
