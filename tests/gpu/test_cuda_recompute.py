"""recv_policy "recompute" and "stash" on CUDA, in eager steps and replays: the gradients of rows that were kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import GpuPool, places
from routings import named_case
from test_recompute import each_policy, eager_and_replayed, gradients

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@places((1, "local"), (2, "torch_symm"), (4, "torch_symm"))
@pytest.mark.parametrize("routing", ["some_negative", "one_row_over", "num_tokens_int64"])
@each_policy
@pytest.mark.usefixtures("form")
def test_gradients_equal_those_of_kept_rows(
    pool: GpuPool, policy: Any, num_ranks: int, window: str, routing: str
) -> None:  # fmt: skip
    """Three layers over one workspace, two steps: y and every gradient, to the bit, since sums are of whole numbers."""
    case = named_case(routing, num_ranks, 16, "fp32")
    kept = pool.run(num_ranks, gradients, case, "keep", 2, "cuda", window)
    for got, want in zip(pool.run(num_ranks, gradients, case, policy, 2, "cuda", window), kept, strict=True):
        assert any(part.abs().sum() > 0 for part in want)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@places((1, "local"), (2, "torch_symm"))
@each_policy
@pytest.mark.usefixtures("form")
def test_replays_equal_eager_steps(pool: GpuPool, policy: Any, num_ranks: int, window: str) -> None:
    """Of rows that come back, and of rows that are kept; sums are of whole numbers."""
    case = named_case("balanced", num_ranks, 16, "fp32")
    kept = pool.run(num_ranks, eager_and_replayed, case, "keep", "cuda", window)
    for rounds, want in zip(pool.run(num_ranks, eager_and_replayed, case, policy, "cuda", window), kept, strict=True):
        for (eager, replayed), (wanted, _) in zip(rounds, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(replayed, wanted, strict=True))
