"""The plan: sizes by hand, regions that never overlap by accident, one fingerprint for equal plans."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epbuf.config import EpConfig, Payload
from epbuf.errors import ConfigError
from epbuf.plan import (
    ALIGNMENT_BYTES,
    CONTROL_BYTES,
    COUNT_HEADER_CELLS,
    STASH_COUNTERS_BYTES,
    STASH_TABLE_HEADER,
    Plan,
    Region,
    describe_difference,
)
from epbuf.schedule import Schedule

UNTIMED = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)  # CI machines are shared
MIB = 2**20
DEEPSEEK: dict[str, Any] = {
    "num_ranks": 8,
    "num_experts": 256,
    "num_topk": 8,
    "hidden": 7168,
    "max_tokens_per_rank": 4096,
    "recv_capacity_per_rank": 49152,
}
SMALL: dict[str, Any] = {
    "num_ranks": 2,
    "num_experts": 6,
    "num_topk": 2,
    "hidden": 256,
    "max_tokens_per_rank": 100,
    "recv_capacity_per_rank": 384,
    "expert_alignment": 128,
}
RECV_ALIAS = ("recv_tokens", "expert_out")
GRAD_ALIAS = ("grad_expert_out", "grad_recv_tokens")


def build(sizes: dict[str, Any], schedule: Schedule | None = None, **changes: Any) -> Plan:
    return Plan.build(EpConfig(**{**sizes, **changes}), schedule)


def overlapping_pairs(regions: tuple[Region, ...]) -> Iterator[tuple[Region, Region]]:
    for a, b in itertools.combinations(regions, 2):
        if a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes:
            yield a, b


payloads = st.one_of(
    st.sampled_from(["same", "mxfp8", "fp8_block128", "nvfp4"]),
    st.sampled_from([Payload.mxfp8(scale_layout="blocked"), Payload.nvfp4(scale_layout="blocked")]),
    st.builds(Payload.raw, st.integers(1, 40).map(lambda n: 16 * n), st.integers(0, 3).map(lambda n: 16 * n)),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that can be built: sizes, formats, aliases, schedules, policies."""
    num_ranks = draw(st.integers(1, 4))
    save_recv, inference_only = draw(st.booleans()), draw(st.booleans())
    dispatch, gradient = draw(payloads), draw(payloads)
    quantised = dispatch != "same" and (isinstance(dispatch, str) or dispatch.is_quantised)
    if dispatch == "same" and not inference_only:
        save_recv = True
    blocked = any(isinstance(p, Payload) and p.scale_layout == "blocked" for p in (dispatch, gradient))
    alignment = 128 if blocked else draw(st.sampled_from([1, 4, 128]))
    allowed = [pair for pair, ok in ((RECV_ALIAS, quantised and not save_recv), (GRAD_ALIAS, not inference_only)) if ok]
    config = EpConfig(
        num_ranks=num_ranks,
        num_experts=num_ranks * draw(st.integers(1, 5)),
        num_topk=draw(st.integers(1, 9)),
        hidden=128 * draw(st.integers(1, 5)),
        max_tokens_per_rank=draw(st.integers(1, 200)),
        token_dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        expert_alignment=alignment,
        recv_capacity_per_rank=draw(st.one_of(st.none(), st.integers(1, 5).map(lambda n: alignment * n))),
        dispatch_payload=dispatch,
        combine_grad_payload=gradient,
        save_recv=save_recv,
        inference_only=inference_only,
        alias=tuple(draw(st.lists(st.sampled_from(allowed), unique=True))) if allowed else (),
        wire=draw(st.sampled_from(["direct", "dedup", "auto"])),
        combine_order=draw(st.sampled_from(["k", "by_rank"])),
    )
    schedule = Schedule(draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    words = ["keep"] if inference_only else ["keep", "recompute"]
    if words != ["keep"] and RECV_ALIAS not in config.alias:
        words.append("stash")
    frames = schedule.num_frames
    policies = draw(st.lists(st.sampled_from(words), min_size=frames, max_size=frames))
    stash_rows = draw(st.one_of(st.none(), st.integers(1, 3000))) if "stash" in policies else None
    return Plan.build(config, schedule, recv_policy=policies, stash_rows=stash_rows)


@UNTIMED
@given(plans())
def test_regions_share_bytes_only_where_alias_says_so(plan: Plan) -> None:
    for a, b in overlapping_pairs(plan.regions):
        assert (a.name, b.name) in plan.config.alias or (b.name, a.name) in plan.config.alias, (a, b)
        assert (a.index, a.lifetime) == (b.index, b.lifetime)


@UNTIMED
@given(plans())
def test_regions_are_aligned_inside_the_window_and_fit_their_shape(plan: Plan) -> None:
    for region in plan.regions:
        assert region.offset % ALIGNMENT_BYTES == 0 == region.alignment % ALIGNMENT_BYTES, region
        assert 0 <= region.offset < region.offset + region.nbytes <= plan.total_bytes, region
        assert torch.empty(region.shape, dtype=getattr(torch, region.dtype), device="meta").nbytes == region.nbytes
    assert plan.total_bytes < max(region.end for region in plan.regions) + ALIGNMENT_BYTES


@UNTIMED
@given(plans())
def test_rows_of_every_region_are_16_byte_aligned(plan: Plan) -> None:
    for region in plan.regions:
        if region.name in ("recv_tokens", "expert_out", "grad_expert_out", "grad_recv_tokens"):
            assert region.nbytes // plan.capacity_rows % 16 == 0, region
        if region.name in ("wire_rows", "grad_wire_rows"):
            assert region.shape[0] == plan.config.num_ranks * plan.config.max_tokens_per_rank
            assert region.shape[1] % 16 == 0, region


@UNTIMED
@given(plans())
def test_scales_follow_their_data_without_a_gap(plan: Plan) -> None:
    for scales in plan.regions:
        if scales.name in ("recv_scales", "grad_expert_out_scales"):
            data_name = "recv_tokens" if scales.name == "recv_scales" else "grad_expert_out"
            data = plan.region(data_name, scales.index, scales.lifetime)
            gap = scales.offset - data.end
            assert gap == 0 if data.nbytes % ALIGNMENT_BYTES == 0 else 0 < gap < 2 * ALIGNMENT_BYTES, (data, scales)


@UNTIMED
@given(plans())
def test_alias_shares_all_bytes_of_the_smaller_region(plan: Plan) -> None:
    for first, second in plan.config.alias:
        for index in range(plan.schedule.num_workspaces):
            a, b = plan.region(first, index), plan.region(second, index)
            shared = min(a.end, b.end) - max(a.offset, b.offset)
            assert shared == min(a.nbytes, b.nbytes), (a, b)


def test_alias_saves_the_bytes_of_the_smaller_region() -> None:
    apart = build(SMALL).total_bytes
    assert apart - build(SMALL, alias=(GRAD_ALIAS,)).total_bytes == 384 * 256 * 2


def test_recv_of_deepseek_v3_in_bf16_is_672_mib() -> None:
    plan = build(DEEPSEEK)
    assert plan.region("recv_tokens").nbytes == 672 * MIB
    assert plan.row_bytes == plan.token_row_bytes == 14336 and plan.scale_row_bytes == 0


def test_recv_of_deepseek_v3_in_mxfp8_is_346_and_a_half_mib() -> None:
    plan = build(DEEPSEEK, dispatch_payload="mxfp8", combine_grad_payload="fp8_block128")
    assert plan.region("recv_tokens").nbytes + plan.region("recv_scales").nbytes == 346.5 * MIB
    assert (plan.row_bytes, plan.scale_row_bytes) == (7168, 224) == (plan.grad_row_bytes, plan.grad_scale_row_bytes)


def test_window_nbytes_is_data_then_scales() -> None:
    """R=8 T=4096 H=7168 E=256 K=8 C=49152: what a caller's own buffer must hold, to the byte."""
    sizes = {"num_ranks": 8, "num_experts": 256, "num_topk": 8, "hidden": 7168, "max_tokens_per_rank": 4096}
    mxfp8, same = (
        Plan.build(EpConfig(**sizes, recv_capacity_per_rank=49152, dispatch_payload=word)) for word in ("mxfp8", "same")
    )
    assert mxfp8.window_nbytes(mxfp8.capacity_rows) == 346.5 * 2**20
    assert same.window_nbytes(same.capacity_rows) == 672 * 2**20
    nvfp4 = Plan.build(EpConfig(**sizes, dispatch_payload="nvfp4"))
    assert nvfp4.window_nbytes(3) == 3 * (3584 + 448 + 4) and nvfp4.window_nbytes(0) == 0


@pytest.mark.parametrize("rows", [-1, 2.0, True, None], ids=str)
def test_window_nbytes_of_no_number_of_rows(rows: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"rows={rows!r}")):
        Plan.build(EpConfig(**SMALL)).window_nbytes(rows)


