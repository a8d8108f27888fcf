"""A layer of small whole numbers whose results each rank knows from its own tokens alone, in exact arithmetic.

Expert e makes of a row r: (1 + e % 3) r + e % 2. The results look at no slot, no zone and no other rank: a check that
shares nothing with the library or with its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from rounds import DTYPES
from torch import Tensor

import epbuf

Results = tuple[Tensor, Tensor, Tensor]


@dataclass
class Tokens:
    """What a rank feeds in.

    Shapes: x, dy [T, H] token dtype; topk_idx [T, K] int64; topk_weights [T, K] float32; live [1] int32.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    dy: Tensor
    live: Tensor

    def copy_(self, other: Tokens) -> None:
        for name, static in vars(self).items():
            static.copy_(getattr(other, name))


def draw_tokens(config: epbuf.EpConfig, num_tokens: int, generator: torch.Generator) -> Tokens:
    """Draw a new routing, one id in ten negative, and how many tokens are live, three in four on average."""

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda")

    dtype = DTYPES[config.token_dtype]
    scores = torch.rand(num_tokens, config.num_experts, generator=generator, device="cuda")
    topk_idx = scores.topk(config.num_topk).indices
    return Tokens(
        x=whole(-2, 3, num_tokens, config.hidden).to(dtype),
        topk_idx=topk_idx.masked_fill(whole(0, 10, *topk_idx.shape) == 0, -1),
        topk_weights=whole(1, 3, *topk_idx.shape).float(),
        dy=whole(-2, 3, num_tokens, config.hidden).to(dtype),
        live=whole(num_tokens // 2, num_tokens + 1, 1).to(torch.int32),
    )


def exact_ops(arena: epbuf.Arena, tokens: Tokens, frame: int | None = None) -> Generator[str, None, Results]:
    """Run forward and backward, stopping before each op; return y, dx, dw."""
    x, weights = tokens.x.detach().requires_grad_(), tokens.topk_weights.detach().requires_grad_()
    yield "dispatch"
    with arena.acquire(frame) as lease:
        recv = epbuf.dispatch(lease, x, tokens.topk_idx, weights, num_tokens=tokens.live)
        factor, shift = _per_row(arena, recv)
        yield "combine"
        y = epbuf.combine(lease, recv.tokens * factor + shift, topk_weights=recv.topk_weights)
        yield "backward"
        dx, dw = torch.autograd.grad(y, [x, weights], tokens.dy)
    return y.detach(), dx, dw


def exact_step(arena: epbuf.Arena, tokens: Tokens, pause: Callable[[str], object] = lambda _: None) -> Results:
    """Run forward and backward, calling `pause` before each op; return y, dx, dw."""
    ops = exact_ops(arena, tokens)
    while True:
        try:
            op = next(ops)
        except StopIteration as end:
            results: Results = end.value
            return results
        pause(op)


def exact_results(config: epbuf.EpConfig, tokens: Tokens) -> Results:
    """Compute y, dx, dw in float64 from one-hot experts."""
    expert = torch.arange(config.num_experts, device="cuda")
    factor, shift = (1 + expert % 3).double(), (expert % 2).double()
    live = torch.arange(len(tokens.x), device="cuda") < tokens.live
    one_hot = (tokens.topk_idx[:, :, None] == expert).double() * live[:, None, None]
    gates = torch.einsum("tke,tk->te", one_hot, tokens.topk_weights.double())
    x, dy = tokens.x.double(), tokens.dy.double()
    y = (gates @ factor)[:, None] * x + (gates @ shift)[:, None]
    dx = (gates @ factor)[:, None] * dy
    dw = (one_hot @ factor) * (x * dy).sum(1, keepdim=True) + (one_hot @ shift) * dy.sum(1, keepdim=True)
    return y, dx, dw


def num_wrong(got: Results, want: Results) -> Any:
    """Count wrong elements without a host read."""
    return sum((g.double() != w).sum() for g, w in zip(got, want, strict=True))


def _per_row(arena: epbuf.Arena, recv: epbuf.Received) -> tuple[Tensor, Tensor]:
    num_local = arena.plan.num_local_experts
    row = torch.arange(len(recv.tokens), device="cuda")
    zone = torch.searchsorted(recv.offs, row, right=True).clamp(max=num_local - 1)
    expert = (arena.rank * num_local + zone)[:, None]
    return (1 + expert % 3).to(recv.tokens.dtype), (expert % 2).to(recv.tokens.dtype)
