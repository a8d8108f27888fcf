"""Graphs, claims, groups and processes begin, fail and end in any order, and what goes on stays right.

The programs run on CPU here and on CUDA in tests/gpu/test_cuda_lifecycle.py. A layer is y = 2 n x, where n counts the
experts of a token: exact in whole numbers, and known without the library.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, raised, size_of
from rounds import assert_same
from routings import base_config
from torch import Tensor

import epbuf

Spread = Callable[..., list[Any]]
Batch = tuple[Tensor, Tensor]
TOKENS, ENDING_LIMIT_S = 12, 90


def open_arena(group: Any, device: str, window: str, num_frames: int = 1) -> epbuf.Arena:
    config = base_config(size_of(group), token_dtype="fp32")
    plan = epbuf.Plan.build(config, epbuf.Schedule(num_frames))
    return epbuf.Arena.open(plan, None if window == "local" else group, device=device, window=window)


def batch_of(arena: epbuf.Arena, number: int, num_tokens: int = TOKENS, rank: int | None = None) -> Batch:
    """Draw tokens and their distinct experts, one in five of them missing, of this rank or another."""
    generator = torch.Generator().manual_seed(100 * number + (arena.rank if rank is None else rank))
    config = arena.plan.config
    x = torch.randint(-9, 10, (num_tokens, config.hidden), generator=generator).float()
    ids = torch.rand(num_tokens, config.num_experts, generator=generator).topk(config.num_topk).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return x.to(arena.device), ids.to(arena.device)


def layer(arena: epbuf.Arena, x: Tensor, ids: Tensor) -> Tensor:
    with arena.acquire() as lease:
        return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens * 2)


def train(arena: epbuf.Arena) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def step(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = layer(arena, x, ids)
        return y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))

    return step


def validate(arena: epbuf.Arena) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def step(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (layer(arena, x, ids),)

    return step


def assert_right(found: tuple[Tensor, ...], batch: Batch, what: str) -> None:
    """Compare y, and dx where there is one."""
    x, ids = batch
    factor = 2.0 * (ids >= 0).sum(1, keepdim=True)
    assert found, f"{what}: nothing was returned"
    for got, want in zip(found, (factor * x, factor.expand_as(x)), strict=False):
        assert_same(got, want, what)


def assert_usable(arena: epbuf.Arena) -> None:
    """Train eagerly, capture, replay with another routing, and find nothing claimed afterwards."""
    assert_right(train(arena)(*batch_of(arena, 1)), batch_of(arena, 1), "an eager step afterwards")
    captured = epbuf.CapturedStep.capture(arena, train(arena), batch_of(arena, 2))
    for number in (3, 4):
        assert_right(captured(*batch_of(arena, number)), batch_of(arena, number), "a replay afterwards")
    captured.close()
    arena.check()
    gc.collect()
    assert list(arena.book.claims()) == [] and arena.memory.graphs_after_drain() == []


def three_graphs(rank: int, group: Any, device: str = "cpu", window: str = "auto") -> None:
    """Replay two training graphs of different T, a validation graph and eager steps in turns on one frame."""
    with open_arena(group, device, window) as arena:
        steps = {"long": (train, TOKENS), "short": (train, 5), "validation": (validate, 7)}
        graphs = {
            name: epbuf.CapturedStep.capture(arena, kind(arena), batch_of(arena, 0, num_tokens))
            for name, (kind, num_tokens) in steps.items()
        }
        order = "long short validation validation eager short long eager validation long short"
        for number, name in enumerate(order.split()):
            batch = batch_of(arena, number, steps.get(name, (None, TOKENS))[1])
            found = graphs[name](*batch) if name in graphs else train(arena)(*batch)
            assert_right(found, batch, f"step {number}, {name}")
        graphs.pop("long").close()
        for name, graph in graphs.items():
            batch = batch_of(arena, 20, steps[name][1])
            assert_right(graph(*batch), batch, f"{name} when another graph is gone")
            graph.close()


def test_two_graphs_and_a_validation_graph_share_a_frame(spread: Spread) -> None:
    spread(2, three_graphs)


def failed_capture(rank: int, group: Any, device: str = "cpu", window: str = "auto") -> None:
    """Raise in the middle of the recorded run, between dispatch and combine, and use the arena afterwards."""
    with open_arena(group, device, window) as arena:
        runs = []

        def step(x: Tensor, ids: Tensor) -> Tensor:
            runs.append(len(runs))
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, ids)
                if len(runs) == 2:  # after one warm-up
                    raise KeyError("step")
                return epbuf.combine(lease, recv.tokens).detach()

        def capture() -> None:
            epbuf.CapturedStep.capture(arena, step, batch_of(arena, 0), warmup=1)

        assert "step" in raised(KeyError, capture) and runs == [0, 1]
        assert_usable(arena)


def test_exception_in_the_middle_of_a_capture(spread: Spread) -> None:
    spread(2, failed_capture)


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, *things: object) -> None:
        self.things, self.itself = things, self


def collected_while_capturing(rank: int, group: Any, device: str = "cpu", window: str = "auto") -> None:
    """Let the collector end a lease, a Received and an autograd graph in the middle of a capture; on CPU also a step.

    On CUDA a graph that dies while another is captured ends that capture: torch collects before it begins, and a
    CapturedStep turns the collector off.
    """
    with open_arena(group, device, window, num_frames=4) as arena:
        x, ids = batch_of(arena, 0)
        gc.collect()
        gc.disable()
        if device == "cpu":
            Cycle(epbuf.CapturedStep.capture(arena, validate(arena), (x, ids)))
        Cycle(arena.acquire())
        Cycle(layer(arena, x.clone().requires_grad_(), ids))
        with torch.no_grad(), arena.acquire() as lease:
            Cycle(recv := epbuf.dispatch(lease, x, ids))
            epbuf.combine(lease, recv.tokens)
        del lease, recv
        claimed = []

        def step(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            validate(arena)(x, ids)
            claimed.append(len(list(arena.book.claims())))
            gc.collect()
            claimed.append(len(list(arena.book.claims())))
            return train(arena)(x, ids)

        try:
            captured = epbuf.CapturedStep.capture(arena, step, (x, ids), warmup=0)
        finally:
            gc.enable()
        assert claimed == [3, 0]
        for number in range(3):
            assert_right(captured(*batch_of(arena, number)), batch_of(arena, number), f"replay {number}")
        captured.close()
        assert_usable(arena)


def test_garbage_collection_during_a_capture(pool: Pool) -> None:
    pool.run(2, collected_while_capturing)


def two_groups(rank: int, group: Any, device: str = "cpu", window: str = "auto") -> None:
    """Use an arena of all ranks and one of two in every process, in one captured step. For all processes there are."""
    pair = [dist.new_group([first, first + 1]) for first in range(0, group.size(), 2)][rank // 2]
    with open_arena(group, device, window) as whole, open_arena(pair, device, window) as part:

        def step(x: Tensor, ids: Tensor, part_ids: Tensor) -> tuple[Tensor, ...]:
            return *train(whole)(x, ids), *train(part)(x, part_ids)

        batches = [(*batch_of(whole, number), batch_of(part, number)[1]) for number in range(4)]
        captured = epbuf.CapturedStep.capture((whole, part), step, batches[0])
        for x, ids, part_ids in batches:
            for found in (captured(x, ids, part_ids), step(x, ids, part_ids)):
                assert_right(found[:2], (x, ids), "all ranks")
                assert_right(found[2:], (x, part_ids), "two ranks")
        captured.close()
    dist.destroy_process_group(pair)


def test_second_arena_on_another_group(pool: Pool) -> None:
    pool.run(4, two_groups)


def never_backward(rank: int, group: Any, device: str = "cpu", window: str = "auto") -> None:
    """Record autograd graphs whose backward never runs, eagerly and in a captured step, on one frame."""
    with open_arena(group, device, window) as arena:

        def forward(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            return (layer(arena, x.detach().requires_grad_(), ids).detach(),)

        captured = epbuf.CapturedStep.capture(arena, forward, batch_of(arena, 0))
        for number in range(20):
            batch = batch_of(arena, number)
            assert_right((captured if number % 2 else forward)(*batch), batch, f"forward {number}")
        captured.close()
        assert arena.report()["num_early_reuses"] == 0
        assert_usable(arena)


def test_backward_that_never_runs(spread: Spread) -> None:
    spread(2, never_backward)


def backward_twice(rank: int, group: Any, device: str = "cpu", window: str = "auto") -> None:
    """Run backward twice over one autograd graph, with two gradients, eagerly and in a captured step."""
    with open_arena(group, device, window) as arena:

        def step(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            x = x.detach().requires_grad_()
            y = layer(arena, x, ids)
            (first,) = torch.autograd.grad(y, x, torch.full_like(y, 5.0), retain_graph=True)
            return y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y)), first

        captured = epbuf.CapturedStep.capture(arena, step, batch_of(arena, 0))
        for number in range(6):
            batch = batch_of(arena, number)
            found = (captured if number % 2 else step)(*batch)
            assert_right(found, batch, f"step {number}")
            assert_same(found[2], found[1] * 5, f"first dx of step {number}")
        captured.close()
        assert arena.report()["num_early_reuses"] == 0
        assert_usable(arena)


def test_backward_that_runs_twice(spread: Spread) -> None:
    spread(2, backward_twice)


def delayed_weight_gradient(rank: int, group: Any, device: str = "cpu", window: str = "auto") -> None:
    """Read received rows for a weight gradient after the whole backward, and after another layer's dispatch."""
    with open_arena(group, device, window, num_frames=2) as arena:

        def step(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            x = x.detach().requires_grad_()
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, ids)
                ticket, rows, mask = recv.ticket, recv.tokens.detach(), recv.row_mask()[:, None]
                y = epbuf.combine(lease, recv.tokens * 2)
            grads = torch.autograd.grad(y, x, torch.ones_like(y))
            del recv
            with torch.no_grad():
                layer(arena, x + 100, ids)
            weight_grad = torch.where(mask, rows, 0).sum(0)
            assert ticket.nbytes == 8
            return y.detach(), *grads, weight_grad

        captured = epbuf.CapturedStep.capture(arena, step, batch_of(arena, 0))
        for number in range(6):
            x, ids = batch_of(arena, number)
            found = (captured if number % 2 else step)(x, ids)
            assert_right(found, (x, ids), f"step {number}")
            total, want = found[2].clone().cpu(), _everybodys_rows(arena, number)
            assert_same(total, want, f"weight gradient of step {number}")
        captured.close()
        assert_usable(arena)


