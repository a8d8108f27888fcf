"""Routing as Megatron-Core has it, a map of tokens and experts, and as epbuf takes it, top-k."""

from __future__ import annotations

import torch


def topk_of_map(
    routing_map: torch.Tensor, probs: torch.Tensor, num_topk: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return each token's experts in ascending order, and their probabilities; -1 and 0 where it has fewer.

    Reads nothing on the host. Differentiable in `probs`. A probability of 0 is no reason to leave an expert out.

    Shapes: routing_map [T, E] bool, at most K true in a row; probs [T, E]; returns topk_idx [T, K] int64 and
        topk_weights [T, K] of the dtype of probs.

    Example: a row of the map 0 1 0 1 with K = 3 gives 1, 3, -1.
    """
    num_tokens, num_experts = routing_map.shape
    ids = torch.arange(num_experts, device=routing_map.device)
    candidates = torch.where(routing_map, ids, num_experts)  # ties are all "none", so topk has no choice to make
    if num_topk > num_experts:
        filler = candidates.new_full((num_tokens, num_topk - num_experts), num_experts)
        candidates = torch.cat([candidates, filler], dim=1)
    found = candidates.topk(num_topk, dim=1, largest=False, sorted=True).values
    is_none = found == num_experts
    weights = probs.gather(1, found.masked_fill(is_none, 0)).masked_fill(is_none, 0)
    return found.masked_fill(is_none, -1), weights


def map_of_topk(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the routing map and the probabilities of top-k; the inverse of `topk_of_map`.

    Shapes: topk_idx [T, K] int64, negative: no expert; topk_weights [T, K]; returns routing_map [T, E] bool and
        probs [T, E] of the dtype of topk_weights.
    """
    is_none = topk_idx < 0
    column = topk_idx.masked_fill(is_none, num_experts)  # one column more, for those that name no expert
    shape = (topk_idx.shape[0], num_experts + 1)
    routing_map = torch.zeros(shape, dtype=torch.bool, device=topk_idx.device).scatter(1, column, True)
    probs = topk_weights.new_zeros(shape).scatter(1, column, topk_weights)
    return routing_map[:, :num_experts], probs[:, :num_experts]
