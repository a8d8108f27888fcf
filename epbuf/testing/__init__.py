"""What a user needs to test captured steps of their own.

    from epbuf.testing import assert_capture_safe

    def test_step(arena):
        assert_capture_safe(step, x, ids, vary=lambda x, ids: (torch.randn_like(x), ids.roll(1)), arenas=arena)

Names load on first use: pytest imports this package at its start, for the fixtures of `epbuf.testing.plugin`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epbuf.testing.memory import CanaryRows, Skew, canary_rows, poison, skew
    from epbuf.testing.ranks import Pool, Ranks, RanksFailed, virtual
    from epbuf.testing.safety import UnsafeStepError, assert_capture_safe
    from epbuf.testing.tail import assert_tail_unread

_HOMES = {
    "memory": ("CanaryRows", "Skew", "canary_rows", "poison", "skew"),
    "ranks": ("Pool", "Ranks", "RanksFailed", "virtual"),
    "safety": ("UnsafeStepError", "assert_capture_safe"),
    "tail": ("assert_tail_unread",),
}

__all__ = [
    "CanaryRows",
    "Pool",
    "Ranks",
    "RanksFailed",
    "Skew",
    "UnsafeStepError",
    "assert_capture_safe",
    "assert_tail_unread",
    "canary_rows",
    "poison",
    "skew",
    "virtual",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module, once."""
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = found = getattr(importlib.import_module(f"epbuf.testing.{home}"), name)
            return found
    raise AttributeError(f"module 'epbuf.testing' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
