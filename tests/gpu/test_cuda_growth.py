"""Overflow and growth on CUDA: what tests/test_growth.py runs on CPU.

Sums over more rows may be added in another order, so values are close and not equal to the bit.
"""

from __future__ import annotations

import pytest
import test_growth as programs
import torch
from gpus import GpuPool, places
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

FEW = places((1, "local"), (2, "torch_symm"))


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda text, n=number: f"value {n}: {text}")


@FEW
def test_overflow_is_flagged_skipped_rerun_grown_and_recaptured(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Layer 2 of one step overflows under a living graph; all losses are those of the capacity from the start."""
    wide = pool.run(num_ranks, programs.trained, False, "cuda", window)
    for found, want in zip(pool.run(num_ranks, programs.trained, True, "cuda", window), wide, strict=True):
        assert want["reruns"] == [] and want["generation"] == 0
        assert found["reruns"] == [programs.HARD] and found["skipped"] == [True]
        first, second = found["peaks"]
        assert first <= programs.tight_rows(num_ranks) < second
        assert found["capacity"] == second and (found["generation"], found["kept"]) == (1, [1])
        assert "test_growth.py" in found["stale"]
        assert_close(found["losses"] + found["state"], want["losses"] + want["state"])


@FEW
def test_validation_overflow_does_not_disturb_the_training_graph(pool: GpuPool, num_ranks: int, window: str) -> None:
    calm = pool.run(num_ranks, programs.validated, False, "cuda", window)
    for found, want in zip(pool.run(num_ranks, programs.validated, True, "cuda", window), calm, strict=True):
        assert want["called"] == [] and found["called"] == ["check"] * 4
        assert_close(found["losses"] + found["state"], want["losses"] + want["state"])