def _everybodys_rows(arena: epbuf.Arena, number: int) -> Tensor:
    """Add up the tokens that every rank sends to this rank's experts."""
    config, total = arena.plan.config, torch.zeros(arena.plan.config.hidden)
    for rank in range(config.num_ranks):
        x, ids = (part.cpu() for part in batch_of(arena, number, rank=rank))
        mine = (ids >= 0) & (ids // config.num_local_experts == arena.rank)
        total += (mine.sum(1, keepdim=True) * x).sum(0)
    return total


def test_delayed_weight_gradient(spread: Spread) -> None:
    spread(2, delayed_weight_gradient)


ORDERS = ("graph_first", "arena_first", "group_first", "everything_alive")


def end_processes(
    order: str, device: str, window: str, num_ranks: int, directory: Path, environment: Mapping[str, str] | None = None
) -> None:  # fmt: skip
    """Let every rank's process end in that order: each must say so, with status 0, in time."""
    command = [sys.executable, str(Path(__file__).with_name("endings.py")), order, device, window, str(num_ranks)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(directory / "store")],
            env=os.environ | (environment or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=ENDING_LIMIT_S)[0] for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, outputs
    assert all("leaving" in output for output in outputs), outputs


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_processes_end_in_any_order(num_ranks: int, order: str, tmp_path: Path) -> None:
    """Rule 17: graphs, arena, process group or interpreter first: no hang, no abort."""
    end_processes(order, "cpu", "auto", num_ranks, tmp_path)
