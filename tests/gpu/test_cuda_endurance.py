"""A CUDA graph that is replayed ten thousand times: exact every time, and nothing grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact import draw_tokens, exact_results, num_wrong
from gpus import GpuPool, open_arena, places
from routings import base_config
from test_cuda_replays import Graph
from test_endurance import NUM_FIRST, NUM_REPLAYS, drift, usage

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def _endure(rank: int, group: Any, window: str, num_ranks: int) -> dict[str, Any]:
    """Replay forward and backward with a new routing each time; return what was wrong, and what has grown."""
    sizes = {"hidden": 64, "max_tokens_per_rank": 96, "num_topk": 4, "num_experts": 8 * num_ranks}
    config = base_config(num_ranks, **sizes, expert_alignment=16)
    generator = torch.Generator("cuda").manual_seed(rank)
    wrong = torch.zeros(NUM_REPLAYS, dtype=torch.int64, device="cuda")
    before: dict[str, int] = {}
    with open_arena(group, window, config) as arena:
        graph = Graph(arena, draw_tokens(config, 96, generator))
        for number in range(NUM_REPLAYS):
            if number == NUM_FIRST:
                torch.cuda.synchronize()
                before, memory = usage(), torch.cuda.memory_stats()
            tokens = draw_tokens(config, 96, generator)
            wrong[number] += num_wrong(graph.run(tokens), exact_results(config, tokens))
        torch.cuda.synchronize()
        del tokens
        grown, now = drift(before, usage()), torch.cuda.memory_stats()
        segments = {name: now[name] - memory[name] for name in ("segment.all.current", "reserved_bytes.all.current")}
        arena.check()
        report = arena.report()
        del graph
    return {
        "wrong": wrong.nonzero().flatten().tolist(), "grown": grown, "torch's memory": sum(segments.values()),
        "frames": report["num_frames_high_water"], "graphs": len(report["graphs"]),
        "windows": report["window_allocations"],
    }  # fmt: skip


@places((1, "local"), (2, "torch_symm"))
def test_ten_thousand_replays_do_not_drift(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Every result exact; host memory, tensors, handles, files and torch's segments as before."""
    for found in pool.run(num_ranks, _endure, window, num_ranks, limit_s=150):
        assert found == {"wrong": [], "grown": {}, "torch's memory": 0, "frames": 1, "graphs": 1, "windows": 1}
