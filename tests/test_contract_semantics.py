"""Contract rules 1 to 11 one by one: worked examples, ids, weights, gradients that are missing, policies, addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import raised, virtual
from rounds import NAN, assert_same, compare, compare_rows, draw_inputs, expected, poison_frame
from routings import Case, base_config, named_case
from torch import Tensor

import epbuf
from epbuf import reference
from epbuf.errors import CapacityError, ConfigError

pytestmark = pytest.mark.usefixtures("form")

Spread = Callable[..., list[Any]]


# Two ranks, experts 0, 1 on rank 0 and 2, 3 on rank 1, zones in multiples of 4 rows. Token t of rank r holds
# the number 10 r + t + 1, so a row shows where it came from.
HAND_IDS = ([[0, 2], [2, 0]], [[2, 3], [0, -1]])


def _hand(rank: int, group: Any, capacity: int) -> dict[str, Any]:
    config = base_config(
        2, num_experts=4, num_topk=2, hidden=8, max_tokens_per_rank=2, expert_alignment=4,
        recv_capacity_per_rank=capacity, token_dtype="fp32",
    )  # fmt: skip
    x = torch.tensor([[10.0 * rank + 1], [10.0 * rank + 2]]).expand(2, 8).contiguous()
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
    with epbuf.Arena.open(epbuf.Plan.build(config), group) as arena, arena.acquire() as lease:
        poison_frame(lease)
        recv = epbuf.dispatch(lease, x, torch.tensor(HAND_IDS[rank]), weights)
        y = epbuf.combine(lease, recv.tokens * 2)
        return {
            "tokens": recv.tokens[:, 0].tolist(),
            "weights": recv.topk_weights.tolist(),
            "offs": recv.offs.tolist(),
            "rows": recv.tokens_per_expert.tolist(),
            "valid": recv.valid_tokens_per_expert.tolist(),
            "total": recv.total_recv_tokens.tolist(),
            "overflow": recv.overflow.tolist(),
            "y": y[:, 0].tolist(),
        }


def test_worked_example() -> None:
    """Rules 1 to 3, 6: three rows for expert 0, none for 1, three for 2, one for 3, by hand."""
    first, second = virtual(2, _hand, 8)
    nan = pytest.approx(NAN, nan_ok=True)
    assert first == {
        "tokens": [1, 2, 12, 0, nan, nan, nan, nan],
        "weights": [1, 4, 13, 0, nan, nan, nan, nan],
        "offs": [4, 4],
        "rows": [4, 0],
        "valid": [3, 0],
        "total": [4],
        "overflow": [0],
        "y": [4, 8],
    }
    assert second == {
        "tokens": [1, 2, 11, 0, 11, 0, 0, 0],
        "weights": [2, 3, 11, 0, 12, 0, 0, 0],
        "offs": [4, 8],
        "rows": [4, 4],
        "valid": [3, 1],
        "total": [8],
        "overflow": [0],
        "y": [44, 24],
    }


def test_worked_overflow() -> None:
    """Rule 10: with room for 4 rows rank 1, which needs 8, drops expert 3; both ranks see the flag."""
    first, second = virtual(2, _hand, 4)
    assert (first["offs"], first["total"], first["overflow"]) == ([4, 4], [4], [1])
    assert second == {
        "tokens": [1, 2, 11, 0],
        "weights": [2, 3, 11, 0],
        "offs": [4, 4],
        "rows": [4, 0],
        "valid": [3, 0],
        "total": [8],
        "overflow": [1],
        "y": [22, 24],
    }


def _reduced(rank: int, group: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    case = named_case("some_negative", 2, 16)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        poison_frame(lease)
        recv = epbuf.dispatch(lease, draw_inputs(case, rank, True).x, case.topk_idx[rank])
        trimmed = recv.trim()
        y = epbuf.combine(lease, trimmed.tokens * 2)
        masked = torch.where(recv.row_mask()[:, None], recv.tokens, 0).float().sum(0)
        same = torch.tensor(trimmed.tokens.data_ptr() == recv.tokens.data_ptr())
        return trimmed.tokens.float().sum(0), masked, y.clone(), same


def test_trim_and_row_mask_hide_the_garbage_rows() -> None:
    """Rule 3: reductions over trim() or row_mask() see only rows of zones, and trimmed rows are the same memory."""
    case = named_case("some_negative", 2, 16)
    want = expected(case, False, True)
    for (trimmed, masked, _, same), mine in zip(virtual(2, _reduced), want, strict=True):
        total = mine["recv_tokens"][: int(mine["offs"][-1])].float().sum(0)
        assert_same(trimmed, total, "sum of trimmed rows")
        assert_same(masked, total, "sum of masked rows")
        assert bool(same)


def test_combine_takes_trimmed_rows() -> None:
    """Rule 3: combine reads rows below offs[-1] only, so an input of exactly those rows is enough."""
    case = named_case("some_negative", 2, 16)
    routing = reference.route(case.config, epbuf.Plan.build(case.config).capacity_rows, case.topk_idx)
    x = [draw_inputs(case, rank, True).x for rank in range(2)]
    kept = [(routing.slot_map[rank] >= 0).sum(1, keepdim=True) for rank in range(2)]
    for rank, (_, _, y, _) in enumerate(virtual(2, _reduced)):
        assert_same(y, (x[rank] * 2 * kept[rank]).to(y.dtype), "y")


def _trim_nothing(rank: int, group: Any) -> list[int]:
    case = named_case("all_negative", 2, 16)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        poison_frame(lease)
        trimmed = epbuf.dispatch(lease, draw_inputs(case, rank, True).x, case.topk_idx[rank]).trim()
        return [len(trimmed.tokens), len(trimmed.topk_weights)]


def test_trim_keeps_one_aligned_block() -> None:
    """Rule 3: with no row at all, trim() still gives max(A, 1) rows, which grouped GEMMs need."""
    assert virtual(2, _trim_nothing) == [[16, 16]] * 2


def _validated(rank: int, group: Any) -> tuple[str, Tensor]:
    case = named_case("balanced", 2)
    config = base_config(2, validate_ids=True)
    bad = case.topk_idx[rank].clone()
    if rank == 1:
        bad[3, 1] = 77
    x = draw_inputs(case, rank, True).x
    with epbuf.Arena.open(epbuf.Plan.build(config), group) as arena:
        with arena.acquire() as lease:
            message = raised(ConfigError, lambda: epbuf.dispatch(lease, x, bad))
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, case.topk_idx[rank])
            return message, epbuf.combine(lease, recv.tokens).detach().clone()


def test_validate_ids_raises_on_every_rank(spread: Spread) -> None:
    """Rule 4: validate_ids=True names rank, token and value on every rank, and the arena goes on."""
    case = named_case("balanced", 2)
    for rank, (message, y) in enumerate(spread(2, _validated)):
        assert "rank 1" in message and "token 3" in message and "77" in message
        assert_same(y, draw_inputs(case, rank, True).x * 3, "y of the next call")


def _counted(rank: int, group: Any) -> int:
    case = named_case("too_large", 2)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        epbuf.dispatch(lease, draw_inputs(case, rank, True).x, case.topk_idx[rank])
        return int(arena.report()["num_bad_ids"])


def test_bad_ids_are_counted_on_every_rank() -> None:
    """Rule 4: an id >= E routes nothing, and its count travels to every rank."""
    case = named_case("too_large", 2)
    bad = reference.route(case.config, 1000, case.topk_idx).num_bad_ids
    assert bad > 0
    assert virtual(2, _counted) == [bad, bad]


def _repeated(rank: int, group: Any) -> tuple[list[float], list[float], Tensor, Tensor]:
    config = base_config(1, num_experts=2, num_topk=2, hidden=8, max_tokens_per_rank=1, token_dtype="fp32",
                         recv_capacity_per_rank=2)  # fmt: skip
    x = torch.full((1, 8), 5.0, requires_grad=True)
    weights = torch.tensor([[2.0, 3.0]], requires_grad=True)
    with epbuf.Arena.open(epbuf.Plan.build(config), group) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, torch.tensor([[1, 1]]), weights)
        y = epbuf.combine(lease, recv.tokens + torch.tensor([[10.0], [20.0]]), topk_weights=recv.topk_weights)
        dx, dw = torch.autograd.grad(y, [x, weights], torch.ones(1, 8))
        return recv.topk_weights.tolist(), y[0].tolist(), dx, dw


def test_same_expert_twice_gives_two_rows() -> None:
    """Rule 5: each of the two rows has its own weight, and combine adds both: 2 * 15 + 3 * 25 = 105."""
    [(weights, y, dx, dw)] = virtual(1, _repeated)
    assert (weights, y) == ([2.0, 3.0], [105.0] * 8)
    assert_same(dx, torch.full((1, 8), 5.0), "dx")
    assert_same(dw, torch.tensor([[8 * 15.0, 8 * 25.0]]), "dw")


def _no_weights(rank: int, group: Any) -> Tensor:
    case = named_case("some_negative", 2, 16)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        poison_frame(lease)
        return epbuf.dispatch(lease, draw_inputs(case, rank, True).x, case.topk_idx[rank]).topk_weights.detach().clone()


def test_dispatch_without_weights_gives_ones() -> None:
    """Rule 6: without topk_weights every real row has weight 1, padding 0."""
    case = named_case("some_negative", 2, 16)
    capacity = epbuf.Plan.build(case.config).capacity_rows
    routing = reference.route(case.config, capacity, case.topk_idx)
    x = [draw_inputs(case, rank, True).x for rank in range(2)]
    _, want, _ = reference.dispatch(case.config, capacity, routing, x, None)
    for rank, weights in enumerate(virtual(2, _no_weights)):
        assert_same(weights, want[rank], "recv_topk_weights")


def _weighted_window(rank: int, group: Any) -> Tensor:
    case = named_case("balanced", 2)
    x = draw_inputs(case, rank, True).x
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, torch.no_grad():
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, case.topk_idx[rank], torch.ones(12, 3))
            lease.expert_out.copy_(recv.tokens)
            with pytest.raises(ConfigError, match="weight"):
                epbuf.combine(lease, lease.expert_out, topk_weights=recv.topk_weights)
            del recv
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, case.topk_idx[rank])
            lease.expert_out.copy_(recv.tokens)
            return epbuf.combine(lease, lease.expert_out).clone()


def test_weights_with_the_windows_own_rows_are_refused() -> None:
    """Rule 6: the window's own expert_out cannot be weighted by combine, and can be combined without weights."""
    case = named_case("balanced", 2)
    for rank, y in enumerate(virtual(2, _weighted_window)):
        assert_same(y, draw_inputs(case, rank, True).x * 3, "y of the next call")


