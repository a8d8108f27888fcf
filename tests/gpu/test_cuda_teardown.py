"""Contract rules 16 and 17: graphs, arenas and processes end in any order."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import GpuPool, open_arena, places
from graphed import captured
from ranks import raised
from rounds import Inputs, assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf.errors import LeaseError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

EVERY_WINDOW = places((1, "local"), (2, "torch_symm"), (2, "nccl"))


def _capture(arena: epbuf.Arena, rank: int, num_ranks: int) -> tuple[torch.cuda.CUDAGraph, Inputs, Tensor]:
    """Capture a forward of the balanced routing; return the graph, its static inputs, and its y: three times x."""
    inputs = draw_inputs(named_case("balanced", num_ranks), rank, True, "cuda")

    def step() -> Tensor:
        with arena.acquire() as lease, torch.no_grad():
            return epbuf.combine(lease, epbuf.dispatch(lease, inputs.x, inputs.topk_idx).tokens)

    graph, y = captured(step)
    return graph, inputs, y


def _refused_close(rank: int, group: Any, window: str, num_ranks: int) -> str:
    with open_arena(group, window, base_config(num_ranks)) as arena:
        graph, inputs, y = _capture(arena, rank, num_ranks)
        message = raised(LeaseError, arena.close)
        inputs.x.add_(1)
        graph.replay()
        assert_same(y, inputs.x * 3, "y after the refused close")
        del graph
        arena.close()
        arena.close()
    return message


@EVERY_WINDOW
def test_close_is_refused_while_a_graph_lives(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 16: close() lists a graph of plain torch.cuda.graph with its place; once that is gone it works, twice."""
    for message in pool.run(num_ranks, _refused_close, window, num_ranks):
        assert "test_cuda_teardown.py:" in message and "1 graph" in message


def _reopened(rank: int, group: Any, window: str, num_ranks: int) -> int:
    """Open, use and close a large arena several times; return by how much the GPU is fuller than after the first."""
    case = named_case("balanced", num_ranks, hidden=7168)
    config = base_config(num_ranks, hidden=7168, recv_capacity_per_rank=4096)
    inputs = draw_inputs(case, rank, True, "cuda")
    free = []
    for _ in range(4):
        with open_arena(group, window, config) as arena, torch.no_grad():
            assert arena.plan.total_bytes > 200 << 20
            with arena.acquire() as lease:
                y = epbuf.combine(lease, epbuf.dispatch(lease, inputs.x, inputs.topk_idx).tokens)
            assert_same(y, inputs.x * 3, "y")
        del arena, lease
        gc.collect()
        if num_ranks > 1:
            dist.barrier(group)
        free.append(torch.cuda.mem_get_info()[0])
        if num_ranks > 1:
            dist.barrier(group)
    torch.cuda.empty_cache()
    return free[0] - free[-1]


@EVERY_WINDOW
def test_closed_arena_gives_its_memory_back(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rules 12 and 17: opening and closing again and again does not fill the GPU."""
    assert all(lost < 100 << 20 for lost in pool.run(num_ranks, _reopened, window, num_ranks))


def _dropped_arena(rank: int, group: Any, window: str, num_ranks: int) -> None:
    arena = open_arena(group, window, base_config(num_ranks))
    size = arena.plan.total_bytes
    graph, inputs, y = _capture(arena, rank, num_ranks)
    with pytest.warns(ResourceWarning, match="without close"):
        del arena
        gc.collect()
    others = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for _ in range(8)]
    for _ in range(3):
        inputs.x.add_(1)
        graph.replay()
        assert_same(y, inputs.x * 3, "y of a graph whose arena was dropped")
    assert all(bool((other == 7).all()) for other in others), "a replay wrote into memory that is somebody else's now"
    if num_ranks > 1:
        dist.barrier(group)
    del graph
    torch.cuda.synchronize()


@EVERY_WINDOW
def test_graph_outlives_its_arena(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 16: a hold keeps memory: a graph whose arena object was dropped without close() replays correctly."""
    pool.run(num_ranks, _dropped_arena, window, num_ranks, limit_s=20)
