"""Whole MoE layers of Megatron-Core over epbuf's windows equal those over its own alltoall dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Pool

RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
TWO_STAGES = {"pipeline_model_parallel_size": 2, "pipeline_dtype": "torch.float32"}


def on_ranks(rank: int, group: Any, cases: list[dict[str, Any]]) -> list[tuple[float, float, dict[str, Any]]]:
    from programs import Case, compare

    return [compare(rank, group, Case(**case)) for case in cases]


def check(pool: Pool, num_ranks: int, *cases: dict[str, Any], atol: float = 0.0) -> list[dict[str, Any]]:
    """Compare cases on all ranks; return the reports of rank 0."""
    by_rank = pool.run(num_ranks, on_ranks, list(cases))
    for found in by_rank:
        for case, (difference, largest, report) in zip(cases, found, strict=True):
            assert largest > 1, f"{case}: nothing was computed"
            assert difference <= atol * largest, f"{case}: {difference:g} of {largest:g}"
            assert report["num_frames_high_water"] == report["num_frames"], case
            assert report["claims"] == [], case
    return [report for _, _, report in by_rank[0]]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_layers_equal_alltoall_to_the_bit(pool: Pool, num_ranks: int) -> None:
    """K = 2, float32: forward, backward, two microbatches in flight, recompute."""
    in_flight = {"program": "two in flight", "plan": {"num_moe_layers": 2}, "options": TWO_STAGES}
    reports = check(
        pool, num_ranks, {"program": "one"}, in_flight, {"program": "one", "options": RECOMPUTE},
    )  # fmt: skip
    assert [report["num_frames"] for report in reports] == [2, 4, 1]