def _window_rows_are_not_staged(rank: int, group: Any) -> list[int]:
    case = named_case("balanced", 2)
    x = draw_inputs(case, rank, True).x
    staged = []
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, torch.no_grad():
        for own in (True, False):
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, case.topk_idx[rank])
                lease.expert_out.copy_(recv.tokens)
                epbuf.combine(lease, lease.expert_out if own else recv.tokens)
                staged.append(int(arena.report()["staged_bytes"]))
                del recv
    return staged


def test_rows_written_into_the_window_are_not_staged() -> None:
    """Rule 6: a producer that writes into lease.expert_out costs no copy; any other tensor its live rows."""
    case = named_case("balanced", 2)
    for rank, staged in enumerate(virtual(2, _window_rows_are_not_staged)):
        rows = int(expected(case, False, True)[rank]["offs"][-1])
        assert staged == [0, rows * 16 * 2]


def _missing_gradients(rank: int, group: Any) -> tuple[Tensor, Tensor]:
    case = named_case("balanced", 2)
    inputs = draw_inputs(case, rank, True)
    x, weights = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone().requires_grad_()
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, case.topk_idx[rank], weights)
        out, grad = (
            (recv.tokens, inputs.grad_recv_tokens) if rank == 0 else (recv.topk_weights, inputs.grad_recv_topk_weights)
        )
        dx, dw = torch.autograd.grad(out, [x, weights], grad, allow_unused=True)
        return (torch.zeros_like(x) if dx is None else dx), (torch.zeros_like(weights) if dw is None else dw)


