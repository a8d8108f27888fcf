"""End a rank's process with everything alive:   leave_alive.py WINDOW NUM_RANKS RANK STORE"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import epbuf

window, num_ranks, rank, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.cuda.set_device(rank % torch.cuda.device_count())
group: Any = None
if num_ranks > 1:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=50)
    )
    group = dist.group.WORLD

config = epbuf.EpConfig(num_ranks=num_ranks, num_experts=2 * num_ranks, num_topk=2, hidden=64, max_tokens_per_rank=16)
plan = epbuf.Plan.build(config, schedule=epbuf.Schedule(4))
arena = epbuf.Arena.open(plan, group, device="cuda", window=window)
x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
ids = torch.rand(16, 2 * num_ranks, device="cuda").topk(2).indices


def step(x: torch.Tensor) -> torch.Tensor:
    with arena.acquire() as lease, torch.no_grad():
        return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)


captured = epbuf.CapturedStep.capture(arena, step, (x,))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = step(x)
graph.replay()
assert torch.equal(captured(x), y)

lease = arena.acquire()
recv = epbuf.dispatch(lease, x.requires_grad_(), ids)
out = epbuf.combine(lease, recv.tokens)
torch.cuda.synchronize()
if group is not None:
    dist.barrier(group)  # a peer that leaves earlier is another test's matter
print("leaving", flush=True)