def test_window_nbytes_of_half_a_tile() -> None:
    blocked = Payload.mxfp8(scale_layout="blocked")
    config = EpConfig(**SMALL | {"hidden": 128, "expert_alignment": 128, "dispatch_payload": blocked})
    plan = Plan.build(config)
    with pytest.raises(ConfigError, match=r"rows=130.*128.*use 256"):
        plan.window_nbytes(130)
    assert plan.window_nbytes(256) == 256 * (128 + 4)


def test_recv_scales_of_gpt_oss_in_mxfp8_have_rows_of_96_bytes() -> None:
    plan = build(DEEPSEEK, hidden=2880, dispatch_payload="mxfp8")
    assert plan.region("recv_scales").shape == (49152, 96)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        pytest.param("same", {"tokens": ((384, 256), "bfloat16")}, id="same"),
        pytest.param(
            "mxfp8", {"tokens": ((384, 256), "float8_e4m3fn"), "scales": ((384, 16), "float8_e8m0fnu")}, id="mxfp8"
        ),
        pytest.param(
            Payload.mxfp8(scale_layout="blocked"),
            {"tokens": ((384, 256), "float8_e4m3fn"), "scales": ((384, 8), "float8_e8m0fnu")},
            id="mxfp8_blocked",
        ),
        pytest.param(
            "fp8_block128",
            {"tokens": ((384, 256), "float8_e4m3fn"), "scales": ((384, 4), "float32")},
            id="fp8_block128",
        ),
        pytest.param(
            "nvfp4",
            {
                "tokens": ((384, 128), "float4_e2m1fn_x2"),
                "scales": ((384, 16), "float8_e4m3fn"),
                "row_scales": ((384,), "float32"),
            },
            id="nvfp4",
        ),
        pytest.param(
            Payload.raw(48, 32), {"tokens": ((384, 48), "uint8"), "scales": ((384, 32), "uint8")}, id="raw_with_scales"
        ),
        pytest.param(Payload.raw(48), {"tokens": ((384, 48), "uint8")}, id="raw_without_scales"),
    ],
)
def test_payload_regions_have_the_shapes_and_dtypes_of_the_format(payload: Any, expected: dict[str, Any]) -> None:
    plan = build(SMALL, dispatch_payload=payload, combine_grad_payload=payload)
    regions = {region.name: (region.shape, region.dtype) for region in plan.regions}
    for part in ("tokens", "scales", "row_scales"):
        grad = "grad_expert_out" if part == "tokens" else f"grad_expert_out_{part}"
        assert regions.get(f"recv_{part}") == regions.get(grad) == expected.get(part)


