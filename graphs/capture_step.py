"""Capture one dispatch, experts and combine; replay it with routings that the capture never saw.

    python graphs/capture_step.py                              # one rank
    torchrun --nproc-per-node 2 graphs/capture_step.py         # two ranks

Expert e multiplies its rows by e + 1, so the right answer is known:
y[t] = x[t] * sum over k of topk_weights[t, k] * (topk_idx[t, k] + 1).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

import epbuf

NUM_EXPERTS, NUM_TOPK, HIDDEN, MAX_TOKENS = 8, 2, 64, 128


def run(num_replays: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Capture once, then replay with new inputs and compare each result with the right one."""
    rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    config = epbuf.EpConfig(
        num_ranks=num_ranks,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        max_tokens_per_rank=MAX_TOKENS,
        token_dtype="fp32",
    )
    factors = (torch.arange(NUM_EXPERTS, device=device) + 1.0).chunk(num_ranks)[rank]
    torch.manual_seed(rank)
    with epbuf.Arena.open(epbuf.Plan.build(config), group, device=device) as arena:

        def layer(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
            with torch.no_grad(), arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, topk_idx, topk_weights)
                rows = multiply_zones(recv.tokens, recv.offs, factors)
                return epbuf.combine(lease, rows, topk_weights=recv.topk_weights)

        step = epbuf.CapturedStep.capture(arena, layer, draw_inputs(device))
        for replay in range(num_replays):
            x, topk_idx, topk_weights = draw_inputs(device)
            y = step(x, topk_idx, topk_weights)
            torch.testing.assert_close(y, x * (topk_weights * (topk_idx + 1)).sum(1, keepdim=True))
            if rank == 0:
                print(f"replay {replay}: new routing, right result, at {y.data_ptr():#x}")
        step.close()


def draw_inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens [T, H], a random routing [T, K] and its weights [T, K]."""
    topk_weights, topk_idx = torch.rand(MAX_TOKENS, NUM_EXPERTS, device=device).topk(NUM_TOPK)
    return torch.randn(MAX_TOKENS, HIDDEN, device=device), topk_idx, topk_weights


def multiply_zones(rows: Tensor, offs: Tensor, factors: Tensor) -> Tensor:
    """Multiply the rows of each zone by its factor. Rows past `offs[-1]` are nobody's; what becomes of them is too."""
    zone = torch.bucketize(torch.arange(len(rows), device=rows.device), offs, right=True)
    return rows * factors[zone.clamp(max=len(factors) - 1)].unsqueeze(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run on one rank, or on those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=5)
    num_replays = parser.parse_args(argv).replays
    if num_replays < 1:
        parser.error(f"--replays {num_replays}: give at least 1")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        run(num_replays, device, None)
        return 0
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    run(num_replays, device, dist.group.WORLD)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
