"""Layers whose experts read counts on the device, captured. Imported by ranks only, since it imports Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron_layers import FLEX, GroupedExperts, Layers, dtype_options, groups_of, layer_spec, make_config
from programs import Case
from torch import Tensor

import epbuf
from epbuf.integrations import megatron
from epbuf.integrations.megatron import Installation

STATIC = {"moe_ncclep_static_shape": True}


@contextmanager
def grouped_model(
    group: Any, options: dict[str, Any], *, length: int, plan: dict[str, Any] | None = None,
    experts: Any = GroupedExperts, device: str = "cpu", window: str = "auto",
) -> Iterator[tuple[Layers, Installation]]:  # fmt: skip
    """Build two layers of grouped experts over epbuf, in bfloat16 on CUDA; close and undo behind them."""
    groups = groups_of(group)
    recipe = Case(lengths=(length,), plan={"expert_alignment": 16, **(plan or {})}).recipe(1)
    with megatron.install(recipe, device=device, window=window) as made:
        config = make_config(groups, **{**FLEX, **dtype_options(device), **options})
        yield Layers(config, groups, layer_spec(experts)).to(device), made


def training_step(model: Layers) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Return a step, forward and backward: the output, and the gradients of the input and of all weights."""
    weights = list(model.parameters())

    def step(x: Tensor, target: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = model(x)
        gradients = torch.autograd.grad((y * target).sum(), [x, *weights])
        return [y.detach(), *gradients]

    return step


def captured_training(
    model: Layers, installation: Installation, batch: tuple[Tensor, Tensor]
) -> epbuf.CapturedStep:  # fmt: skip
    """Open the arena by hand and capture a training step of a batch of that length."""
    megatron.prepare(model)
    assert installation.arena is not None
    inputs = tuple(part.detach() for part in batch)
    return epbuf.CapturedStep.capture(installation.arena, training_step(model), inputs)
