"""Gradients of whole layers: gradcheck, a dense model without epbuf, pipelines of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import size_of, virtual
from rounds import assert_same, draw_inputs
from routings import Case, base_config, named_case
from torch import Tensor

import epbuf

Spread = Callable[..., list[Any]]


def expert_of_row(recv: epbuf.Received) -> Tensor:
    """Return the local expert of each row; rows past the last zone get the last one."""
    rows = torch.arange(len(recv.tokens))
    return torch.searchsorted(recv.offs, rows, right=True).clamp(max=len(recv.offs) - 1)


def layer(lease: epbuf.Lease, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Compute y[t] = sum over k of w[t, k] * scales[expert] * x[t] through epbuf; scales [L] belong to this rank.

    The gradient of `scales` reduces over all C rows, so both factors are masked: rows past the last zone are garbage.
    """
    recv = epbuf.dispatch(lease, x, ids, weights)
    mask = recv.row_mask()[:, None]
    rows = torch.where(mask, recv.tokens, 0) * scales[expert_of_row(recv)][:, None]
    return epbuf.combine(lease, torch.where(mask, rows, 0), topk_weights=recv.topk_weights)


def dense(x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Compute the same without epbuf; scales [E] of all ranks. Ids below 0 contribute nothing."""
    factors = torch.where(ids >= 0, weights * scales[ids.clamp(min=0)], 0)
    return x * factors.sum(1, keepdim=True)


def _gradcheck(rank: int, group: Any, how: str) -> bool:
    num_ranks = size_of(group)
    config = base_config(
        num_ranks, num_experts=2 * num_ranks, num_topk=2, hidden=4, max_tokens_per_rank=3, token_dtype="fp32",
        expert_alignment=2,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float().requires_grad_()

    ids = torch.randint(-1, config.num_experts, (3, 2), generator=generator)
    scales = torch.tensor([2.0, -3.0])
    x, weights = draw(3, 4), draw(3, 2)
    plan = epbuf.Plan.build(config, schedule=epbuf.Schedule(3, 3))  # gradcheck keeps graphs while it takes differences
    with epbuf.Arena.open(plan, group) as arena:

        def weighted(x: Tensor, weights: Tensor) -> Tensor:
            with arena.acquire() as lease:
                return layer(lease, x, ids, weights, scales)

        def received(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, ids, weights)
                mask = recv.row_mask()
                return torch.where(mask[:, None], recv.tokens, 0), torch.where(mask, recv.topk_weights, 0)

        if how == "layer":
            return torch.autograd.gradcheck(
                weighted, (x, weights), eps=2**-4, atol=0, rtol=0, nondet_tol=0, fast_mode=False
            )
        # A rank's rows come from all ranks, so only one rank alone is a function of its own inputs.
        return torch.autograd.gradcheck(
            received, (x, weights), eps=2**-4, atol=0, rtol=0, nondet_tol=0, fast_mode=False
        )


@pytest.mark.filterwarnings("ignore:Input #.*double precision")
def test_gradcheck_one_rank() -> None:
    """Rule 7: the Jacobian of a layer equals the central difference to the bit (the ops are linear)."""
    assert _gradcheck(0, None, "layer")


@pytest.mark.filterwarnings("ignore:Input #.*double precision")
def test_gradcheck_of_received_rows() -> None:
    """Rule 7: the Jacobian of dispatch alone, rows and weights, equals the central difference to the bit."""
    assert _gradcheck(0, None, "dispatch")


@pytest.mark.filterwarnings("ignore:Input #.*double precision")
def test_gradcheck_three_ranks() -> None:
    """Rule 7: the same with three ranks that take their differences at the same time."""
    assert virtual(3, _gradcheck, "layer") == [True] * 3


def _whole(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, weights, scales [L] and dy of one rank, small whole numbers in float32."""
    inputs = draw_inputs(case, rank, True)
    generator = torch.Generator().manual_seed(rank)
    scales = torch.randint(-3, 4, (case.config.num_local_experts,), generator=generator).float()
    return inputs.x.requires_grad_(), inputs.topk_weights.requires_grad_(), scales.requires_grad_(), inputs.dy


def _train_once(rank: int, group: Any, case: Case, **config: Any) -> list[Tensor]:
    x, weights, scales, dy = _whole(case, rank)
    sizes = epbuf.EpConfig(**(case.config.model_dump(exclude_defaults=True) | config))
    with epbuf.Arena.open(epbuf.Plan.build(sizes), group) as arena:
        with arena.acquire() as lease:
            y = layer(lease, x, case.topk_idx[rank], weights, scales)
        y.backward(dy)
    return [t.detach().clone() for t in (y, x.grad, weights.grad, scales.grad) if t is not None]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_layer_equals_dense_model(num_ranks: int, spread: Spread) -> None:
    """Rules 6 and 7: y, dx, dw and the experts' own gradients equal a model that knows no routing, to the bit."""
    case = named_case("some_negative", num_ranks, 16, "fp32")
    _assert_dense(case, spread(num_ranks, _train_once, case))


def _aliased(rank: int, group: Any, case: Case) -> list[Tensor]:
    return _train_once(rank, group, case, alias=(("grad_expert_out", "grad_recv_tokens"),))


def test_layer_with_aliased_gradients_equals_dense_model() -> None:
    """Rules 7 and 13: with grad_expert_out and grad_recv_tokens in the same bytes every gradient is the same."""
    case = named_case("some_negative", 2, 16, "fp32")
    _assert_dense(case, virtual(2, _aliased, case))


def _assert_dense(case: Case, results: list[list[Tensor]]) -> None:
    num_ranks = len(results)
    parts = [_whole(case, rank) for rank in range(num_ranks)]
    scales = torch.cat([part[2].detach() for part in parts]).requires_grad_()
    outs = [dense(x, case.topk_idx[rank], weights, scales) for rank, (x, weights, _, _) in enumerate(parts)]
    torch.autograd.backward(outs, [part[3] for part in parts])
    assert scales.grad is not None
    for rank, (y, dx, dw, dscales) in enumerate(results):
        assert_same(y, outs[rank].detach(), f"y of rank {rank}")
        assert_same(dx, parts[rank][0].grad, f"dx of rank {rank}")
        assert_same(dw, parts[rank][1].grad, f"dw of rank {rank}")
        assert_same(dscales, scales.grad.chunk(num_ranks)[rank], f"experts' gradient of rank {rank}")


def _trimmed(rank: int, group: Any, case: Case) -> list[Tensor]:
    x, weights, scales, dy = _whole(case, rank)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena:
        for _ in range(2):  # the second time over what the first one left in the regions
            x.grad = weights.grad = scales.grad = None
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, case.topk_idx[rank], weights).trim()
                rows = recv.tokens * scales[expert_of_row(recv)][:, None]
                y = epbuf.combine(lease, rows, topk_weights=recv.topk_weights)
            y.backward(dy)
            del recv, rows
    return [t.detach().clone() for t in (y, x.grad, weights.grad, scales.grad) if t is not None]


