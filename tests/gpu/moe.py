"""An MoE layer as users write it: a router, grouped GEMMs over `recv.offs`, a weighted combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpus import open_arena
from routings import base_config
from torch import Tensor, nn

import epbuf

HIDDEN, TOKENS = 64, 32


class MoE(nn.Module):
    """Experts lie on their ranks; each rank draws its own router and experts from `seed`."""

    def __init__(self, arena: epbuf.Arena, seed: int) -> None:
        super().__init__()
        config = arena.plan.config
        generator = torch.Generator("cuda").manual_seed(seed + 1000 * arena.rank)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda") / config.hidden**0.5

        self.router = nn.Parameter(draw(config.hidden, config.num_experts))
        self.up = nn.Parameter(draw(arena.plan.num_local_experts, config.hidden, 2 * config.hidden).bfloat16())
        self.down = nn.Parameter(draw(arena.plan.num_local_experts, 2 * config.hidden, config.hidden).bfloat16())
        self.arena = arena

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x and result [T, H] bf16."""
        weights, ids = torch.softmax(x.float() @ self.router, dim=1).topk(self.arena.plan.config.num_topk, dim=1)
        with self.arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, ids, weights)
            hidden = F.silu(torch._grouped_mm(recv.tokens, self.up, offs=recv.offs))
            rows = torch._grouped_mm(hidden, self.down, offs=recv.offs)
            return epbuf.combine(lease, rows, topk_weights=recv.topk_weights)


def open_moe_arena(group: Any, window: str, num_ranks: int, num_frames: int = 1) -> epbuf.Arena:
    config = base_config(num_ranks, hidden=HIDDEN, max_tokens_per_rank=TOKENS, token_dtype="bf16", expert_alignment=16)
    return open_arena(group, window, config, num_frames)


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Draw tokens [T, H] bf16 and targets [T, H] float32."""
    generator = torch.Generator("cuda").manual_seed(77 + rank)
    drawn = torch.randn(count, 2, TOKENS, HIDDEN, generator=generator, device="cuda")
    return [(x.bfloat16(), target) for x, target in drawn]


def train_step(model: MoE, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a whole training step: forward, backward, optimiser."""

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