def test_missing_gradients_count_as_zero_rows(spread: Spread) -> None:
    """Rule 7: rank 0 has no gradient for weights and rank 1 none for tokens; both take part all the same."""
    case = named_case("balanced", 2)
    inputs = [draw_inputs(case, rank, True) for rank in range(2)]
    routing = reference.route(case.config, len(inputs[0].expert_out), case.topk_idx)
    dx, dw = reference.dispatch_backward(
        case.config,
        routing,
        [inputs[0].grad_recv_tokens, torch.zeros_like(inputs[1].grad_recv_tokens)],
        [torch.zeros_like(inputs[0].grad_recv_topk_weights), inputs[1].grad_recv_topk_weights],
    )
    for rank, (mine_x, mine_w) in enumerate(spread(2, _missing_gradients)):
        assert_same(mine_x, dx[rank], f"dx of rank {rank}")
        assert_same(mine_w, dw[rank], f"dw of rank {rank}")


def _frozen_on_one_rank(rank: int, group: Any) -> Tensor | None:
    case = named_case("balanced", 2)
    inputs = draw_inputs(case, rank, True)
    x = inputs.x.clone().requires_grad_(rank == 1)
    scale = torch.tensor(2.0, dtype=x.dtype, requires_grad=True)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, case.topk_idx[rank])
        y = epbuf.combine(lease, recv.tokens * scale)
        y.backward(inputs.dy)
        return x.grad


