"""Whole MoE layers of Megatron-Core over epbuf's windows equal those over its own alltoall dispatcher."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from ranks import Pool

from epbuf import reference
from epbuf.config import EpConfig

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
        {**in_flight, "options": {**TWO_STAGES, **RECOMPUTE}},
    )  # fmt: skip
    assert [report["num_frames"] for report in reports] == [2, 4, 1, 1]


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


def test_quantised_rows_stay_close_to_alltoall(pool: Pool) -> None:
    """Main's formats: rows and their gradients travel in 8 bits, experts get decoded rows, frames keep none of them."""
    formats = {"moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8"}
    wide = {"hidden_size": 32, "ffn_hidden_size": 64}
    (report,) = check(pool, 2, {"flags": formats, "options": wide}, atol=0.1)
    assert report["bytes_by_class"]["frame"] < report["capacity_rows"] * 32


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


def sums_of_rows(rank: int, group: Any, num_topk: int) -> dict[str, Any]:
    """Record the rows that each sum takes, and what came out: in combine, and in dispatch's backward."""
    from programs import Case, draw_batches, epbuf_model, stand_ins

    case = Case(options={"moe_router_topk": num_topk, "num_layers": 1}, plan={"num_moe_layers": 1})
    found: dict[str, Any] = {}
    with stand_ins(), epbuf_model(group, case) as (model, installation):
        manager = model.layers[0].token_dispatcher._comm_manager
        dispatch, combine = manager.dispatch, manager.combine

        def recorded_dispatch(hidden_states: Any, *flags: Any) -> Any:
            sent = hidden_states.view_as(hidden_states)
            sent.register_hook(lambda grad: found.update(dx=grad.clone()))
            rows = dispatch(sent, *flags)
            rows.register_hook(lambda grad: found.update(grad_rows=grad.clone()))
            found["topk_idx"] = manager.token_indices.clone()
            return rows

        def recorded_combine(rows: Any, *flags: Any) -> Any:
            y = combine(rows, *flags)
            found.update(rows=rows.detach().clone(), y=y.detach().clone())
            return y

        manager.dispatch, manager.combine = recorded_dispatch, recorded_combine
        x, target = draw_batches(rank, 16, 1)[0]
        (model(x) * target).sum().backward()
        return {**found, "plan": installation.arena.plan.to_json(), "capacity": installation.arena.capacity_rows}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_over_eight_experts_are_within_two_ulp(pool: Pool, num_ranks: int) -> None:
    """Each is compared with the float64 sum of the same rows, which the reference finds.

    One ulp is 2**-23 of the sum of magnitudes. In spacings of floats at that sum, up to twice as fine, the largest
    distance is 2.1: eight float32 numbers that are added one after the other may be 3.5 spacings off.
    """
    found = pool.run(num_ranks, sums_of_rows, 8)
    content = json.loads(found[0]["plan"])["config"]
    config = EpConfig(**{k: content[k] for k in ("num_ranks", "num_experts", "num_topk", "hidden",
                                                 "max_tokens_per_rank", "token_dtype")})  # fmt: skip
    assert config.num_topk == 8
    routing = reference.route(config, found[0]["capacity"], [each["topk_idx"] for each in found])
    largest = 0.0
    for rank, each in enumerate(found):
        assert (each["topk_idx"].diff(dim=1) > 0).all(), "experts stand in ascending order"
        for rows_of, result in (("rows", "y"), ("grad_rows", "dx")):
            terms = torch.stack([
                found[int(dest)][rows_of][int(row)].double()
                for dest, row in zip(reference.slot_ranks(routing.slot_map[rank]).flatten(),
                                     reference.slot_rows(routing.slot_map[rank]).flatten(), strict=True)
            ]).view(*each["topk_idx"].shape, -1)  # fmt: skip
            ulp = terms.abs().sum(1) * 2.0**-23
            largest = max(largest, ((each[result].double() - terms.sum(1)).abs() / ulp).max().item())
    print(f"largest distance from the float64 sum: {largest:.2f} ulp")
    assert 0 < largest <= 2


def test_layers_with_eight_experts_a_token_equal_alltoall(pool: Pool) -> None:
    """Rows are added in ascending order of experts, which is the stock dispatcher's order on one thread, too."""
    check(pool, 2, {"options": {"moe_router_topk": 8}})
