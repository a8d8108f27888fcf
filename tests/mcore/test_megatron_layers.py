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
            assert largest > 1 or case.get("lengths") == (0,), f"{case}: nothing was computed"
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


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shapes_and_counts_equal_alltoall_to_the_bit(pool: Pool, num_ranks: int) -> None:
    """Uneven token counts, ranks without a token, one layer three times, validation between training steps."""
    reports = check(
        pool, num_ranks,
        {"lengths": (16, 5)},
        {"lengths": (0, 7), "plain_gate": True},
        {"lengths": (0,), "plain_gate": True},
        {"program": "repeat", "plan": {"num_moe_layers": 3}},
        {"program": "validation"},
    )  # fmt: skip
    assert [report["num_frames"] for report in reports] == [2, 2, 2, 3, 2]


@pytest.mark.parametrize("route", ["rebind", "spec", "replace"])
def test_route_equals_alltoall_to_the_bit(pool: Pool, route: str) -> None:
    """Each with a shared expert, which the routed experts' output is added to."""
    shared = {"moe_shared_expert_intermediate_size": 48}
    check(pool, 2, {"route": route}, {"route": route, "options": shared})


def test_shared_expert_beside_dispatch(pool: Pool) -> None:
    """With overlap the dispatcher itself runs the shared expert, between its own calls."""
    overlap = {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True}
    check(pool, 2, {"options": overlap}, {"options": overlap, "route": "replace"})


@pytest.mark.parametrize("alignment", [16, 32, 128, 256])
def test_padded_zones_equal_alltoall(pool: Pool, alignment: int) -> None:
    """Padding rows are zero and weigh nothing; a GEMM over more rows may add up weight gradients in another order."""
    (report,) = check(pool, 2, {"plan": {"expert_alignment": alignment}}, atol=1e-6)
    assert report["capacity_rows"] % alignment == 0


def test_tensor_parallel_experts(pool: Pool) -> None:
    """2 x 2 ranks: every tensor-parallel rank of an expert gets its tokens; top-k folds to 4, and to 64."""
    wide = {"num_moe_experts": 64, "moe_router_topk": 32}
    check(pool, 4, {"num_tensor": 2}, {"num_tensor": 2, "options": wide}, atol=1e-6)


def test_router_that_drops_tokens(pool: Pool) -> None:
    """moe_expert_capacity_factor leaves tokens with fewer experts than top-k, some with none."""
    check(pool, 2, {"options": {"moe_expert_capacity_factor": 0.5}})