def test_regions_stand_in_order_with_the_shapes_that_the_protocol_reads() -> None:
    plan = build(SMALL, Schedule(2, 1))
    shapes = [(r.lifetime, r.index, r.name, r.shape, r.dtype) for r in plan.regions]
    frames = [
        [
            ("frame", f, "count_cells", (2, 6 + 8), "int64"),
            ("frame", f, "arrived_cells", (2,), "int64"),
            ("frame", f, "slot_map", (100, 2), "int64"),
            ("frame", f, "offs", (3,), "int32"),
            ("frame", f, "counts", (7,), "int64"),
            ("frame", f, "overflow", (1,), "float32"),
            ("frame", f, "recv_topk_weights", (384,), "float32"),
            ("frame", f, "recv_tokens", (384, 256), "bfloat16"),
        ]
        for f in range(2)
    ]
    assert shapes == [
        ("arena", 0, "control", (512,), "uint8"),
        ("arena", 0, "abort_cells", (2,), "int64"),
        ("arena", 0, "progress_cells", (2,), "int64"),
        ("arena", 0, "frame_counters", (2, 4), "int32"),
        ("arena", 0, "forward_counters", (1, 2), "int32"),
        ("arena", 0, "backward_counters", (1, 2), "int32"),
        *frames[0],
        *frames[1],
        ("forward", 0, "ready_cells", (2,), "int64"),
        ("forward", 0, "ack_cells", (2,), "int64"),
        ("forward", 0, "route_base", (6,), "int64"),
        ("forward", 0, "route_scratch", (2, 6), "int32"),
        ("forward", 0, "expert_out", (384, 256), "bfloat16"),
        ("backward", 0, "go_cells", (2,), "int64"),
        ("backward", 0, "grad_arrived_cells", (2,), "int64"),
        ("backward", 0, "grad_ready_cells", (2,), "int64"),
        ("backward", 0, "grad_ack_cells", (2,), "int64"),
        ("backward", 0, "grad_expert_out", (384, 256), "bfloat16"),
        ("backward", 0, "grad_recv_tokens", (384, 256), "bfloat16"),
        ("backward", 0, "grad_recv_topk_weights", (384,), "float32"),
    ]


