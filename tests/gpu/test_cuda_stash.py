"""Stashed rows on CUDA: several pages a frame, taken and returned out of order, with scales, and too few of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import GpuPool, places
from test_stash import MIXED, bytes_read, check_too_few_pages, config_of, in_flight, too_few_pages

from epbuf.config import Payload

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@places((1, "local"), (2, "torch_symm"))
@pytest.mark.parametrize(("policy", "stash_rows"), [("stash", 9 * 640), (MIXED, 3 * 768)], ids=["all-stashed", "mixed"])
@pytest.mark.usefixtures("form")
def test_micro_batches_in_flight(
    pool: GpuPool, policy: Any, stash_rows: int, num_ranks: int, window: str
) -> None:  # fmt: skip
    """1F1B with nine open dispatches, to the bit."""
    config = config_of(num_ranks, recv_capacity_per_rank=1200)
    kept = pool.run(num_ranks, in_flight, config, "keep", None, "cuda", window)
    got = pool.run(num_ranks, in_flight, config, policy, stash_rows, "cuda", window)
    for mine, want in zip(got, kept, strict=True):
        assert all(part.abs().sum() > 0 for part in want)
        assert all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))


@places((1, "local"), (2, "torch_symm"))
@pytest.mark.parametrize(
    "payload", ["mxfp8", "nvfp4", Payload.nvfp4(scale_layout="blocked")], ids=["mxfp8", "nvfp4", "nvfp4-blocked"]
)
@pytest.mark.usefixtures("form")
def test_quantised_rows_come_back_with_their_scales(
    pool: GpuPool, payload: Any, num_ranks: int, window: str
) -> None:  # fmt: skip
    config = config_of(num_ranks, hidden=128, dispatch_payload=payload, expert_alignment=128)
    kept = pool.run(num_ranks, bytes_read, config, "keep", "cuda", window)
    for got, want in zip(pool.run(num_ranks, bytes_read, config, "stash", "cuda", window), kept, strict=True):
        assert want[0] != want[1] and min(want) > 0
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@places((2, "torch_symm"))
def test_too_few_pages_are_flagged_on_all_ranks(pool: GpuPool, num_ranks: int, window: str) -> None:
    config = config_of(num_ranks)
    check_too_few_pages(
        lambda policy, limit: pool.run(num_ranks, too_few_pages, config, policy, limit, "cuda", window), config
    )