def test_frozen_input_on_one_rank(spread: Spread) -> None:
    """Rule 7: a rank whose input needs no gradient still takes part in the backward of the other."""
    frozen, trained = spread(2, _frozen_on_one_rank)
    case = named_case("balanced", 2)
    assert frozen is None
    assert_same(trained, draw_inputs(case, 1, True).dy * 6, "dx of rank 1")


def _zero_rows(rank: int, group: Any) -> Tensor:
    case = named_case("some_negative", 2)
    x = draw_inputs(case, rank, True).x
    out = torch.full_like(x, NAN)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease, torch.no_grad():
        ids = case.topk_idx[rank].clone()
        ids[::2] = -1
        recv = epbuf.dispatch(lease, x, ids, num_tokens=torch.tensor([8]))
        y = epbuf.combine(lease, recv.tokens, out=out)
        assert y.data_ptr() == out.data_ptr()
    return out


def test_tokens_without_rows_get_zeros() -> None:
    """Rule 8: rows of tokens with no expert, and of tokens past num_tokens, are written with zeros, not skipped."""
    case = named_case("some_negative", 2)
    for rank, out in enumerate(virtual(2, _zero_rows)):
        kept = (case.topk_idx[rank] >= 0).sum(1, keepdim=True).clone()
        kept[::2], kept[8:] = 0, 0
        assert_same(out, (draw_inputs(case, rank, True).x * kept).to(out.dtype), f"y of rank {rank}")


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_combine_never_changes_its_input(weighted: bool) -> None:
    """Rule 9: expert_out, its weights and the receive region are the same bytes before and after combine."""
    for untouched in virtual(2, _inputs_after_combine, weighted):
        assert untouched == [True, True, True]


def _inputs_after_combine(rank: int, group: Any, weighted: bool) -> list[bool]:
    case = named_case("balanced", 2, 16)
    inputs = draw_inputs(case, rank, False)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease, torch.no_grad():
        poison_frame(lease)
        recv = epbuf.dispatch(lease, inputs.x, case.topk_idx[rank], inputs.topk_weights)
        watched = [inputs.expert_out, recv.topk_weights, recv.tokens]
        before = [t.clone() for t in watched]
        epbuf.combine(lease, inputs.expert_out, topk_weights=recv.topk_weights if weighted else None)
        return [bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(watched, before, strict=True)]


def _inference(rank: int, group: Any, case: Case, save_recv: bool) -> list[dict[str, Tensor]]:
    """Run the case three times on two frames and one workspace, and leave NaN in the receive region each time."""
    fields = case.config.model_dump(exclude_defaults=True) | {"inference_only": True, "save_recv": save_recv}
    plan = epbuf.Plan.build(epbuf.EpConfig(**fields), schedule=epbuf.Schedule(2))
    inputs, rounds = draw_inputs(case, rank, False), []
    with epbuf.Arena.open(plan, group) as arena, torch.no_grad():
        for number in range(3):
            with arena.acquire(number % 2) as lease:
                recv = epbuf.dispatch(lease, inputs.x, case.topk_idx[rank], inputs.topk_weights)
                got = {"recv_tokens": recv.tokens.clone(), "recv_topk_weights": recv.topk_weights.clone()}
                recv.tokens.fill_(NAN)
                expert_out = inputs.expert_out.clone()
                expert_out[int(recv.offs[-1]) :] = NAN
                rounds.append(got | {"y": epbuf.combine(lease, expert_out)})
    return rounds


