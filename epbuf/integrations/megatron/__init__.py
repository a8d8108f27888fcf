"""epbuf under Megatron-Core: persistent windows for its expert-parallel token dispatcher, without a fork.

    from epbuf.integrations import megatron

    megatron.install(dict(seq_length=4096, micro_batch_size=1, num_microbatches=8))  # before the model is built

Names load on first use, so that planning needs neither Megatron-Core nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epbuf.integrations.megatron.dispatcher import EpbufManager
    from epbuf.integrations.megatron.installation import Installation, install, prepare, replace_dispatchers
    from epbuf.integrations.megatron.planning import MegatronPlan, plan_from_config
    from epbuf.integrations.megatron.sizes import carve, window_nbytes

__all__ = [
    "EpbufManager",
    "Installation",
    "MegatronPlan",
    "carve",
    "install",
    "plan_from_config",
    "prepare",
    "replace_dispatchers",
    "window_nbytes",
]

_HOMES = {
    "EpbufManager": "dispatcher",
    "Installation": "installation",
    "MegatronPlan": "planning",
    "carve": "sizes",
    "install": "installation",
    "plan_from_config": "planning",
    "prepare": "installation",
    "replace_dispatchers": "installation",
    "window_nbytes": "sizes",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module, once."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    found: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