@pytest.mark.parametrize("routing", ["some_negative", "one_expert", "empty_rank", "all_negative"])
def test_trimmed_layer_equals_dense_model(routing: str) -> None:
    """Rules 3 and 7: over trim() an expert may reduce over all rows without a mask, forward and backward."""
    case = named_case(routing, 2, 16, "fp32")
    _assert_dense(case, virtual(2, _trimmed, case))


def _into_out(rank: int, group: Any, case: Case) -> list[Tensor]:
    x, weights, scales, dy = _whole(case, rank)
    out = torch.full_like(x, float("nan"))
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena:
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, case.topk_idx[rank], weights)
            mask = recv.row_mask()[:, None]
            rows = torch.where(mask, torch.where(mask, recv.tokens, 0) * scales[expert_of_row(recv)][:, None], 0)
            y = epbuf.combine(lease, rows, topk_weights=recv.topk_weights, out=out)
        y.backward(dy)
    return [t.detach().clone() for t in (out, x.grad, weights.grad, scales.grad) if t is not None]


def test_combine_into_out_is_differentiable() -> None:
    """Rules 6 and 7: with out= y is written there, and its gradient is the same."""
    case = named_case("some_negative", 2, 16, "fp32")
    _assert_dense(case, virtual(2, _into_out, case))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


