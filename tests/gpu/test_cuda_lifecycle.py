"""The programs of tests/test_lifecycle.py on CUDA, and what only a GPU has: streams, and graphs of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_lifecycle as programs
import torch
from gpus import GpuPool, places
from ranks import raised

import epbuf
from epbuf.errors import CaptureError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

FEW = places((1, "local"), (2, "torch_symm"))


@FEW
@pytest.mark.parametrize(
    "program",
    [
        programs.three_graphs,
        programs.failed_capture,
        programs.collected_while_capturing,
        programs.never_backward,
        programs.backward_twice,
        programs.delayed_weight_gradient,
    ],
    ids=lambda program: program.__name__,
)
def test_what_holds_on_cpu(pool: GpuPool, num_ranks: int, window: str, program: Callable[..., None]) -> None:
    pool.run(num_ranks, program, "cuda", window)


@places((8, "torch_symm"))
def test_second_arena_on_another_group(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Eight, because all processes take part when torch makes a group."""
    pool.run(num_ranks, programs.two_groups, "cuda", window)


@places((1, "local"), (2, "torch_symm"), (2, "nccl"))
@pytest.mark.parametrize("order", programs.ORDERS)
def test_processes_end_in_any_order(
    pool: GpuPool, num_ranks: int, window: str, order: str, tmp_path: Path
) -> None:  # fmt: skip
    """Rule 17: graphs, arena, process group or interpreter first: no hang, no abort."""
    programs.end_processes(order, "cuda", window, num_ranks, tmp_path, pool.environment)


def _on_a_side_stream(rank: int, group: Any, window: str) -> None:
    """Capture while a stream of the caller's is current; replay there and on the default stream."""
    side = torch.cuda.Stream()
    with programs.open_arena(group, "cuda", window) as arena:
        batches = [programs.batch_of(arena, number) for number in range(4)]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            captured = epbuf.CapturedStep.capture(arena, programs.train(arena), batches[0])
            programs.assert_right(captured(*batches[1]), batches[1], "a replay on the side stream")
        torch.cuda.current_stream().wait_stream(side)
        programs.assert_right(captured(*batches[2]), batches[2], "a replay on the default stream")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            programs.assert_right(programs.train(arena)(*batches[3]), batches[3], "an eager step on the side stream")
        torch.cuda.current_stream().wait_stream(side)
        captured.close()
        programs.assert_usable(arena)


@FEW
def test_capture_on_a_side_stream(pool: GpuPool, num_ranks: int, window: str) -> None:
    pool.run(num_ranks, _on_a_side_stream, window)


def _nested(rank: int, group: Any, window: str) -> tuple[str, str]:
    """Try to capture inside a CapturedStep and inside a graph of torch's own; both go on."""
    messages = []
    with programs.open_arena(group, "cuda", window) as arena:
        batch = programs.batch_of(arena, 0)

        def step(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if torch.cuda.is_current_stream_capturing():
                inner = lambda: epbuf.CapturedStep.capture(arena, programs.train(arena), batch)  # noqa: E731
                messages.append(raised(CaptureError, inner))
            return programs.train(arena)(x, ids)

        captured = epbuf.CapturedStep.capture(arena, step, batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(*batch)
        graph.replay()
        programs.assert_right(found, batch, "a replay of torch's own graph")
        programs.assert_right(captured(*programs.batch_of(arena, 1)), programs.batch_of(arena, 1), "a replay")
        captured.close()
        del graph, found
        torch.cuda.synchronize()
        programs.assert_usable(arena)
    return messages[0], messages[1]


@FEW
def test_nested_capture(pool: GpuPool, num_ranks: int, window: str) -> None:
    for messages in pool.run(num_ranks, _nested, window):
        assert all("captures do not nest" in message for message in messages)
