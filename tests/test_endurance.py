"""A captured step that is replayed ten thousand times: right every time, and nothing grows."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool, size_of
from rounds import assert_same
from routings import base_config
from torch import Tensor

import epbuf
from epbuf import _C

Step = Callable[..., tuple[Tensor, Tensor]]
NUM_REPLAYS, NUM_FIRST = 10_000, 1_000
REPLAY_LIMIT_S = 300  # some 60 s on two cores
MAX_DRIFT = {  # over nine thousand replays, of what the allocators of libc and Python keep for later
    "resident bytes": 4 * 2**20,  # one row of one replay is 64 bytes, the tensors of one some 20 kB
    "Python blocks": 900,
}


def training_step(arena: epbuf.Arena) -> Step:
    def step(x: Tensor, ids: Tensor, weights: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        with arena.acquire(0) as lease:
            recv = epbuf.dispatch(lease, x, ids, weights)
            y = epbuf.combine(lease, recv.tokens * 2, topk_weights=recv.topk_weights)
        (grad_x,) = torch.autograd.grad(y, x, grad_y)
        return y.detach(), grad_x

    return step


def draw(config: epbuf.EpConfig, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw numbers whose sums are exact in fp32, and ids of which some name no expert."""
    num_tokens, num_topk = config.max_tokens_per_rank, config.num_topk

    def integers(*shape: int, low: int = -8) -> Tensor:
        return torch.randint(low, 9, shape, generator=generator)

    ids = torch.rand(num_tokens, config.num_experts, generator=generator).topk(num_topk).indices
    ids = ids.masked_fill(integers(num_tokens, num_topk) == 8, -1)
    weights = 2.0 ** -integers(num_tokens, num_topk, low=0).clamp(max=3)
    return integers(num_tokens, config.hidden).float(), ids, weights, integers(num_tokens, config.hidden).float()


def usage() -> dict[str, int]:
    """Count what this process holds."""
    gc.collect()
    return {
        "resident bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "Python blocks": sys.getallocatedblocks(),
        "tensors": sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()),
        "handles": len(_C.handle_objects()),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "mapped files": sum("/" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def drift(before: dict[str, int], now: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what grew: by more than its limit, by one where none is given."""
    return {what: (before[what], now[what]) for what in now if now[what] - before[what] > MAX_DRIFT.get(what, 0)}


def replay(rank: int, group: Any, leaks: str = "") -> dict[str, tuple[int, int]]:
    """Replay with a new routing each time, compare every result, and return what grew after the first thousand."""
    config = base_config(size_of(group), token_dtype="fp32", expert_alignment=4)
    generator = torch.Generator().manual_seed(rank)
    kept: list[object] = []
    before: dict[str, int] = {}
    with epbuf.Arena.open(epbuf.Plan.build(config), group) as arena:
        step = training_step(arena)
        captured = epbuf.CapturedStep.capture(arena, step, draw(config, generator))
        num_windows = arena.window_allocations
        for number in range(1500 if leaks else NUM_REPLAYS):
            if number == NUM_FIRST:
                before = usage()
            x, ids, weights, grad_y = draw(config, generator)
            y, grad_x = captured(x, ids, weights, grad_y)
            factor = 2 * weights.where(ids >= 0, 0).sum(1, keepdim=True)
            assert_same(y, x * factor, f"y of replay {number}")
            assert_same(grad_x, grad_y * factor, f"dx of replay {number}")
            if leaks:
                kept.append(torch.ones(1024) if leaks == "tensors" else os.open("/dev/null", os.O_RDONLY))
        assert arena.window_allocations == num_windows
        captured.check()
        assert len(captured._graph.acquired) == 1  # the frames of one run, not of all
        found = drift(before, usage())
        captured.close()
    for thing in kept:
        if isinstance(thing, int):
            os.close(thing)
    return found


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes of its own: in others, what earlier tests have left (compilers, packages) moves while it is watched."""
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


def test_ten_thousand_replays_do_not_drift(pool: Pool) -> None:
    """Forward and backward on two rank processes: every result right; memory, tensors, handles, files as before."""
    assert pool.run(2, replay, limit_s=REPLAY_LIMIT_S) == [{}, {}]


@pytest.mark.parametrize("leaks", ["tensors", "file descriptors"])
def test_drift_is_seen(pool: Pool, leaks: str) -> None:
    """Something that is kept from each of five hundred replays is found."""
    assert all(leaks in found for found in pool.run(2, replay, leaks))