def test_sizes_agree_with_the_structs_of_the_native_module() -> None:
    from epbuf import _C

    plan = build(SMALL, Schedule(3, 2))
    assert _C.sizeof("Control") <= CONTROL_BYTES == plan.region("control").nbytes
    assert plan.region("frame_counters").nbytes == 3 * _C.sizeof("FrameCounters")
    assert plan.region("forward_counters").nbytes == 2 * _C.sizeof("ForwardCounters")
    assert plan.region("backward_counters").nbytes == 2 * _C.sizeof("BackwardCounters")
    assert plan.region("arrived_cells").nbytes == 2 * _C.sizeof("Cell")
    assert _C.sizeof("StashCounters") == STASH_COUNTERS_BYTES
    assert _C.sizeof("StashTable") == 4 * STASH_TABLE_HEADER
    assert COUNT_HEADER_CELLS == _C.COUNT_HEADER_CELLS


def test_unsaved_recv_moves_to_the_forward_workspace() -> None:
    plan = build(SMALL, Schedule(3, 2), dispatch_payload="nvfp4", save_recv=False)
    lifetimes = {(r.lifetime, r.index) for r in plan.regions if r.name.startswith(("recv_tokens", "recv_scales"))}
    assert lifetimes == {("forward", 0), ("forward", 1)}
    assert plan.region("recv_row_scales", 1).lifetime == "forward"


def test_unsaved_recv_in_the_token_dtype_is_refused_in_training() -> None:
    with pytest.raises(ConfigError, match=r"save_recv=False.*'same'.*inference_only=True"):
        build(SMALL, save_recv=False)
    assert build(SMALL, save_recv=False, inference_only=True).region("recv_tokens").lifetime == "forward"


def test_inference_plans_no_backward() -> None:
    plan = build(SMALL, inference_only=True)
    assert {region.lifetime for region in plan.regions} == {"arena", "frame", "forward"}


def test_default_schedule_is_one_sequential_layer() -> None:
    assert build(SMALL).schedule == Schedule.sequential(1)


