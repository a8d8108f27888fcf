"""Tokens that cross once for each rank: what lies in the window, what crosses, and that results do not show it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from ranks import raised, virtual
from rounds import assert_round, assert_same, draw_inputs, expected, play
from routings import BY_WIRE, Case, changed, named_case
from torch import Tensor

import epbuf
from epbuf import Payload, reference
from epbuf.errors import ConfigError, PlanMismatchError

POISON = 0x7F  # a large number in every dtype, so that one row too many shows
PAYLOADS = {
    "same": Payload.same(),
    "mxfp8": Payload.mxfp8(),
    "fp8_block128": Payload.fp8_block128(),
    "nvfp4": Payload.nvfp4(),
    "mxfp8_blocked": Payload.mxfp8(scale_layout="blocked"),
    "nvfp4_blocked": Payload.nvfp4(scale_layout="blocked"),
}


def case_of(routing: str, num_ranks: int, payload: Payload = PAYLOADS["same"], **fields: Any) -> Case:
    alignment = 128 if payload.scale_layout == "blocked" else 16
    sizes = {"hidden": 128, "dispatch_payload": payload, "combine_grad_payload": payload}
    return named_case(routing, num_ranks, alignment, **(sizes | fields))


def num_on_rank(slots: Tensor, rank: int) -> Tensor:
    """Count each token's slots on a rank."""
    return (reference.slot_ranks(slots) == rank).sum(1)


def _poison(arena: epbuf.Arena) -> None:
    for name in ("wire_rows", "grad_wire_rows"):
        _rows(arena, name).fill_(POISON)
    arena.barrier()


def _rows(arena: epbuf.Arena, name: str) -> Tensor:
    region = arena.plan.region(name)
    return arena.window.bytes_at(region.offset, region.nbytes).view(region.shape)


def _in_window(rank: int, group: Any, case: Case) -> list[Tensor]:
    """Return wire_rows after dispatch, grad_wire_rows after combine backward, over poison, and received bytes."""
    inputs = draw_inputs(case, rank, False)
    x = inputs.x.clone().requires_grad_()
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        _poison(arena)
        recv = epbuf.dispatch(lease, x, inputs.topk_idx, inputs.topk_weights, num_tokens=inputs.num_tokens)
        rows = _rows(arena, "wire_rows").clone()
        y = epbuf.combine(lease, inputs.expert_out.clone().requires_grad_())
        y.backward(inputs.dy)
        del recv
        return [rows, _rows(arena, "grad_wire_rows").clone()]


@pytest.mark.parametrize("word", PAYLOADS)
@pytest.mark.parametrize("routing", ["duplicates", "one_row_over", "different_t", "num_tokens_int64"])
def test_a_row_with_company_crosses_and_no_other(routing: str, word: str) -> None:
    """Row r * T + t holds token t of rank r, encoded, where it has several slots here; every other row is untouched."""
    payload = PAYLOADS[word]
    case = case_of(routing, 4, payload, wire="dedup")
    tokens = case.config.max_tokens_per_rank
    inputs = [draw_inputs(case, rank, False) for rank in range(4)]
    slots = reference.route(case.config, len(inputs[0].expert_out), case.topk_idx, case.num_tokens).slot_map
    num_crossing = 0
    for rank, found in enumerate(virtual(4, _in_window, case)):
        for which, rows in zip(("x", "dy"), found, strict=True):
            want = torch.full_like(rows, POISON)
            for source in range(4):
                sent = (num_on_rank(slots[source], rank) > 1) & (source != rank)
                num_crossing += int(sent.sum())
                wire = _travelling(payload, getattr(inputs[source], which))
                at = source * tokens + sent.nonzero()[:, 0]
                want[at] = wire[sent]
            assert torch.equal(rows, want), (rank, which)
    assert num_crossing > 0


def _travelling(payload: Payload, rows: Tensor) -> Tensor:
    """Lay rows out as they cross: data, then scales padded to 16 bytes."""
    if payload.format == "same":
        return rows.view(torch.uint8)
    sent = reference.quantise(payload, rows)
    scales = sent.scales.view(torch.uint8)
    return torch.cat([sent.data, torch.nn.functional.pad(scales, (0, -scales.shape[1] % 16))], dim=1)


