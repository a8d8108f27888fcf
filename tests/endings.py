"""End a rank's process in some order:   endings.py ORDER DEVICE WINDOW NUM_RANKS RANK STORE

Captured steps, a lease and an autograd graph are alive when it begins to end: the graphs first, the arena first, the
process group first, or the interpreter with everything alive. Prints "leaving" when nothing of that has failed.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import epbuf
from epbuf.errors import EpbufError, LeaseError

order, device, window, num_ranks, rank = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
group: Any = None
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
if num_ranks > 1:
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[6]}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=50)
    )
    group = dist.group.WORLD

config = epbuf.EpConfig(num_ranks=num_ranks, num_experts=2 * num_ranks, num_topk=2, hidden=64, max_tokens_per_rank=16)
plan = epbuf.Plan.build(config, schedule=epbuf.Schedule(4))
arena = epbuf.Arena.open(plan, group, device=device, window=window)
x = torch.randn(16, 64, device=device, dtype=torch.bfloat16)
ids = torch.rand(16, 2 * num_ranks, device=device).topk(2).indices


def step(x: torch.Tensor) -> torch.Tensor:
    with arena.acquire() as lease, torch.no_grad():
        return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)


captured = epbuf.CapturedStep.capture(arena, step, (x,))
graph: Any = None
assert torch.equal(captured(x), x + x)
if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(x)
    graph.replay()
    assert torch.equal(y, x + x)

lease = arena.acquire(1)  # replays take frame 0
recv = epbuf.dispatch(lease, x.requires_grad_(), ids)
out = epbuf.combine(lease, recv.tokens)
if device == "cuda":
    torch.cuda.synchronize()
if group is not None:
    dist.barrier(group)  # a peer that leaves earlier is another test's matter


def end_graphs() -> None:
    global graph
    captured.close()
    graph = None


def end_group() -> None:
    if group is not None:
        dist.destroy_process_group()


def close_arena_early() -> None:
    try:
        arena.close()
    except LeaseError as error:
        assert "hold this memory" in str(error), error
    else:
        raise AssertionError("an arena closed under a living graph")


if order == "graph_first":
    end_graphs()
    arena.close()
    end_group()
elif order == "arena_first":
    close_arena_early()
    assert torch.equal(captured(x.detach() + 1), (x.detach() + 1) * 2)
    del arena, step
    end_graphs()
    end_group()
elif order == "group_first":
    end_group()
    assert torch.equal(captured(x.detach() + 1), (x.detach() + 1) * 2)
    end_graphs()
    try:
        arena.close()  # gloo's group still meets, a backend that does not must be named
    except EpbufError as error:
        assert "left its group" in str(error), error
print("leaving", flush=True)