def _undefined(rank: int, group: Any) -> Tensor | None:
    case = named_case("balanced", 2, 1, "fp32")
    x, weights, scales, dy = _whole(case, rank)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena:
        with arena.acquire() as lease:
            y = layer(lease, x, case.topk_idx[rank], weights, scales)
        (_NoGradient.apply(y) if rank == 0 else y).backward(dy)
    return x.grad


def test_undefined_gradient_of_y() -> None:
    """Rule 7: a rank whose y receives no gradient (None) sends zero rows; the other rank's gradients are right."""
    case = named_case("balanced", 2, 1, "fp32")
    mine, other = virtual(2, _undefined)
    assert mine is None or not mine.any()
    parts = [_whole(case, rank) for rank in range(2)]
    scales = torch.cat([part[2].detach() for part in parts])
    x, weights, _, dy = parts[1]
    dense(x, case.topk_idx[1], weights, scales).backward(dy)
    assert_same(other, x.grad, "dx of rank 1")


def _pipeline(rank: int, group: Any, schedule: epbuf.Schedule, order: str) -> list[Tensor]:
    case = named_case("some_negative", 2, 16, "fp32")
    x, weights, scales, dy = _whole(case, rank)
    ids = case.topk_idx[rank]
    steps = [(step[0], int(step[1:])) for step in order.split()]
    outs: dict[int, Tensor] = {}
    with epbuf.Arena.open(epbuf.Plan.build(case.config, schedule=schedule), group) as arena:
        for kind, microbatch in steps:
            if kind == "F":
                y = x * (microbatch + 1)
                for index in range(2):
                    with arena.acquire(schedule.frame(index, microbatch)) as lease:
                        y = layer(lease, y, ids, weights, scales)
                outs[microbatch] = y
            else:
                outs.pop(microbatch).backward(dy)
    return [t.clone() for t in (x.grad, weights.grad, scales.grad) if t is not None]


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        pytest.param(epbuf.Schedule.sequential(2), "F0 B0 F1 B1 F2 B2", id="sequential"),
        pytest.param(epbuf.Schedule.gpipe(2, 3), "F0 F1 F2 B2 B1 B0", id="gpipe"),
        pytest.param(epbuf.Schedule.one_f_one_b(2, 2, 0, 3), "F0 F1 B0 F2 B1 B2", id="1f1b"),
    ],
)
def test_microbatches_in_flight(schedule: epbuf.Schedule, order: str) -> None:
    """Rules 13 to 15: two layers and three micro-batches on the frames that the schedule names give dense gradients."""
    case = named_case("some_negative", 2, 16, "fp32")
    parts = [_whole(case, rank) for rank in range(2)]
    scales = torch.cat([part[2].detach() for part in parts]).requires_grad_()
    for microbatch in range(3):
        for rank, (x, weights, _, dy) in enumerate(parts):
            y = x * (microbatch + 1)
            for _ in range(2):
                y = dense(y, case.topk_idx[rank], weights, scales)
            y.backward(dy)
    assert scales.grad is not None
    for rank, (dx, dw, dscales) in enumerate(virtual(2, _pipeline, schedule, order)):
        assert_same(dx, parts[rank][0].grad, f"dx of rank {rank}")
        assert_same(dw, parts[rank][1].grad, f"dw of rank {rank}")
        assert_same(dscales, scales.grad.chunk(2)[rank], f"experts' gradient of rank {rank}")
