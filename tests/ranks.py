"""Ranks of the tests: `epbuf.testing.ranks`, and what only epbuf's own tests need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epbuf.testing.ranks import LIMIT_S, Pool, Ranks, RanksFailed, Result, virtual

__all__ = ["LIMIT_S", "Pool", "Ranks", "RanksFailed", "Result", "raised", "size_of", "virtual"]


def size_of(group: Any) -> int:
    """Return the number of ranks of anything that `Arena.open` takes as a group."""
    if group is None:
        return 1
    return int(group.size() if callable(group.size) else group.size)


def raised(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], object]) -> str:
    """Return the message of the error that a call raises; fail when it raises none of that kind.

    Keeps neither the error nor its traceback: they would keep the caller's leases and tickets alive.
    """
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind} was raised")
