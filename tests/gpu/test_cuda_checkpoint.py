"""Activation checkpoints on CUDA: the programs of tests/test_checkpoint.py. Sums are of whole numbers, hence exact."""

from __future__ import annotations

import pytest
import test_checkpoint as programs
from gpus import GpuPool, places
from routings import named_case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

FEW = places((1, "local"), (2, "torch_symm"))


@FEW
@pytest.mark.parametrize("mode", [mode for mode in programs.MODES if mode != "without"])
def test_hundred_steps_on_a_frame_per_layer(pool: GpuPool, num_ranks: int, window: str, mode: str) -> None:
    case = named_case("some_negative", num_ranks, 16, "fp32")
    plain = pool.run(num_ranks, programs.steps, case, "without", 100, "keep", "cuda", window)
    found = pool.run(num_ranks, programs.steps, case, mode, 100, "keep", "cuda", window)
    for got, want in zip(found, plain, strict=True):
        programs.assert_equal_steps(got, want)


@FEW
@pytest.mark.parametrize("policy", ["recompute", "stash"])
def test_rows_that_are_not_kept_come_back(pool: GpuPool, num_ranks: int, window: str, policy: str) -> None:
    case = named_case("some_negative", num_ranks, 16, "fp32")
    plain = pool.run(num_ranks, programs.steps, case, "without", 3, "keep", "cuda", window)
    found = pool.run(num_ranks, programs.steps, case, "selective", 3, policy, "cuda", window)
    for got, want in zip(found, plain, strict=True):
        programs.assert_equal_steps(got, want)


@FEW
@pytest.mark.parametrize("mode", ["non_reentrant", "selective", "experts_only"])
def test_captured_checkpoints(pool: GpuPool, num_ranks: int, window: str, mode: str) -> None:
    case = named_case("some_negative", num_ranks, 16, "fp32")
    plain = pool.run(num_ranks, programs.steps, case, "without", 5, "keep", "cuda", window)
    found = pool.run(num_ranks, programs.captured_steps, case, mode, "cuda", window)
    for got, want in zip(found, plain, strict=True):
        programs.assert_equal_steps(got, want)


@FEW
def test_hundred_compiled_steps_on_a_frame_per_layer(pool: GpuPool, num_ranks: int, window: str) -> None:
    case = programs.patient(num_ranks)
    plain = pool.run(num_ranks, programs.steps, case, "without", 100, "keep", "cuda", window)
    found = pool.run(
        num_ranks, programs.compiled_steps, case, 100, "cuda", window, limit_s=programs.COMPILE_LIMIT_S
    )  # fmt: skip
    for got, want in zip(found, plain, strict=True):
        programs.assert_equal_steps(got, want)
