"""Activation checkpoints of every kind: the gradients of a step without, and every frame free again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Pool, raised, virtual
from rounds import Inputs, draw_inputs
from routings import Case, named_case
from test_recompute import NUM_LAYERS, experts_of, open_arena, run_layer
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epbuf
from epbuf.errors import LeaseError
from epbuf.ops import COMBINE, DISPATCH, ROUTE

Layer = Callable[..., Tensor]


def saving(*ops: Any) -> Layer:
    """Checkpoint a layer and save what these ops return."""
    contexts = partial(create_selective_checkpoint_contexts, list(ops))
    return partial(checkpoint, run_layer, use_reentrant=False, context_fn=contexts)


MODES: dict[str, Layer] = {
    "without": run_layer,
    "reentrant": partial(checkpoint, run_layer, use_reentrant=True),
    "non_reentrant": partial(checkpoint, run_layer, use_reentrant=False),
    "selective": saving(ROUTE),
    "experts_only": saving(ROUTE, DISPATCH, COMBINE),
}
CLAIMS = {"without": 2, "reentrant": 4, "non_reentrant": 4, "selective": 2, "experts_only": 2}
"""Claims that a layer makes in a step: a lease and a ticket for each time that it is routed."""


def steps(
    rank: int, group: Any, case: Case, mode: str, num_steps: int = 100, policy: str = "keep", device: str = "cpu",
    window: str = "auto",
) -> list[list[Tensor]]:  # fmt: skip
    """Run steps of three layers on three frames; return what each of them gave, with nothing left behind."""
    inputs, layer = draw_inputs(case, rank, True, device), MODES[mode]
    results = []
    with open_arena(case, group, policy, NUM_LAYERS, device=device, window=window) as arena:
        experts = [experts_of(arena, index) for index in range(NUM_LAYERS)]
        gc.collect()
        gc.disable()
        try:
            for number in range(num_steps):
                results.append(_step(arena, layer, _shifted(inputs, number, case), experts))
        finally:
            gc.enable()
        assert list(arena.book.claims()) == []
        assert arena.book.newest_serial() == CLAIMS[mode] * NUM_LAYERS * num_steps
    return results


def _shifted(inputs: Inputs, number: int, case: Case) -> tuple[Tensor, Tensor, Inputs]:
    """Return tokens, weights and the rest of a step whose routing and values are not those of the last one."""
    ids = torch.where(inputs.topk_idx < 0, -1, (inputs.topk_idx + number) % case.config.num_experts)
    values = {**vars(inputs), "topk_idx": ids}
    return inputs.x + number % 3, inputs.topk_weights + number % 2, Inputs(**values)


def _step(
    arena: epbuf.Arena, layer: Layer, batch: tuple[Tensor, Tensor, Inputs], experts: list[Tensor]
) -> list[Tensor]:
    x, weights, inputs = batch[0].requires_grad_(), batch[1].requires_grad_(), batch[2]
    y = x
    for each in experts:
        y = layer(arena, y, inputs, weights, each)
    leaves = [x, weights, *experts]
    for leaf in leaves:
        leaf.grad = None
    y.backward(inputs.dy)
    return [part.detach().clone().cpu() for part in (y, *(leaf.grad for leaf in leaves)) if part is not None]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "without"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hundred_steps_on_a_frame_per_layer(num_ranks: int, mode: str) -> None:
    """Every result of every step equals to the bit that of a step without checkpoints, and no claim is left."""
    case = named_case("some_negative", num_ranks, 16, "fp32")
    without = virtual(num_ranks, steps, case, "without")
    for got, want in zip(virtual(num_ranks, steps, case, mode), without, strict=True):
        for number, (mine, plain) in enumerate(zip(got, want, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True)), f"step {number}"