@pytest.mark.parametrize("save_recv", [True, False], ids=["in_frame", "in_workspace"])
@pytest.mark.parametrize("routing", ["some_negative", "one_row_over"])
def test_inference_only(routing: str, save_recv: bool) -> None:
    """Rules 3 and 6: without memory for backward, and with received rows in the frame or in the workspace, forward
    values are the same round after round.
    """
    case = named_case(routing, 2, 16)
    want = expected(case, False, False)
    for rank, rounds in enumerate(virtual(2, _inference, case, save_recv)):
        for got in rounds:
            assert_same(got["y"], want[rank]["y"], f"y of rank {rank}")
            compare_rows([got], [want[rank]], ("recv_tokens", "recv_topk_weights"))


def _received_of_same(rank: int, group: Any) -> tuple[bool, ...]:
    case = named_case("balanced", 1)
    with epbuf.Arena.open(epbuf.Plan.build(case.config)) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, draw_inputs(case, 0, True).x.requires_grad_(), case.topk_idx[0])
        return (
            recv.scales is None,
            recv.row_scales is None,
            recv.carrier is recv.tokens,
            recv.dequantize() is recv.tokens,
        )


def test_payload_same_has_no_scales() -> None:
    """Rule 6: for payload "same" the rows are their own carrier, and there is nothing to dequantise."""
    assert virtual(1, _received_of_same) == [(True, True, True, True)]


def _error_policy(rank: int, group: Any) -> tuple[str, Tensor]:
    tight, easy = named_case("one_row_over", 2), named_case("some_negative", 2)
    config = base_config(2, overflow_policy="error", recv_capacity_per_rank=tight.config.recv_capacity_per_rank)
    x = draw_inputs(tight, rank, True).x
    with epbuf.Arena.open(epbuf.Plan.build(config), group) as arena:
        with arena.acquire() as lease:
            message = raised(CapacityError, lambda: epbuf.dispatch(lease, x, tight.topk_idx[rank]))
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, easy.topk_idx[rank])
            return message, epbuf.combine(lease, recv.tokens).detach().clone()


def test_error_policy_raises_on_all_ranks(spread: Spread) -> None:
    """Rule 10: overflow_policy="error" raises CapacityError with demand and capacity on all ranks, at the same call."""
    tight, easy = named_case("one_row_over", 2), named_case("some_negative", 2)
    capacity = tight.config.recv_capacity_per_rank
    assert capacity is not None
    for rank, (message, y) in enumerate(spread(2, _error_policy)):
        assert str(capacity) in message and str(capacity + 1) in message
        kept = (easy.topk_idx[rank] >= 0).sum(1, keepdim=True)
        assert_same(y, (draw_inputs(tight, rank, True).x * kept).to(y.dtype), f"y of the next call on rank {rank}")


def _found_inf(rank: int, group: Any, routing: str) -> tuple[float, Tensor]:
    case = named_case(routing, 2, 1, "fp32")
    parameter = torch.ones(4, requires_grad=True)
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.Adam([parameter], lr=0.5, fused=True)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, draw_inputs(case, rank, True).x, case.topk_idx[rank])
        optimizer.found_inf = recv.overflow.squeeze()  # type: ignore[attr-defined]
        optimizer.step()
        return float(recv.overflow), parameter.detach().clone()


@pytest.mark.parametrize("routing", ["exactly_at_capacity", "one_row_over"])
def test_overflow_skips_an_optimiser_step(routing: str) -> None:
    """Rule 10: recv.overflow serves as found_inf: the update is skipped on all ranks when any overflowed."""
    over = routing == "one_row_over"
    for flag, parameter in virtual(2, _found_inf, routing):
        assert flag == over
        assert bool((parameter == 1).all()) == over


