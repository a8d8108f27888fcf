"""recv_policy="recompute" on CUDA, in eager steps and replays: the gradients of rows that were kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import GpuPool, places
from rounds import draw_inputs
from routings import Case, named_case
from test_recompute import NUM_LAYERS, experts_of, gradients, open_arena, run_layer
from torch import Tensor

import epbuf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@places((1, "local"), (2, "torch_symm"), (4, "torch_symm"))
@pytest.mark.parametrize("routing", ["some_negative", "one_row_over", "num_tokens_int64"])
def test_gradients_equal_those_of_kept_rows(pool: GpuPool, num_ranks: int, window: str, routing: str) -> None:
    """Three layers over one workspace, two steps: y and every gradient, to the bit, since sums are of whole numbers."""
    case = named_case(routing, num_ranks, 16, "fp32")
    kept = pool.run(num_ranks, gradients, case, "keep", 2, "cuda", window)
    for got, want in zip(pool.run(num_ranks, gradients, case, "recompute", 2, "cuda", window), kept, strict=True):
        assert any(part.abs().sum() > 0 for part in want)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _captured(rank: int, group: Any, window: str, case: Case) -> list[tuple[list[Tensor], list[Tensor]]]:
    inputs = draw_inputs(case, rank, True, "cuda")

    def step(x: Tensor, weights: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = x
        for layer in range(NUM_LAYERS):
            y = run_layer(arena, y, inputs, weights, experts[layer])
        return [y.detach(), *torch.autograd.grad(y, [x, *experts], inputs.dy)]

    with open_arena(case, group, "recompute", device="cuda", window=window) as arena:
        experts = [experts_of(arena, layer) for layer in range(NUM_LAYERS)]
        batches = [(inputs.x * (1 + number), inputs.topk_weights + number) for number in range(3)]
        eager = [[part.cpu() for part in step(*batch)] for batch in batches]
        captured = epbuf.CapturedStep.capture(arena, step, batches[2])
        replayed = [[part.cpu() for part in captured(*batch)] for batch in batches]
        captured.close()
    return list(zip(eager, replayed, strict=True))


@places((1, "local"), (2, "torch_symm"))
def test_replays_equal_eager_steps(pool: GpuPool, num_ranks: int, window: str) -> None:
    for rounds in pool.run(num_ranks, _captured, window, named_case("balanced", num_ranks, 16, "fp32")):
        for eager, replayed in rounds:
            assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
