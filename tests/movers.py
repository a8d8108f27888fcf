"""Kernels that are not ours, played by plain torch: they move rows between ranks and know nothing of epbuf's engines.

Ranks exchange everything with everybody through the group, so the moves are slow and easy to check. Expert e multiplies
its rows by 1 + e; with whole numbers every result is exact in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import epbuf
from epbuf.windows.group import Group, as_group

Slots = list[list[tuple[int, int] | None]]  # of (token, k): (rank, row)


class Mover:
    """Moves rows of one rank's leases. Zones follow each other without padding."""

    def __init__(self, config: epbuf.EpConfig, group: Any) -> None:
        self.config, self.group = config, as_group(group)
        self.num_local = config.num_local_experts

    def route(self, lease: epbuf.Lease, topk_idx: Tensor) -> Slots:
        """Write the ends of the zones; return where each of this rank's (token, k) goes."""
        everyone = self.group.all_gather(topk_idx.tolist())
        ends = [0] * self.config.num_ranks
        places: dict[tuple[int, int, int], tuple[int, int]] = {}
        for expert in range(self.config.num_experts):
            owner = expert // self.num_local
            for rank, ids in enumerate(everyone):
                for token, experts in enumerate(ids):
                    for k, chosen in enumerate(experts):
                        if chosen == expert:
                            places[rank, token, k] = owner, ends[owner]
                            ends[owner] += 1
            if owner == self.group.rank:
                lease.offs[expert % self.num_local] = min(ends[owner], len(lease.recv_tokens))
        self.demand = torch.tensor([ends[self.group.rank]])
        return [[places.get((self.group.rank, t, k)) for k in range(len(row))] for t, row in enumerate(topk_idx)]

    def push(self, into: Sequence[Tensor], slots: Slots, parts: Sequence[Tensor]) -> None:
        """Copy each token's row into its slots on every rank; parts of [T, K] go element by element."""
        for rank_slots, rank_parts in self.group.all_gather((slots, [part.clone() for part in parts])):
            for token, row in enumerate(rank_slots):
                for k, slot in enumerate(row):
                    if slot is not None and slot[0] == self.group.rank and slot[1] < len(into[0]):
                        for region, part in zip(into, rank_parts, strict=True):
                            region[slot[1]] = (
                                part[token, k] if part.shape == (len(rank_slots), len(row)) else part[token]
                            )

    def pull(self, rows: Tensor, slots: Slots, *, adds: bool) -> Tensor:
        """Bring each slot's row back: added over k, or as they are."""
        everyone = self.group.all_gather(rows.clone())
        zero = torch.zeros_like(rows[0])
        found = [
            torch.stack([zero if slot is None or slot[1] >= len(rows) else everyone[slot[0]][slot[1]] for slot in row])
            for row in slots
        ]
        return torch.stack([of_token.sum(0) if adds else of_token for of_token in found])


class MoeFunction(torch.autograd.Function):
    """Dispatch, experts and combine on the regions of a lease, forward and backward, with marks of use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, topk_idx: Tensor, lease: epbuf.Lease, mover: Mover) -> Tensor:
        lease.begin("forward")
        slots = mover.route(lease, topk_idx)
        mover.push((lease.recv_tokens, lease.recv_topk_weights), slots, (x, weights))
        factors = factors_of(lease, mover)
        lease.expert_out.copy_(lease.recv_tokens * factors * lease.recv_topk_weights[:, None])
        y = mover.pull(lease.expert_out, slots, adds=True)
        lease.end("forward", total_recv_tokens=mover.demand)
        ctx.lease, ctx.mover, ctx.slots = lease, mover, slots
        ctx.save_for_backward(lease.ticket)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        lease, mover, slots = ctx.lease, ctx.mover, ctx.slots
        _ = ctx.saved_tensors  # the ticket keeps the frame
        lease.begin("backward")
        mover.push((lease.grad_expert_out,), slots, (dy,))
        factors, weights = factors_of(lease, mover), lease.recv_topk_weights[:, None]
        lease.grad_recv_topk_weights.copy_((lease.grad_expert_out * lease.recv_tokens * factors).sum(1))
        lease.grad_recv_tokens.copy_(lease.grad_expert_out * factors * weights)
        dx = mover.pull(lease.grad_recv_tokens, slots, adds=True)
        dw = mover.pull(lease.grad_recv_topk_weights[:, None], slots, adds=False)[..., 0]
        lease.end("backward")
        return dx, dw, None, None, None


def factors_of(lease: epbuf.Lease, mover: Mover) -> Tensor:
    """Return 1 + e for each row.

    Shapes: [C, 1].
    """
    row = torch.arange(len(lease.recv_tokens))
    zone = torch.searchsorted(lease.offs, row, right=True).clamp(max=mover.num_local - 1)
    return (1 + mover.group.rank * mover.num_local + zone)[:, None].to(lease.recv_tokens.dtype)


def moe(arena: epbuf.Arena, mover: Mover, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Tensor:
    """Run one layer on a lease of its own."""
    with arena.acquire() as lease:
        y: Tensor = MoeFunction.apply(x, weights, topk_idx, lease, mover)
        return y


def draw(config: epbuf.EpConfig, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw x, topk_idx, topk_weights and dy of one rank: small whole numbers, one id in five negative."""
    generator = torch.Generator().manual_seed(seed)
    shape = config.max_tokens_per_rank, config.num_topk
    ids = torch.rand(shape[0], config.num_experts, generator=generator).topk(config.num_topk).indices
    ids = ids.masked_fill(torch.rand(shape, generator=generator) < 0.2, -1)

    def whole(*sizes: int) -> Tensor:
        return torch.randint(-3, 4, sizes, generator=generator).float()

    return whole(shape[0], config.hidden), ids, whole(*shape), whole(shape[0], config.hidden)


def layer_results(x: Tensor, topk_idx: Tensor, weights: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y, dx and dw of one rank from its own tokens alone."""
    factor = (1 + topk_idx).float() * (topk_idx >= 0)
    gate = (factor * weights).sum(1, keepdim=True)
    return gate * x, gate * dy, factor * (x * dy).sum(1, keepdim=True)


__all__ = ["Group", "MoeFunction", "Mover", "draw", "factors_of", "layer_results", "moe"]