def _strided(rank: int, group: Any) -> dict[str, Tensor]:
    case = named_case("some_negative", 2)
    inputs = draw_inputs(case, rank, True)

    def widen(rows: Tensor) -> Tensor:
        wide = torch.full((len(rows), rows.shape[1] + 8), NAN, dtype=rows.dtype)
        wide[:, : rows.shape[1]] = rows
        return wide[:, : rows.shape[1]]

    def with_fourth(columns: Tensor) -> Tensor:
        return torch.cat([columns, columns[:, :1] + 1], dim=1)[:, :3]

    x = widen(inputs.x).requires_grad_()
    ids, weights = with_fourth(case.topk_idx[rank]), with_fourth(inputs.topk_weights)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, ids, weights)
        expert_out = widen(inputs.expert_out).requires_grad_()
        y = epbuf.combine(lease, expert_out)
        got = {"recv_tokens": recv.tokens.detach().clone(), "y": y.detach().clone()}
        got["recv_topk_weights"] = recv.topk_weights.detach().clone()
        got["grad_expert_out"] = torch.autograd.grad(y, expert_out, widen(inputs.dy))[0].clone()
        got["dx"] = torch.autograd.grad(recv.tokens, x, widen(inputs.grad_recv_tokens))[0].clone()
        return got


def test_row_strided_inputs() -> None:
    """Rule 11: rows with a stride that is a multiple of 16 bytes are read as they lie, in every op."""
    want = expected(named_case("some_negative", 2), False, True)
    got = virtual(2, _strided)
    compare(got, want, ("y", "dx"))
    compare_rows(got, want, ("recv_tokens", "recv_topk_weights", "grad_expert_out"))


def _expanded_gradient(rank: int, group: Any) -> tuple[Tensor, Tensor]:
    case = named_case("balanced", 2)
    x = draw_inputs(case, rank, True).x.clone().requires_grad_()
    weights = torch.ones(12, 3, requires_grad=True)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, case.topk_idx[rank], weights)
        epbuf.combine(lease, recv.tokens, topk_weights=recv.topk_weights).sum().backward()
    assert x.grad is not None and weights.grad is not None
    return x.grad, weights.grad


def test_gradient_of_a_plain_sum() -> None:
    """Rule 11: y.sum().backward() hands over a gradient with strides (0, 0), which counts like any other."""
    case = named_case("balanced", 2)
    for rank, (dx, dw) in enumerate(virtual(2, _expanded_gradient)):
        x = draw_inputs(case, rank, True).x
        assert_same(dx, torch.full_like(x, 3), "dx")
        assert_same(dw, x.float().sum(1, keepdim=True).expand(12, 3), "dw")


def _expanded_row_gradients(rank: int, group: Any) -> tuple[Tensor, Tensor]:
    case = named_case("balanced", 2)
    x, weights = draw_inputs(case, rank, True).x.clone().requires_grad_(), torch.ones(12, 3, requires_grad=True)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, case.topk_idx[rank], weights)
        grads = (
            torch.full((1, 1), 2.0, dtype=x.dtype).expand(recv.tokens.shape),
            torch.full((1,), 5.0).expand(len(recv.tokens)),
        )
        dx, dw = torch.autograd.grad([recv.tokens, recv.topk_weights], [x, weights], grads)
        return dx, dw


def test_gradient_of_a_sum_over_received_rows() -> None:
    """Rule 11: the gradients that reach dispatch backward may have zero strides as well."""
    for dx, dw in virtual(2, _expanded_row_gradients):
        assert_same(dx, torch.full_like(dx, 6), "dx")
        assert_same(dw, torch.full_like(dw, 5), "dw")


def _far_rows(rank: int, group: Any) -> tuple[float, float]:
    config = base_config(
        1, num_experts=2, num_topk=2, hidden=16384, max_tokens_per_rank=1, token_dtype="fp32",
        expert_alignment=32768, recv_capacity_per_rank=65536, inference_only=True,
    )  # fmt: skip
    x = torch.randn(1, 16384)
    with epbuf.Arena.open(epbuf.Plan.build(config), group) as arena, arena.acquire() as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, x, torch.tensor([[0, 1]]))
        assert recv.tokens[32768].data_ptr() - recv.tokens.data_ptr() == 2**31
        lease.expert_out[0], lease.expert_out[32768] = x[0] * 2, x[0] * 4
        y = epbuf.combine(lease, lease.expert_out)
        return float((recv.tokens[32768] - x[0]).abs().max()), float((y - x * 6).abs().max())


def _free_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.skipif(_free_bytes() < 9 << 30, reason="needs 9 GB of free memory")
def test_rows_beyond_two_gigabytes() -> None:
    """Rule 11: a row that begins 2^31 bytes into its region is written and read at the right place."""
    [(recv_error, y_error)] = virtual(1, _far_rows)
    assert (recv_error, y_error) == (0, 0)