def worst_demand(num_rows: int, num_zones: int, alignment: int) -> int:
    """Most rows that zones need, by trying every way to spread the rows over them."""
    splits = itertools.combinations_with_replacement(range(num_rows + 1), num_zones - 1)
    demands = []
    for cuts in splits:
        ends = (0, *cuts, num_rows)
        counts = [b - a for a, b in itertools.pairwise(ends)]
        demands.append(sum(-(-count // alignment) * alignment for count in counts))
    return max(demands)


@UNTIMED
@given(
    num_ranks=st.integers(1, 2),
    num_tokens=st.integers(1, 3),
    num_topk=st.integers(1, 4),
    num_local_experts=st.integers(1, 3),
    alignment=st.sampled_from([1, 2, 4, 8]),
)
def test_worst_case_capacity_holds_every_routing_of_distinct_experts(
    num_ranks: int, num_tokens: int, num_topk: int, num_local_experts: int, alignment: int
) -> None:
    config = EpConfig(
        num_ranks=num_ranks,
        num_experts=num_ranks * num_local_experts,
        num_topk=num_topk,
        hidden=8,
        max_tokens_per_rank=num_tokens,
        expert_alignment=alignment,
    )
    num_rows = num_ranks * num_tokens * min(num_topk, num_local_experts)
    capacity = Plan.build(config).capacity_rows
    assert capacity % alignment == 0
    assert worst_demand(num_rows, num_local_experts, alignment) <= capacity
    assert alignment > 1 or capacity == num_rows


@pytest.mark.parametrize(
    ("changes", "capacity_rows"),
    [
        pytest.param({}, 16 * 64 * 3, id="worst"),
        pytest.param({"expert_alignment": 16}, 16 * 64 * 3 + 96, id="worst_aligned"),
        pytest.param({"capacity_factor": 1.0}, 64 * 3, id="factor_one"),
        pytest.param({"capacity_factor": 1.01}, 194, id="factor_rounds_up"),
        pytest.param({"capacity_factor": 1.5, "expert_alignment": 16}, 288 + 96, id="factor_aligned"),
        pytest.param({"capacity_factor": 1e6}, 16 * 64 * 3, id="factor_past_worst"),
        pytest.param({"recv_capacity_per_rank": 5}, 5, id="given"),
    ],
)
def test_capacity_follows_the_config(changes: dict[str, Any], capacity_rows: int) -> None:
    sizes = {"num_ranks": 16, "num_experts": 96, "num_topk": 3, "hidden": 8, "max_tokens_per_rank": 64}
    assert build(sizes, **changes).capacity_rows == capacity_rows


def test_capacity_past_int32_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2147483648 rows.*2147483647.*capacity_factor"):
        build(DEEPSEEK, recv_capacity_per_rank=None, num_ranks=256, max_tokens_per_rank=2**23, num_topk=1)


CHANGES: dict[str, Any] = {
    "num_ranks": 1,
    "num_experts": 8,
    "num_topk": 3,
    "hidden": 512,
    "max_tokens_per_rank": 101,
    "token_dtype": "fp16",
    "recv_capacity_per_rank": 512,
    "capacity_factor": 1.5,
    "expert_alignment": 64,
    "dispatch_payload": "mxfp8",
    "combine_grad_payload": Payload.raw(512),
    "save_recv": False,
    "alias": (GRAD_ALIAS,),
    "inference_only": True,
    "overflow_policy": "error",
    "validate_ids": True,
    "max_num_sms": 8,
    "timeout_s": 5.0,
}
ONLY_ONE_WORD_YET = {"wire", "combine_order"}
WITH = {
    "capacity_factor": {"recv_capacity_per_rank": None},
    "save_recv": {"dispatch_payload": "mxfp8"},
}


def test_fingerprint_is_the_same_on_every_machine() -> None:
    """A change of this value means that ranks of two versions of epbuf refuse each other: say so in CHANGELOG."""
    plan = build(SMALL, Schedule.interleaved(2, 4, 0, 8, 2), dispatch_payload="nvfp4", timeout_s=0.1)
    assert plan.fingerprint == "39db9d5509114ffc34ec79a98fd084a8d4399af70f61911432dbad45c7ea6cfc"


def test_fingerprint_does_not_depend_on_the_process() -> None:
    program = f"import epbuf; print(epbuf.Plan.build(epbuf.EpConfig(**{SMALL!r})).fingerprint)"
    result = subprocess.run([sys.executable, "-R", "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == build(SMALL).fingerprint


def test_every_config_field_is_tried_below() -> None:
    assert CHANGES.keys() | ONLY_ONE_WORD_YET == set(EpConfig.model_fields)


@pytest.mark.parametrize("field", list(CHANGES))
def test_plans_that_differ_in_one_field_say_which(field: str) -> None:
    base = WITH.get(field, {})
    ours, theirs = build(SMALL, **base), build(SMALL, **{**base, field: CHANGES[field]})
    assert ours.fingerprint != theirs.fingerprint
    difference = describe_difference(ours.to_json(), theirs.to_json(), names=("rank 0", "rank 3"))
    lines = difference.splitlines()
    assert len(lines) == 1 or all(line.startswith("combine_grad_payload.") for line in lines), difference
    assert lines[0].startswith(field) and "rank 0 has" in lines[0] and "rank 3 has" in lines[0]


def test_difference_names_both_values() -> None:
    difference = describe_difference(build(SMALL).to_json(), build(SMALL, num_topk=3).to_json())
    assert difference == "num_topk: rank 0 has 2, rank 1 has 3"


def test_difference_names_schedule() -> None:
    ours, theirs = build(SMALL, Schedule.sequential(2)), build(SMALL, Schedule.sequential(3))
    difference = describe_difference(ours.to_json(), theirs.to_json())
    assert difference.splitlines() == [
        "num_frames: rank 0 has 2, rank 1 has 3",
        "num_layers: rank 0 has 2, rank 1 has 3",
    ]


def test_difference_of_derived_facts_is_named_when_all_fields_agree() -> None:
    theirs = json.loads(build(SMALL).to_json())
    theirs["total_bytes"] += 256
    assert describe_difference(build(SMALL).to_json(), json.dumps(theirs)).startswith("total_bytes: rank 0 has")


def test_equal_plans_have_equal_fingerprints_and_no_difference() -> None:
    ours, theirs = build(SMALL, timeout_s=5), build(SMALL, timeout_s=5.0)
    assert ours.fingerprint == theirs.fingerprint
    assert describe_difference(ours.to_json(), theirs.to_json()) == ""


def test_json_lists_every_region_and_the_fingerprint() -> None:
    plan = build(SMALL, dispatch_payload="mxfp8")
    content = json.loads(plan.to_json())
    assert content["fingerprint"] == plan.fingerprint and content["total_bytes"] == plan.total_bytes
    assert [(r["name"], r["offset"], tuple(r["shape"])) for r in content["regions"]] == [
        (r.name, r.offset, r.shape) for r in plan.regions
    ]


def test_table_shows_every_region_once_and_the_total() -> None:
    plan = build(DEEPSEEK, Schedule.sequential(4), dispatch_payload="nvfp4", alias=(GRAD_ALIAS,))
    table = str(plan)
    for name in {region.name for region in plan.regions}:
        assert [line.split()[0] for line in table.splitlines() if line.startswith("  ")].count(name) == 1, name
    assert f"{plan.total_bytes:,} bytes" in table
    assert "frame x 4" in table and "grad_expert_out and grad_recv_tokens share bytes" in table


def test_table_columns_line_up() -> None:
    lines = str(build(DEEPSEEK)).splitlines()
    rows = [line for line in lines if line.startswith("  ") and "[" in line]
    assert len({line.index("[") for line in rows}) == 1
    assert len({len(line) for line in rows}) == 1


@pytest.mark.parametrize("num_frames", [1, 4, 100])
def test_svg_is_a_picture_with_every_region(num_frames: int) -> None:
    plan = build(SMALL, Schedule(num_frames, 2), dispatch_payload="nvfp4", alias=(GRAD_ALIAS,))
    root = ElementTree.fromstring(plan.to_svg())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {region.name for region in plan.regions} <= set(texts)
    width = float(root.attrib["width"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(box.get("x", 0)) <= float(box.get("x", 0)) + float(box.attrib["width"]) <= width


def test_svg_draws_shared_bytes_in_two_lanes() -> None:
    apart, shared = build(SMALL).to_svg(), build(SMALL, alias=(GRAD_ALIAS,)).to_svg()
    heights = [float(ElementTree.fromstring(svg).attrib["height"]) for svg in (apart, shared)]
    assert heights[0] < heights[1]


def test_region_that_the_plan_has_not_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        build(SMALL).region("recv_scales")


def wire_sizes(**changes: Any) -> tuple[int, ...]:
    """Return the bytes of a row of wire_rows and of grad_wire_rows; 0 where the plan has none."""
    plan = build(SMALL, **changes)
    names = [name for name in ("wire_rows", "grad_wire_rows") if name in plan.lifetimes]
    return tuple(plan.region(name).shape[1] for name in names) or (0, 0)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        pytest.param({}, (0, 0), id="default"),
        pytest.param({"wire": "dedup"}, (512, 512), id="same"),
        pytest.param({"wire": "dedup", "dispatch_payload": "mxfp8"}, (256 + 16, 512), id="mxfp8_with_scales"),
        pytest.param({"wire": "dedup", "combine_grad_payload": "nvfp4"}, (512, 128 + 16), id="nvfp4_without_row_scale"),
        pytest.param({"combine_order": "by_rank", "dispatch_payload": "mxfp8"}, (512, 512), id="sums_of_token_dtype"),
        pytest.param(
            {"wire": "dedup", "combine_order": "by_rank", "combine_grad_payload": "mxfp8"}, (512, 512), id="the_larger"
        ),
        pytest.param({"wire": "dedup", "num_ranks": 1}, (0, 0), id="nobody_to_send_to"),
        pytest.param({"combine_order": "by_rank", "num_ranks": 1}, (0, 0), id="nobody_to_pull_from"),
        pytest.param({"wire": "dedup", "inference_only": True}, (512,), id="no_backward"),
    ],
)
def test_rows_by_wire_hold_a_row_of_every_token(changes: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert wire_sizes(**changes) == sizes


def test_auto_compares_nvlink_with_local_memory() -> None:
    """T=4096 K=8 on 2 ranks: 4 rows of 14336 bytes a token cross, or one; those that have company are copied."""
    sizes = DEEPSEEK | {"num_ranks": 2, "inference_only": True}
    plan = build(sizes, wire="auto")
    model = plan.wire_model
    none = math.comb(128, 8) / math.comb(256, 8)
    one = 128 * math.comb(128, 7) / math.comb(256, 8)
    assert model.direct_bytes == 4096 * 4 * 14336
    assert model.dedup_bytes == pytest.approx(4096 * ((1 - none) * 14336 + 8 * 8), abs=1)
    assert model.copied_bytes == pytest.approx(4096 * ((1 - none - one) + (4 - one)) * 14336, abs=1)
    assert model.direct_us == pytest.approx(598, abs=1) and model.dedup_us == pytest.approx(230, abs=1)
    assert plan.dedups and "wire dedup (auto): sending 224.0 MiB in 598 us" in str(plan)
    assert plan.regions == build(sizes, wire="dedup").regions


@pytest.mark.parametrize(
    ("changes", "dedups"),
    [
        pytest.param({"num_ranks": 8}, True, id="two_rows_a_rank"),
        pytest.param({"num_ranks": 1}, False, id="no_peer"),
        pytest.param({"num_ranks": 8, "num_topk": 1}, False, id="one_row_a_token"),
        pytest.param({"num_ranks": 8, "num_experts": 8}, False, id="one_expert_a_rank"),
        pytest.param({"num_ranks": 2, "num_topk": 64, "num_experts": 4}, True, id="more_choices_than_experts"),
    ],
)
def test_auto_takes_the_form_that_is_expected_to_be_faster(changes: dict[str, Any], dedups: bool) -> None:
    plan = build(DEEPSEEK | changes, wire="auto")
    assert plan.dedups == dedups == (plan.wire_model.dedup_us < plan.wire_model.direct_us)
    assert ("wire_rows" in plan.lifetimes) == dedups
    assert f"wire {'dedup' if dedups else 'direct'} (auto)" in str(plan)


def test_plans_of_another_form_have_another_fingerprint() -> None:
    forms: list[dict[str, Any]] = [{}, {"wire": "dedup"}, {"wire": "auto"}, {"combine_order": "by_rank"}]
    assert len({build(SMALL, **form).fingerprint for form in forms}) == len(forms)
    auto, dedup = (build(SMALL, wire=wire).to_json() for wire in ("auto", "dedup"))
    assert describe_difference(auto, dedup) == "wire: rank 0 has 'auto', rank 1 has 'dedup'"
    assert "combine adds by rank" in str(build(SMALL, combine_order="by_rank"))
    assert "wire direct (dedup needs a peer)" in str(build(SMALL, wire="dedup", num_ranks=1))