def _sums(rank: int, group: Any, case: Case) -> list[Tensor]:
    """Return wire_rows after combine, and grad_wire_rows after dispatch backward."""
    inputs = draw_inputs(case, rank, False)
    x = inputs.x.clone().requires_grad_()
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        _poison(arena)
        recv = epbuf.dispatch(lease, x, inputs.topk_idx)
        epbuf.combine(lease, inputs.expert_out)
        torch.autograd.grad(recv.tokens, x, inputs.grad_recv_tokens)
        return [_rows(arena, name).clone() for name in ("wire_rows", "grad_wire_rows")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_sums_are_made_where_the_rows_are(dtype: str) -> None:
    """Row r * T + t of rank d holds the rounded sum, in k order, of d's rows of token t of rank r, if several."""
    case = named_case("duplicates", 4, 16, dtype, combine_order="by_rank")
    tokens, num_sums = case.config.max_tokens_per_rank, 0
    inputs = [draw_inputs(case, rank, False) for rank in range(4)]
    slots = reference.route(case.config, len(inputs[0].expert_out), case.topk_idx).slot_map
    for rank, found in enumerate(virtual(4, _sums, case)):
        for which, raw in zip(("expert_out", "grad_recv_tokens"), found, strict=True):
            region = getattr(inputs[rank], which)
            want = torch.full_like(raw, POISON).view(region.dtype)
            for source in (other for other in range(4) if other != rank):
                for token in (num_on_rank(slots[source], rank) > 1).nonzero()[:, 0].tolist():
                    here = slots[source][token][reference.slot_ranks(slots[source][token]) == rank]
                    total = torch.zeros(region.shape[1])
                    for row in reference.slot_rows(here).tolist():
                        total = total + region[row].float()
                    want[source * tokens + token] = total.to(region.dtype)
                    num_sums += 1
            assert torch.equal(raw, want.view(torch.uint8)), (rank, which)
    assert num_sums > 0


def _replayed(rank: int, group: Any, cases: list[Case]) -> list[list[Tensor]]:
    """Capture a step and replay it with other routings; return y, dx, dw of each."""
    inputs = [draw_inputs(case, rank, False) for case in cases]

    def step(x: Tensor, ids: Tensor, weights: Tensor, dy: Tensor, live: Tensor) -> list[Tensor]:
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, ids, weights, num_tokens=live)
            scale = 1 + torch.arange(len(recv.tokens))[:, None] % 3
            y = epbuf.combine(lease, recv.tokens * scale.to(x.dtype), topk_weights=recv.topk_weights)
            dx, dw = torch.autograd.grad(y, [x, weights], dy)
        return [y.detach().clone(), dx.clone(), dw.clone()]

    batches = [(i.x, i.topk_idx, i.topk_weights, i.dy, torch.tensor([12 - 3 * n])) for n, i in enumerate(inputs)]
    with epbuf.Arena.open(epbuf.Plan.build(cases[0].config), group) as arena:
        eager = [step(*batch) for batch in batches]
        captured = epbuf.CapturedStep.capture(arena, step, batches[-1])
        replays = [[part.clone() for part in captured(*batch)] for batch in (*batches, *batches)]
        captured.close()
        assert all(
            torch.equal(a, b)
            for ours, other in zip((*eager, *eager), replays, strict=True)
            for a, b in zip(ours, other, strict=True)
        )
        return [part for step_ in eager for part in step_]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_replays_with_other_routings(num_ranks: int) -> None:
    """Rules 20, 21: fewer live tokens and other slots than the step before; nothing of it shows, and eager is equal."""
    by_wire = [case_of(routing, num_ranks, **BY_WIRE) for routing in ("duplicates", "one_rank", "balanced")]
    shared = [dataclasses.replace(case, config=by_wire[0].config) for case in by_wire]
    direct = [changed(case, "direct", wire="direct", combine_order="by_rank") for case in shared]
    for rank, (ours, other) in enumerate(
        zip(virtual(num_ranks, _replayed, shared), virtual(num_ranks, _replayed, direct), strict=True)
    ):
        for mine, theirs in zip(ours, other, strict=True):
            assert_same(mine, theirs, f"rank {rank}")


