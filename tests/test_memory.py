"""Allocation silence: after the first call an op allocates what it returns and nothing else.

Counted twice: by the profiler, which sees each allocation of torch's CPU allocator, and by a dispatch mode, which sees
each torch op that epbuf's Python runs around its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rounds import draw_inputs
from routings import base_config, named_case
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import epbuf

CASE = named_case("some_negative", 1, 16, "fp32")
IDS = CASE.topk_idx[0]
ROW_BYTES = 16 * 4
X_BYTES = 12 * ROW_BYTES
WEIGHT_BYTES = 12 * 3 * 4

# Ops that only look at memory that exists.
SILENT = {
    "aten.detach.default",
    "aten.view.default",
    "aten.view.dtype",
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.alias.default",
    "aten.as_strided.default",
    "aten.expand.default",
    "aten.t.default",
}


class Watch(TorchDispatchMode):
    """Write down every op that runs, but for views and epbuf's own."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name not in SILENT and not name.startswith("epbuf."):
            self.ops.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def arena() -> Iterator[epbuf.Arena]:
    config = base_config(1, expert_alignment=16, token_dtype="fp32")
    with epbuf.Arena.open(epbuf.Plan.build(config)) as arena:
        for _ in range(2):
            with arena.acquire() as lease:
                _, _, recv = dispatched(lease)
                rows = scaled(recv)
                y = epbuf.combine(lease, rows, topk_weights=recv.topk_weights)
                y.backward(torch.ones_like(y))
            del recv, rows, y
        yield arena


def dispatched(lease: epbuf.Lease) -> tuple[Tensor, Tensor, epbuf.Received]:
    inputs = draw_inputs(CASE, 0, True)
    x, weights = inputs.x.requires_grad_(), inputs.topk_weights.requires_grad_()
    return x, weights, epbuf.dispatch(lease, x, IDS, weights)


def scaled(recv: epbuf.Received) -> Tensor:
    return recv.tokens * 2


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Collect the bytes of every allocation of torch's CPU allocator made inside."""
    found: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    events = profiler.profiler.kineto_results.events()
    found += sorted(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0)


def test_the_counter_sees_allocations() -> None:
    """The profiler reports an allocation that is known to happen, of exactly its size."""
    with allocations() as found:
        kept = torch.empty(1000)
    assert found == [4000] and len(kept) == 1000


def test_dispatch_allocates_only_its_ticket(arena: epbuf.Arena) -> None:
    """Rule 12: a ticket's 8 bytes belong to its claim object, so torch's allocator is not called at all."""
    with arena.acquire() as lease:
        inputs = draw_inputs(CASE, 0, True)
        x, weights = inputs.x.requires_grad_(), inputs.topk_weights.requires_grad_()
        with allocations() as found:
            recv = epbuf.dispatch(lease, x, IDS, weights)
        assert found == []
        assert recv.ticket.nbytes == 8


def test_combine_allocates_only_y(arena: epbuf.Arena) -> None:
    """Rule 12: an unweighted combine allocates y."""
    with arena.acquire() as lease:
        _, _, recv = dispatched(lease)
        rows = scaled(recv)
        with allocations() as found:
            epbuf.combine(lease, rows)
    assert found == [X_BYTES]


def test_weighted_combine_allocates_only_y(arena: epbuf.Arena) -> None:
    """Rule 12: weighting happens in the copy that stages, so it allocates nothing more."""
    with arena.acquire() as lease:
        _, _, recv = dispatched(lease)
        rows = scaled(recv)
        with allocations() as found:
            epbuf.combine(lease, rows, topk_weights=recv.topk_weights)
    assert found == [X_BYTES]


def test_combine_into_out_allocates_nothing(arena: epbuf.Arena) -> None:
    """Rule 12: with out= not even y."""
    with arena.acquire() as lease, torch.no_grad():
        _, _, recv = dispatched(lease)
        rows, out = scaled(recv), torch.empty(12, 16)
        with allocations() as found:
            epbuf.combine(lease, rows, out=out)
    assert found == []


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_combine_backward_allocates_nothing(arena: epbuf.Arena, weighted: bool) -> None:
    """Rule 12: the gradient of expert_out, and of its weights, is window memory."""
    with arena.acquire() as lease:
        _, _, recv = dispatched(lease)
        rows, row_weights = scaled(recv).detach().requires_grad_(), recv.topk_weights.detach().requires_grad_()
        y = epbuf.combine(lease, rows, topk_weights=row_weights if weighted else None)
        dy = torch.ones_like(y)
        with allocations() as found:
            torch.autograd.grad(y, [rows, row_weights] if weighted else [rows], dy)
    assert found == []


def test_dispatch_backward_allocates_only_dx_and_dw(arena: epbuf.Arena) -> None:
    """Rule 12: dispatch backward allocates dx and dw."""
    with arena.acquire() as lease:
        x, weights, recv = dispatched(lease)
        grads = (torch.ones_like(recv.tokens), torch.ones_like(recv.topk_weights))
        with allocations() as found:
            torch.autograd.grad([recv.tokens, recv.topk_weights], [x, weights], grads)
    assert found == sorted([X_BYTES, WEIGHT_BYTES])


def test_frozen_input_allocates_no_dx(arena: epbuf.Arena) -> None:
    """Rule 12: an input that needs no gradient gets none allocated."""
    with arena.acquire() as lease:
        inputs = draw_inputs(CASE, 0, True)
        weights = inputs.topk_weights.requires_grad_()
        recv = epbuf.dispatch(lease, inputs.x, IDS, weights)
        grads = (torch.ones_like(recv.tokens), torch.ones_like(recv.topk_weights))
        with allocations() as found:
            torch.autograd.grad([recv.tokens, recv.topk_weights], [weights], grads)
    assert found == [WEIGHT_BYTES]


def _watched(call: Callable[[], object]) -> list[str]:
    with Watch() as watch:
        call()
    return watch.ops


def test_no_torch_op_runs_around_dispatch(arena: epbuf.Arena) -> None:
    """Rule 12: dispatch runs epbuf's ops and views only: no fill, copy, compare or host read."""
    with arena.acquire() as lease:
        assert _watched(lambda: dispatched_plain(lease)) == []


def dispatched_plain(lease: epbuf.Lease) -> object:
    return epbuf.dispatch(lease, PLAIN[0], IDS, PLAIN[1])


PLAIN = (draw_inputs(CASE, 0, True).x, draw_inputs(CASE, 0, True).topk_weights)


def test_only_y_is_made_around_combine(arena: epbuf.Arena) -> None:
    """Rule 12: combine makes y and runs nothing else."""
    with arena.acquire() as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, PLAIN[0], IDS)
        rows = recv.tokens * 2
        ops = _watched(lambda: epbuf.combine(lease, rows))
    assert len(ops) == 1 and "empty" in ops[0]


def test_the_window_never_grows(arena: epbuf.Arena) -> None:
    """Rule 12: 50 training steps later the window is the plan's size and one allocation."""
    for _ in range(50):
        with arena.acquire() as lease:
            _, _, recv = dispatched(lease)
            epbuf.combine(lease, scaled(recv)).sum().backward()
            del recv
    report = arena.report()
    assert (report["window_bytes"], report["window_allocations"]) == (arena.plan.total_bytes, 1)
