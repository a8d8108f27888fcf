"""Contract rule 16: which graphs hold memory, which reserve a frame, and how early reuse is counted.

Graphs are opaque here: a `Graph` of our own stands for what a stream captures, and lives as long as its flag says.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ranks import virtual
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf.errors import LeaseError
from epbuf.lease import Graph, LeaseBook

CASE = named_case("balanced", 1, 1, "fp32")


@dataclass
class Life:
    """A graph that dies when told."""

    name: str
    alive: bool = True
    graph: Graph = field(init=False)

    def __post_init__(self) -> None:
        self.graph = Graph(self.name, f"{self.name}.py:1", lambda: self.alive)


def open_arena(num_frames: int, group: Any = None) -> epbuf.Arena:
    plan = epbuf.Plan.build(base_config(1, token_dtype="fp32"), schedule=epbuf.Schedule(num_frames))
    return epbuf.Arena.open(plan, group)


@pytest.fixture
def arena() -> Iterator[epbuf.Arena]:
    with open_arena(1) as arena:
        yield arena


def forward(arena: epbuf.Arena) -> tuple[Tensor, Tensor]:
    x = draw_inputs(CASE, 0, True).x.requires_grad_()
    with arena.acquire() as lease:
        return x, epbuf.combine(lease, epbuf.dispatch(lease, x, CASE.topk_idx[0]).tokens)


def backward(y: Tensor, retain_graph: bool = False) -> None:
    y.backward(torch.ones_like(y), retain_graph=retain_graph)


def test_recorded_ops_hold_their_memory(arena: epbuf.Arena) -> None:
    """Rule 16: whatever op is issued while a graph records makes that graph a holder, with place and frames."""
    life = Life("step")
    with arena.book.recording_into(life.graph):
        _, y = forward(arena)
        backward(y)
    [graph] = arena.report()["graphs"]
    assert (graph["where"], graph["frames"], graph["is_stale"]) == ("step.py:1", [0], False)
    life.alive = False
    assert arena.report()["graphs"] == []


class Capturing:
    """A stream that captures."""

    def capture_key(self) -> int:
        return 7

    def hold(self) -> Any:
        return lambda: True


@pytest.mark.parametrize(
    ("acquired_at", "where"),
    [("model.py:12", "model.py:12 (a backward of the lease acquired there)"), (None, "a backward pass")],
    ids=["leased", "free"],
)
def test_capture_of_a_backward_alone_is_named(acquired_at: str | None, where: str) -> None:
    """Rule 16: on CUDA backward runs in a thread of autograd's, above which there is no line of the user's."""
    book, done = LeaseBook(1, 1, 1, Capturing()), threading.Event()
    if acquired_at is not None:
        book.acquire(0, acquired_at)
    _thread.start_new_thread(book.touch, (0,))
    _thread.start_new_thread(done.set, ())
    assert done.wait(10)
    while not book.graphs:
        done.wait(0.001)
    assert [graph.where for graph in book.graphs.values()] == [where]


def test_hold_does_not_reserve(arena: epbuf.Arena) -> None:
    """Rule 16: a graph that holds the frame leaves it free for eager steps and for other graphs."""
    one, two = Life("one"), Life("two")
    for life in (one, two):
        with arena.book.recording_into(life.graph):
            _, y = forward(arena)
            backward(y)
    x, y = forward(arena)
    backward(y)
    assert x.grad is not None
    assert_same(x.grad, torch.full_like(x, 3), "dx of an eager step")
    assert len(arena.report()["graphs"]) == 2
    one.alive = two.alive = False


def test_close_lists_every_holder(arena: epbuf.Arena) -> None:
    """Rule 16: while graphs live close() is refused and lists them all; then it works."""
    lives = [Life("one"), Life("two")]
    for life in lives:
        with arena.book.recording_into(life.graph):
            backward(forward(arena)[1])
    with pytest.raises(LeaseError, match=r"(?s)one\.py:1.*two\.py:1"):
        arena.close()
    lives[0].alive = False
    with pytest.raises(LeaseError, match=r"two\.py:1"):
        arena.close()
    lives[1].alive = False
    arena.close()


@pytest.mark.parametrize("last", ["forward", "backward"])
def test_frame_of_two_graphs_is_reserved_until_both_die(arena: epbuf.Arena, last: str) -> None:
    """Rule 16: a lease opened in one capture and ended in another reserves its frame for those two until they die."""
    lives = {"forward": Life("forward"), "backward": Life("backward")}
    with arena.book.recording_into(lives["forward"].graph):
        _, y = forward(arena)
    with arena.book.recording_into(lives["backward"].graph):
        backward(y)
    del y
    with pytest.raises(LeaseError, match=r"frame 0.*reserved"):
        arena.acquire()
    lives["forward" if last == "backward" else "backward"].alive = False
    with pytest.raises(LeaseError, match=rf"frame 0.*reserved.*{last}\.py:1"):
        arena.acquire()
    lives[last].alive = False
    arena.acquire().release()


def test_reserved_frame_is_skipped() -> None:
    """Rule 16: acquire() takes the next free frame while another is reserved."""
    with open_arena(2) as arena:
        lives = [Life("forward"), Life("backward")]
        with arena.book.recording_into(lives[0].graph):
            _, y = forward(arena)
        with arena.book.recording_into(lives[1].graph):
            backward(y)
        del y
        with arena.acquire() as lease:
            assert lease.window_of("recv_tokens")[1] == arena.plan.region("recv_tokens", 1).offset
        for life in lives:
            life.alive = False


def _early(rank: int, group: Any, times: int) -> int:
    """Run the backward of one forward several times, as a backward graph that is replayed too often does."""
    with open_arena(1, group) as arena:
        lives = [Life("forward"), Life("backward")]
        with arena.book.recording_into(lives[0].graph):
            _, y = forward(arena)
        for _ in range(times):
            with arena.book.recording_into(lives[1].graph):
                backward(y, retain_graph=True)
        del y
        for life in lives:
            life.alive = False
        return int(arena.report()["num_early_reuses"])


@pytest.mark.parametrize(("times", "count"), [(1, 0), (2, 1), (3, 2)])
def test_backward_without_its_dispatch_counts_as_early_reuse(times: int, count: int) -> None:
    """Rule 16: a captured combine backward of another capture's dispatch that finds OPEN clear is counted."""
    assert virtual(1, _early, times) == [count]


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_warm_up_is_no_early_reuse(warmup: int) -> None:
    """Rule 16: only replays count; warm-up repeats a backward without its dispatch, and leaves OPEN as it is."""
    inputs = draw_inputs(CASE, 0, True)
    x, kept, number = inputs.x.requires_grad_(), dict[str, Tensor](), torch.zeros(1)
    with open_arena(1) as arena:
        lease = arena.acquire()

        def run_forward(number: Tensor) -> Tensor:
            kept.clear()
            kept["y"] = epbuf.combine(lease, epbuf.dispatch(lease, x, inputs.topk_idx).tokens * 2)
            return number + 1

        def run_backward(number: Tensor) -> Tensor:
            torch.autograd.grad(kept["y"].sum(), x, retain_graph=True)
            return number + 1

        first = epbuf.CapturedStep.capture(arena, run_forward, (number,), warmup=warmup)
        second = epbuf.CapturedStep.capture(arena, run_backward, (number,), warmup=warmup)
        for _ in range(2):
            first(number)
            second(number)
            second.check()
        second(number)
        with pytest.raises(LeaseError, match="already been followed by its backward"):
            second.check()
        kept.clear()
        for step in (first, second):
            step.close()


def test_backward_in_the_same_graph_is_no_early_reuse(arena: epbuf.Arena) -> None:
    """Rule 16: a retained backward within one capture, or outside any, is the user's right and not counted."""
    life = Life("step")
    with arena.book.recording_into(life.graph):
        _, y = forward(arena)
        backward(y, retain_graph=True)
        backward(y)
    del y
    _, y = forward(arena)
    backward(y, retain_graph=True)
    backward(y)
    assert arena.report()["num_early_reuses"] == 0
    life.alive = False
