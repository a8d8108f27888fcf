"""The engines that an arena can be opened with, by their words."""

from __future__ import annotations

import torch

from epbuf.engine import Engine, NativeEngine, check_raw_grad
from epbuf.engines.external import ExternalEngine
from epbuf.errors import ConfigError
from epbuf.plan import Plan
from epbuf.windows import Window

ENGINES = ("native", "external")


def check_engine(word: object) -> None:
    """Refuse a word that names no engine.

    Raises:
        ConfigError: it does not.
    """
    if word not in ENGINES:
        raise ConfigError(f"engine={word!r} does not exist; found engines: {', '.join(map(repr, ENGINES))}")


def open_engine(word: str, plan: Plan, rank: int, window: Window, device: torch.device) -> Engine:
    """Make the engine that a word names.

    Raises:
        ConfigError: an unknown word, or raw gradients that no gradient row holds.
    """
    check_engine(word)
    if word == "external":
        return ExternalEngine(plan, window, device)
    check_raw_grad(plan)
    return NativeEngine(plan, rank, window, device)
