"""Capture-safe expert-parallel buffers, dispatch and combine for Mixture-of-Experts training.

Names load on first use, so that `import epbuf` and planning need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from epbuf import errors

if TYPE_CHECKING:
    from epbuf.arena import Arena
    from epbuf.autograd import Received, combine, dispatch, unpack
    from epbuf.capture import CapturedStep
    from epbuf.config import EpConfig, Payload
    from epbuf.lease import Lease
    from epbuf.plan import Plan
    from epbuf.schedule import Schedule

__all__ = [
    "Arena",
    "CapturedStep",
    "EpConfig",
    "Lease",
    "Payload",
    "Plan",
    "Received",
    "Schedule",
    "combine",
    "dispatch",
    "errors",
    "unpack",
]

_HOMES = {
    "Arena": "epbuf.arena",
    "CapturedStep": "epbuf.capture",
    "EpConfig": "epbuf.config",
    "Lease": "epbuf.lease",
    "Payload": "epbuf.config",
    "Plan": "epbuf.plan",
    "Received": "epbuf.autograd",
    "Schedule": "epbuf.schedule",
    "combine": "epbuf.autograd",
    "dispatch": "epbuf.autograd",
    "unpack": "epbuf.autograd",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module, once: the next look-up finds it here."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'epbuf' has no attribute {name!r}; it has {', '.join(__all__)}")
    found: object = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
