"""The engines that an arena can be opened with, by their words."""

from __future__ import annotations

import torch

from epbuf.engine import Engine, NativeEngine, check_raw_grad
from epbuf.engines.external import ExternalEngine
from epbuf.engines.nccl_ep import NcclEpEngine
from epbuf.engines.nccl_ep_library import missing
from epbuf.errors import ConfigError
from epbuf.plan import Plan
from epbuf.windows import Window
from epbuf.windows.group import Group

ENGINES = ("native", "nccl_ep", "external")


def check_engine(word: object) -> None:
    """Refuse a word that names no engine.

    Raises:
        ConfigError: it does not.
    """
    if word not in ENGINES:
        known = ", ".join(f'"{engine}"' for engine in ENGINES)
        raise ConfigError(f'engine="{word}" does not exist; found engines: {known}')


def check_fit(word: str, plan: Plan, device: torch.device) -> None:
    """Refuse an engine that a plan was not built for, a device that it does not know, or that is not installed.

    Raises:
        ConfigError: one of these.
    """
    if word == "native" and plan.engine != "native":
        raise ConfigError(
            f'Arena.open(engine="native") with a plan for {plan.engine!r}: pass engine="{plan.engine}", or build the '
            "plan without engine="
        )
    if word == "external" and plan.recv_policy != "keep":
        raise ConfigError(
            f'engine="external" with recv_policy={plan.recv_policy!r}: rows come back in combine\'s backward, which is '
            'not ours there; build the plan with recv_policy="keep"'
        )
    if word != "nccl_ep":
        return
    if plan.engine != "nccl_ep":
        raise ConfigError(
            f'Arena.open(engine="nccl_ep") with a plan for {plan.engine!r}, which has no room for its handles: build '
            'it with Plan.build(config, schedule, engine="nccl_ep")'
        )
    trouble = missing()
    if trouble:
        raise ConfigError(trouble)
    if device.type != "cuda":
        raise ConfigError(
            f'engine="nccl_ep" moves rows on CUDA, and the arena would lie on {device}; pass device="cuda"'
        )


def open_engine(word: str, plan: Plan, group: Group, window: Window, device: torch.device) -> Engine:
    """Make the engine that a word names. Collective.

    Raises:
        ConfigError: an unknown word, or raw gradients that no gradient row holds.
    """
    check_engine(word)
    if word == "external":
        return ExternalEngine(plan, window, device)
    if word == "nccl_ep":
        return NcclEpEngine(plan, group, window, device)
    check_raw_grad(plan)
    return NativeEngine(plan, group.rank, window, device)
