"""Bytes of one round against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from routings import Case, named_case, random_case

from epbuf import EpConfig, Payload, Plan, reference
from epbuf.accounting import kept_rows, padding_rows, traffic
from epbuf.errors import ConfigError


def plan_of(**fields: object) -> Plan:
    base: dict[str, object] = {"num_ranks": 2, "num_experts": 4, "num_topk": 2, "hidden": 64, "max_tokens_per_rank": 4}
    return Plan.build(EpConfig(**base | fields))


COUNTS = [[3, 0, 1, 0], [1, 0, 2, 3]]  # rank 0 sends 3 tokens' rows of 2, rank 1 three; zones 4, 0 and 3, 3


def test_target_configuration_moves_4_23_gigabytes_each_way() -> None:
    """T*R = 32768 rows and T*R*K = 262144 rows of 14336 bytes; every expert has T*R*K/E = 1024 rows, no padding."""
    config = EpConfig(
        num_ranks=8, num_experts=256, num_topk=8, hidden=7168, max_tokens_per_rank=4096, capacity_factor=1.25,
        expert_alignment=128,
    )  # fmt: skip
    moved = traffic(Plan.build(config), [[128] * 256] * 8, [4096] * 8)
    assert moved.dispatch.payload == (32768 + 262144) * 14336 == 4_227_858_432
    assert moved.combine.rows == 4_227_858_432
    assert moved.dispatch.padding == moved.dispatch.scales == 0
    assert moved.dispatch.payload / 3.64e12 == pytest.approx(1161e-6, rel=1e-3)  # the limit of the dispatch


def test_padding_is_what_completes_each_zone() -> None:
    plan = plan_of(expert_alignment=8)  # zones: rank 0 has 4 rows of 8 and none; rank 1 has 3 of 8 and 3 of 8
    assert padding_rows(plan, COUNTS) == [4, 10]
    assert kept_rows(plan, COUNTS) == [[3, 1], [1, 5]]
    moved = traffic(plan, COUNTS, [2, 3])
    assert moved.dispatch.payload == (5 + 10) * 128
    assert moved.dispatch.padding == 14 * 128
    assert moved.dispatch.weights == (5 * 2 + 10 + 14) * 4
    assert moved.dispatch.slots == moved.combine.slots == 5 * 2 * 8
    assert moved.combine.rows == (10 + 5) * 128
    assert moved.combine.weights == 0
    assert moved.staging == 2 * (10 + 14) * 128
    assert moved.stash == 2 * 2 * (10 + 14) * 128
    assert moved.route == 2 * 10 * 8 + 10 * 8 + 2 * 4 * (4 + 8) * 8
    assert moved.combine_backward == dataclasses.replace(moved.dispatch, weights=0)
    assert moved.dispatch_backward == dataclasses.replace(moved.combine, weights=(10 + 10) * 4)
    assert moved.dispatch.total == (5 + 10) * 128 + 14 * 128 + (5 * 2 + 10 + 14) * 4 + 5 * 2 * 8
    assert moved.combine.total == (10 + 5) * 128 + 5 * 2 * 8


def test_rows_past_the_capacity_are_neither_sent_nor_padded() -> None:
    plan = plan_of(expert_alignment=2, recv_capacity_per_rank=4)  # rank 1: zone of 3 ends at 4, that of 3 is dropped
    assert kept_rows(plan, COUNTS) == [[3, 1], [1, 2]]
    assert padding_rows(plan, COUNTS) == [0, 1]


@pytest.mark.parametrize(
    ("payload", "row_bytes", "scale_bytes", "read_bytes"),
    [
        (Payload.same(), 128, 0, 128),
        (Payload.mxfp8(), 64, 16, 128),  # 2 scales, padded to 16 bytes
        (Payload.nvfp4(), 32, 16 + 4, 128),  # 4 block scales, padded, and the row's own
        (Payload.raw(48, 16), 48, 16, 48),
    ],
    ids=["same", "mxfp8", "nvfp4", "raw"],
)
def test_each_payload_counts_its_rows_and_scales(
    payload: Payload, row_bytes: int, scale_bytes: int, read_bytes: int
) -> None:
    dispatch = traffic(plan_of(dispatch_payload=payload, expert_alignment=8), COUNTS, [2, 3]).dispatch
    assert dispatch.payload == 5 * read_bytes + 10 * row_bytes
    assert dispatch.scales == (10 + (5 if payload.format == "raw" else 0)) * scale_bytes
    assert dispatch.padding == 14 * (row_bytes + scale_bytes)


def test_blocked_scales_travel_in_rows_and_are_tiled() -> None:
    """H = 96: 3 scales of a row travel in 16 bytes and lie in 4; zones of 128 rows: 10 true and 374 padding rows."""
    blocked = Payload.mxfp8(scale_layout="blocked")
    plan = plan_of(hidden=96, dispatch_payload=blocked, expert_alignment=128)
    dispatch = traffic(plan, COUNTS, [2, 3]).dispatch
    assert (dispatch.scales, dispatch.padding) == (10 * 16, 374 * (96 + 16))
    assert dispatch.tiling == (10 + 374) * (16 + 4)
    assert plan.region("recv_scales_wire").nbytes == plan.capacity_rows * 16
    assert plan.region("recv_scales").nbytes == plan.capacity_rows * 4


def test_rows_by_wire_are_written_and_read_once_more() -> None:
    """Three tokens have company on the other rank: their rows of 32 + 16 bytes, or sums of 128, and 2 slot maps."""
    slot_maps = 2 * 4 * 2 * 8
    plan = plan_of(wire="dedup", combine_order="by_rank", dispatch_payload="nvfp4")
    moved = traffic(plan, COUNTS, [2, 3], num_by_wire=3)
    assert moved.dispatch.wire == 2 * 3 * (32 + 16) + slot_maps
    assert moved.combine_backward.wire == moved.combine.wire == moved.dispatch_backward.wire == 2 * 3 * 128 + slot_maps
    direct = traffic(plan_of(dispatch_payload="nvfp4"), COUNTS, [2, 3])
    assert moved.dispatch.total == direct.dispatch.total + moved.dispatch.wire
    assert moved.combine.total == direct.combine.total + moved.combine.wire
    assert traffic(plan_of(), COUNTS, [2, 3]).dispatch.wire == 0
    with pytest.raises(ConfigError, match="num_by_wire"):
        traffic(plan, COUNTS, [2, 3])


def test_nothing_live_moves_count_cells_only() -> None:
    moved = traffic(plan_of(), [[0] * 4] * 2, [0, 0])
    assert moved.route == 2 * 4 * 12 * 8
    assert moved.dispatch.total == moved.combine.total == moved.dispatch_backward.total == moved.staging == 0


CASES = [named_case("some_negative", 2, 16), *map(random_case, range(6))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_are_those_of_the_reference(case: Case) -> None:
    config = case.config
    plan = Plan.build(config)
    routing = reference.route(config, plan.capacity_rows, case.topk_idx, case.num_tokens)
    experts = torch.arange(config.num_experts).view(-1, 1, 1)
    counts = [
        (ids[:live] == experts).sum((1, 2)).tolist() for ids, live in zip(case.topk_idx, case.num_tokens, strict=True)
    ]
    sent = [
        [int((reference.slot_ranks(slots) == rank).sum()) for rank in range(config.num_ranks)]
        for slots in routing.slot_map
    ]
    assert kept_rows(plan, counts) == sent
    padded = [offs[-1].item() for offs in routing.offs]
    valid = [counts.sum().item() for counts in routing.valid_tokens_per_expert]
    assert padding_rows(plan, counts) == [p - v for p, v in zip(padded, valid, strict=True)]