@pytest.mark.parametrize(("fields", "dedups"), [({}, True), ({"num_topk": 1}, False)], ids=["dedup", "direct"])
def test_auto_moves_rows_as_the_plan_says(fields: dict[str, Any], dedups: bool) -> None:
    """Whichever form the plan takes, the round is that of the reference."""
    case = named_case("some_negative", 2, 16, wire="auto", hidden=512, **fields)
    assert epbuf.Plan.build(case.config).dedups == dedups
    want = expected(case, False, False)
    for rank, got in enumerate(virtual(2, play, case, False, False)):
        assert_round(got, want[rank], f"rank {rank}")


def _mismatch(rank: int, group: Any, cases: list[Case]) -> str:
    return raised(PlanMismatchError, lambda: epbuf.Arena.open(epbuf.Plan.build(cases[rank].config), group))


@pytest.mark.parametrize("fields", [{"wire": "dedup"}, {"combine_order": "by_rank"}], ids=["wire", "combine_order"])
def test_ranks_with_another_form_are_refused(fields: dict[str, Any]) -> None:
    """Rule 18: all ranks send in one form; the difference is named on every rank."""
    cases = [named_case("balanced", 2), changed(named_case("balanced", 2), "other", **fields)]
    field, word = next(iter(fields.items()))
    for message in virtual(2, _mismatch, cases):
        assert field in message and word in message


def _abandoned(rank: int, group: Any, fields: dict[str, Any]) -> bool:
    case = named_case("balanced", 2, **fields)
    x = draw_inputs(case, rank, True).x
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group, debug=True) as arena, torch.no_grad():
        with arena.acquire() as lease:
            epbuf.dispatch(lease, x, case.topk_idx[rank])
            before = lease.slot_map.clone()
        with arena.acquire() as lease:
            return torch.equal(lease.slot_map, before)


@pytest.mark.parametrize("fields", [{"wire": "dedup"}, {"combine_order": "by_rank"}], ids=["wire", "combine_order"])
def test_debug_mode_leaves_slots_to_the_peers(fields: dict[str, Any]) -> None:
    """A slow peer may still look there when a frame whose dispatch was abandoned is handed out again."""
    assert virtual(2, _abandoned, fields) == [True, True]
    assert virtual(2, _abandoned, {}) == [False, False]


def _refused(rank: int, group: Any) -> tuple[list[str], Tensor]:
    """Refuse dispatch and combine on rank 1, then run a good round in the same arena."""
    case = named_case("duplicates", 2, **BY_WIRE)
    inputs = draw_inputs(case, rank, True)
    wrong = inputs.x[:, :8] if rank == 1 else inputs.x
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, torch.no_grad():
        with arena.acquire() as lease:
            messages = [raised(ConfigError, lambda: epbuf.dispatch(lease, wrong, inputs.topk_idx))]
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
            rows = recv.tokens[:, :8] if rank == 1 else recv.tokens
            messages.append(raised(ConfigError, lambda: epbuf.combine(lease, rows)))
            y = epbuf.combine(lease, recv.tokens * 2)
            del recv
    return messages, y


def test_a_refused_call_changes_nothing() -> None:
    """One rank refuses dispatch, then combine; every rank raises, and the same calls succeed afterwards."""
    case = named_case("duplicates", 2, **BY_WIRE)
    for rank, (messages, y) in enumerate(virtual(2, _refused)):
        for message, op, argument in zip(messages, ("dispatch", "combine"), ("x", "expert_out"), strict=True):
            assert message.startswith(f"rank 1 refused {op}" if rank == 0 else f"{argument} must be"), message
        num_slots = (case.topk_idx[rank] >= 0).sum(1, keepdim=True)
        assert_same(y, (draw_inputs(case, rank, True).x * 2 * num_slots).bfloat16(), f"y of rank {rank}")
