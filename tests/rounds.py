"""One full round of a case on one rank, and what the reference says it must give.

A round is dispatch, combine, combine backward, dispatch backward, over memory poisoned with NaN: a region that the
contract says is written shows no NaN afterwards, one that it says is not written keeps it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from ranks import raised
from routings import Case
from torch import Tensor

import epbuf
from epbuf import reference
from epbuf.errors import LeaseError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAN = float("nan")
JUNK = -7  # poison of integer regions


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What one rank feeds into a round.

    Shapes: topk_idx [T_r, K]; num_tokens [1] or None; x, dy [T_r, H] token dtype; topk_weights [T_r, K] f32;
        expert_out, grad_recv_tokens [C, H] token dtype; grad_recv_topk_weights [C] f32.
    """

    topk_idx: Tensor
    num_tokens: Tensor | None
    x: Tensor
    topk_weights: Tensor
    expert_out: Tensor
    dy: Tensor
    grad_recv_tokens: Tensor
    grad_recv_topk_weights: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Return what `function` makes of every tensor."""
        return Inputs(**{name: None if value is None else function(value) for name, value in vars(self).items()})


def draw_inputs(case: Case, rank: int, whole: bool, device: str = "cpu") -> Inputs:
    """Draw the inputs of one rank: normal, or small whole numbers whose sums are exact in every dtype.

    They are drawn on CPU, so that every device sees the same.
    """
    generator = torch.Generator().manual_seed(case.seed + 1000 * rank)
    dtype = DTYPES[case.config.token_dtype]
    num_tokens, rows = len(case.topk_idx[rank]), epbuf.Plan.build(case.config).capacity_rows

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        if whole:
            return torch.randint(-3, 4, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    return Inputs(
        topk_idx=case.topk_idx[rank],
        num_tokens=case.live_tokens(rank),
        x=draw(num_tokens, case.config.hidden),
        topk_weights=draw(num_tokens, case.config.num_topk, dtype=torch.float32),
        expert_out=draw(rows, case.config.hidden),
        dy=draw(num_tokens, case.config.hidden),
        grad_recv_tokens=draw(rows, case.config.hidden),
        grad_recv_topk_weights=draw(rows, dtype=torch.float32),
    ).map(lambda tensor: tensor.to(device))


def play(rank: int, group: Any, case: Case, weighted: bool, whole: bool) -> dict[str, Tensor]:
    """Open an arena, run two rounds of a case over poison, and return copies of everything the second one gave."""
    inputs = draw_inputs(case, rank, whole)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), group) as arena:
        play_round(arena, inputs, weighted)
        return play_round(arena, inputs, weighted)


def play_round(arena: epbuf.Arena, inputs: Inputs, weighted: bool) -> dict[str, Tensor]:
    """Run one round; poison each region before the op that writes it, and what backward leaves behind.

    Reads nothing on the host, so that it can be captured.
    """
    x, topk_weights = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone().requires_grad_()
    with arena.acquire() as lease:
        poison_frame(lease)
        recv = epbuf.dispatch(lease, x, inputs.topk_idx, topk_weights, num_tokens=inputs.num_tokens)
        got = received(lease, recv, len(x))
        lease.expert_out.fill_(NAN)
        expert_out = _poison_tail(inputs.expert_out, recv.offs).requires_grad_()
        y = epbuf.combine(lease, expert_out, topk_weights=recv.topk_weights if weighted else None)
        wanted = [expert_out, recv.topk_weights] if weighted else [expert_out]
        grads = torch.autograd.grad(y, wanted, inputs.dy)
        got |= {"y": y.detach().clone(), "grad_expert_out": grads[0].clone()}
        if weighted:
            got["grad_weights"] = grads[1].clone()
        for region in (grads[0], lease.grad_recv_tokens, lease.grad_recv_topk_weights):
            region.fill_(NAN)
        grad_recv = (
            _poison_tail(inputs.grad_recv_tokens, recv.offs),
            _poison_tail(inputs.grad_recv_topk_weights, recv.offs),
        )
        dx, dw = torch.autograd.grad([recv.tokens, recv.topk_weights], [x, topk_weights], grad_recv)
        return got | {"dx": dx.clone(), "dw": dw.clone()}


def reuse_early(arena: epbuf.Arena, x: Tensor, topk_idx: Tensor, dy: Tensor, warmup: int) -> str:
    """Capture forward and backward apart and replay the backward twice; return what the second time raises."""
    kept: list[Tensor] = []
    lease = arena.acquire()

    def forward(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        kept[:] = [x, epbuf.combine(lease, epbuf.dispatch(lease, x, topk_idx).tokens)]
        return kept[1].detach()

    def backward(dy: Tensor) -> Tensor:
        return torch.autograd.grad(kept[1], kept[0], dy, retain_graph=True)[0]

    first = epbuf.CapturedStep.capture(arena, forward, (x,), warmup=warmup)
    second = epbuf.CapturedStep.capture(arena, backward, (dy,), warmup=0)
    first(x), second(dy)
    second.check()
    second(dy)
    message = raised(LeaseError, second.check)
    kept.clear()
    lease.release()
    first.close(), second.close()
    return message


def poison_frame(lease: epbuf.Lease) -> None:
    """Fill every region that dispatch must write."""
    for name in ("recv_tokens", "recv_topk_weights", "overflow"):
        getattr(lease, name).fill_(NAN)
    for name in ("slot_map", "offs", "counts"):
        getattr(lease, name).fill_(JUNK)


def received(lease: epbuf.Lease, recv: epbuf.Received, num_tokens: int) -> dict[str, Tensor]:
    """Copy everything that a dispatch gave."""
    names = ("offs", "tokens_per_expert", "valid_tokens_per_expert", "total_recv_tokens", "overflow")
    return {name: getattr(recv, name).clone() for name in names} | {
        "slot_map": lease.slot_map[:num_tokens].clone(),
        "recv_tokens": recv.tokens.detach().clone(),
        "recv_topk_weights": recv.topk_weights.detach().clone(),
    }


@functools.cache
def expected(case: Case, weighted: bool, whole: bool) -> list[dict[str, Tensor]]:
    """Compute with the reference what every rank of `play` must give."""
    ranks = range(case.config.num_ranks)
    inputs = [draw_inputs(case, rank, whole) for rank in ranks]
    capacity = len(inputs[0].expert_out)
    routing = reference.route(case.config, capacity, case.topk_idx, case.num_tokens)
    tokens, weights, _ = reference.dispatch(
        case.config, capacity, routing, [i.x for i in inputs], [i.topk_weights for i in inputs]
    )
    expert_out, dy = [i.expert_out for i in inputs], [i.dy for i in inputs]
    y = reference.combine(case.config, routing, expert_out, weights if weighted else None)
    dx, dw = reference.dispatch_backward(
        case.config, routing, [i.grad_recv_tokens for i in inputs], [i.grad_recv_topk_weights for i in inputs]
    )
    want: dict[str, list[Tensor]] = {
        "slot_map": routing.slot_map,
        "offs": routing.offs,
        "tokens_per_expert": routing.tokens_per_expert,
        "valid_tokens_per_expert": routing.valid_tokens_per_expert,
        "total_recv_tokens": routing.total_recv_tokens,
        "overflow": [routing.overflow for _ in ranks],
        "recv_tokens": tokens,
        "recv_topk_weights": weights,
        "y": y,
        "dx": dx,
        "dw": dw,
    }
    if weighted:
        want["grad_expert_out"], want["grad_weights"] = reference.combine_backward_weighted(
            case.config, capacity, routing, dy, expert_out, weights
        )
    else:
        want["grad_expert_out"] = reference.combine_backward(case.config, capacity, routing, dy)
    return [{name: values[rank] for name, values in want.items()} for rank in ranks]


def assert_same(actual: Tensor, wanted: Tensor, what: str) -> None:
    """Compare dtype, shape and every element, NaN equal to NaN and -0 to +0."""
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape), (
        f"{what}: {actual.dtype} {tuple(actual.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
    )
    same = (actual == wanted) | (actual.isnan() & wanted.isnan())
    if not bool(same.all()):
        where = (~same).nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{what}: {len(where)} of {same.numel()} elements differ, the first at {first}: "
            f"{actual[first].item()} instead of {wanted[first].item()}"
        )


def assert_rows_same(actual: Tensor, wanted: Tensor, num_rows: int, what: str) -> None:
    """Compare the rows below `num_rows`; the others are garbage by contract."""
    assert_same(actual[:num_rows], wanted[:num_rows], what)


def assert_round(
    got: dict[str, Tensor], want: dict[str, Tensor], what: str, but: tuple[str, ...] = (), *,
    written: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Compare everything that a round gave on one rank, whatever device it lies on; garbage rows may be anything.

    Rows past the last zone keep their poison, but for those of the names in `written`.
    """
    end = int(want["offs"][-1])
    for name in (name for name in want if name not in but):
        rows = slice(end if name in ("grad_expert_out", "grad_weights", *written) else None)
        assert_same(got[name].cpu()[rows], want[name][rows], f"{name} of {what}")


def compare(got: list[dict[str, Tensor]], want: list[dict[str, Tensor]], names: tuple[str, ...]) -> None:
    """Compare what every rank of `play` gave, by name."""
    for rank, (mine, reference_) in enumerate(zip(got, want, strict=True)):
        for name in names:
            assert_same(mine[name], reference_[name], f"{name} of rank {rank}")


def compare_rows(got: list[dict[str, Tensor]], want: list[dict[str, Tensor]], names: tuple[str, ...]) -> None:
    """Compare rows below offs[-1] of what every rank gave, by name; the others are garbage by contract."""
    for rank, (mine, reference_) in enumerate(zip(got, want, strict=True)):
        for name in names:
            assert_rows_same(mine[name], reference_[name], int(reference_["offs"][-1]), f"{name} of rank {rank}")


def _poison_tail(rows: Tensor, offs: Tensor) -> Tensor:
    tail = torch.arange(len(rows), device=rows.device) >= offs[-1]
    return rows.masked_fill(tail.view(-1, *[1] * (rows.ndim - 1)), NAN)
