"""torch.compile on CUDA: what mode="reduce-overhead" captures, and what it must not."""

from __future__ import annotations

import pytest
import test_compile as programs
from gpus import GpuPool, places

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@places((2, "torch_symm"))
def test_reduce_overhead_is_right(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Inductor captures what lies between our ops, or skips graphs and says so; none holds the window."""
    found = pool.run(num_ranks, programs.reduced_overhead, "cuda", window, limit_s=programs.COMPILE_LIMIT_S)
    programs.assert_reduced(found)
    for reduced in found:
        assert reduced.num_captured > 0 or reduced.num_skipped > 0, reduced
