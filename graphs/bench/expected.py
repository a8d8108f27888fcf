"""What a step must give, worked out in plain torch from the seeds: no part of epbuf is used.

Expert e multiplies its rows by a factor of its own and rounds to bf16, so a row in the wrong slot shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from measure import Shape
from torch import Tensor

PART_ROWS = 4096


def draw_tokens(shape: Shape, rank: int, device: torch.device) -> Tensor:
    """Draw the tokens of a rank; every process can draw those of every rank.

    Shapes: [T, H] bf16.
    """
    generator = torch.Generator(device).manual_seed(rank)
    return torch.randn(shape.num_tokens, shape.hidden, generator=generator, device=device, dtype=torch.bfloat16)


def draw_weights(shape: Shape, rank: int) -> Tensor:
    """Draw the top-k weights of a rank, on the CPU.

    Shapes: [T, K] float32.
    """
    return torch.rand(shape.num_tokens, shape.num_topk, generator=torch.Generator().manual_seed(1000 + rank))


@dataclass
class Expected:
    """The right results of one rank.

    Attributes:
        num_rows: rows that the rank receives, padding included: its offs[-1].
        offs: [L] int32.
        recv: [num_rows, H], padding rows 0.
        recv_weights: [num_rows] float32, padding rows 0.
        expert_rows: [C, H], what the experts make of them; rows past num_rows are NaN.
        y: [T, H], their sum for each token, in k order, in float32, rounded once; by rank: such sums of each rank's
            rows, added in rank order.
        weighted_y: [T, H], the same of rows that were multiplied by their weight and rounded.
    """

    num_rows: int
    offs: Tensor
    recv: Tensor
    recv_weights: Tensor
    expert_rows: Tensor
    y: Tensor
    weighted_y: Tensor


def expect(
    shape: Shape, rank: int, capacity_rows: int, device: torch.device, combine_order: str = "k"
) -> Expected:  # fmt: skip
    """Work everything out for one rank."""
    row, source, slot, expert, offs = _rows_of(shape, rank)
    num_rows = int(offs[-1])
    recv = torch.zeros(num_rows, shape.hidden, dtype=torch.bfloat16, device=device)
    recv_weights = torch.zeros(num_rows)
    for peer in range(shape.num_ranks):
        mine = source == peer
        token = (slot[mine] // shape.num_topk).to(device)
        recv[row[mine].to(device)] = draw_tokens(shape, peer, device)[token]
        recv_weights[row[mine]] = draw_weights(shape, peer).flatten()[slot[mine]]
    factors = torch.zeros(num_rows)
    factors[row] = _factor(expert)
    expert_rows = torch.full((capacity_rows, shape.hidden), torch.nan, dtype=torch.bfloat16, device=device)
    expert_rows[:num_rows] = _scaled(recv, factors.to(device))
    add = _sums_by_rank if combine_order == "by_rank" else _sums
    y, weighted_y = add(shape, rank, device)
    return Expected(num_rows, offs.int().to(device), recv, recv_weights.to(device), expert_rows, y, weighted_y)


def _rows_of(shape: Shape, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return row, source rank, token * K + k and expert of all that a rank receives; and the ends of its zones.

    A stable sort by expert keeps the order (source, token, k) within a zone.
    """
    ids = torch.stack([shape.topk_idx(peer) for peer in range(shape.num_ranks)]).flatten()
    mine = (ids // shape.num_local_experts == rank).nonzero().flatten()
    mine = mine[ids[mine].argsort(stable=True)]
    zone = ids[mine] - rank * shape.num_local_experts
    counts = zone.bincount(minlength=shape.num_local_experts)
    padded = (counts + shape.alignment - 1) // shape.alignment * shape.alignment
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)  # of a zone, by the padding before it
    row = torch.arange(len(mine)) + shift[zone]
    num_slots = shape.num_tokens * shape.num_topk
    return row, mine // num_slots, mine % num_slots, ids[mine], padded.cumsum(0)


def _factor(expert: Tensor) -> Tensor:
    return (1.0 + expert % 5) / 4


def _scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row by its factor in float32 and round once; a part at a time, because float32 rows are large."""
    parts = zip(rows.split(PART_ROWS), factors.split(PART_ROWS), strict=True)
    return torch.cat([(part.float() * by.unsqueeze(1)).to(rows.dtype) for part, by in parts])


def _sums(shape: Shape, rank: int, device: torch.device, on_rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Add the rows of each token, or those that experts of one rank make."""
    x, topk_idx = draw_tokens(shape, rank, device), shape.topk_idx(rank)
    weights = draw_weights(shape, rank).to(device)
    plain, weighted = (torch.zeros(x.shape, device=device) for _ in range(2))
    for k in range(shape.num_topk):
        is_added = torch.ones(len(x), dtype=torch.bool)
        if on_rank is not None:
            is_added = topk_idx[:, k] // shape.num_local_experts == on_rank
        is_added = is_added.to(device)[:, None]
        rows = _scaled(x, _factor(topk_idx[:, k]).to(device))
        plain += rows.float() * is_added
        weighted += _scaled(rows, weights[:, k]).float() * is_added
    return plain.to(x.dtype), weighted.to(x.dtype)


def _sums_by_rank(shape: Shape, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    size = (shape.num_tokens, shape.hidden)
    plain, weighted = (torch.zeros(size, device=device) for _ in range(2))
    for other in range(shape.num_ranks):
        of_rank, weighted_of_rank = _sums(shape, rank, device, other)
        plain += of_rank.float()
        weighted += weighted_of_rank.float()
    return plain.bfloat16(), weighted.bfloat16()


def require_equal(what: str, ours: Tensor, right: Tensor) -> None:
    """End the program unless both hold the same values."""
    if not torch.equal(ours, right):
        num_wrong = int((ours != right).sum())
        raise SystemExit(f"{what} differs from plain torch in {num_wrong} of {right.numel()} elements")
