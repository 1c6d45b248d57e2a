"""Which ranks have released (or written): a set, never a count."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class ReleaseSet:
    """The ranks of `expected` that have released. Idempotent: a rank counts once, and only for itself."""

    def __init__(self, expected: Collection[int]) -> None:
        """expected: distinct ranks; `range(n)` costs nothing, however large. Raises ValueError if empty."""
        if not expected:
            raise ValueError("expected is empty: nobody could ever release")
        self._expected = expected
        self._released: set[int] = set()

    def add(self, ranks: Iterable[int] | None) -> bool:
        """Whether this release is news. None: every rank. Raises ValueError, and adds none, for a rank not expected."""
        given = set(self._expected if ranks is None else ranks)
        strange = sorted(rank for rank in given if rank not in self._expected)
        if strange:
            raise ValueError(f"ranks {strange} are not among the {len(self._expected)} expected")
        news = not given <= self._released
        self._released |= given
        return news

    def __contains__(self, rank: int) -> bool:
        return rank in self._released

    @property
    def is_complete(self) -> bool:
        return len(self._released) == len(self._expected)
