"""Contract rule 14: what keeps a frame busy, and that it frees itself. Each loop runs on exactly the planned frames."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import virtual
from rounds import assert_same, draw_inputs
from routings import Case, named_case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import epbuf
from epbuf.errors import LeaseError
from epbuf.lease import LeaseBook, Ticket

NUM_STEPS = 100
CASE = named_case("some_negative", 1, 16, "fp32")
PAIR = named_case("some_negative", 2, 16, "fp32")


@pytest.fixture(params=[1, 2], ids=["one_frame", "two_frames"])
def arena(request: pytest.FixtureRequest) -> Iterator[epbuf.Arena]:
    with open_arena(request.param) as arena:
        yield arena


@pytest.fixture
def single() -> Iterator[epbuf.Arena]:
    with open_arena(1) as arena:
        yield arena


def open_arena(num_frames: int, case: Case = CASE, group: Any = None) -> epbuf.Arena:
    return epbuf.Arena.open(epbuf.Plan.build(case.config, schedule=epbuf.Schedule(num_frames)), group)


def tokens(case: Case = CASE, rank: int = 0) -> Tensor:
    return draw_inputs(case, rank, True).x.requires_grad_()


def run(lease: epbuf.Lease, x: Tensor, scale: Tensor | float = 2.0, case: Case = CASE, rank: int = 0) -> Tensor:
    """Compute y = scale * (number of live experts) * x through epbuf."""
    recv = epbuf.dispatch(lease, x, case.topk_idx[rank])
    return epbuf.combine(lease, recv.tokens * scale)


def wanted(x: Tensor, scale: float = 2.0, case: Case = CASE, rank: int = 0) -> Tensor:
    return x.detach() * scale * (case.topk_idx[rank] >= 0).sum(1, keepdim=True)


def frame_of(arena: epbuf.Arena, lease: epbuf.Lease) -> int:
    """Tell which frame a lease has, by where its receive region lies in the window."""
    offset = lease.window_of("recv_tokens")[1]
    frames = range(arena.plan.schedule.num_frames)
    return next(f for f in frames if arena.plan.region("recv_tokens", f).offset == offset)


def assert_all_free(arena: epbuf.Arena) -> None:
    """Take every frame at once, in order, and find that there is no other."""
    num_frames = arena.plan.schedule.num_frames
    leases = [arena.acquire() for _ in range(num_frames)]
    assert [frame_of(arena, lease) for lease in leases] == list(range(num_frames))
    with pytest.raises(LeaseError):
        arena.acquire()
    for lease in leases:
        lease.release()


def _steps(arena: epbuf.Arena, step: Callable[[epbuf.Arena, Tensor], Tensor | None]) -> None:
    """Run a step many times on fresh inputs; each must find frame 0 free, and its y must be right."""
    for number in range(NUM_STEPS):
        x = (tokens().detach() + number % 3).requires_grad_()
        y = step(arena, x)
        if y is not None:
            assert_same(y, wanted(x), f"y of step {number}")
        del y
    assert_all_free(arena)


def _leased(arena: epbuf.Arena, x: Tensor) -> Tensor:
    with arena.acquire() as lease:
        assert frame_of(arena, lease) == 0
        return run(lease, x)


def _trained(arena: epbuf.Arena, x: Tensor) -> Tensor:
    y = _leased(arena, x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert_same(x.grad, wanted(torch.ones_like(x)), "dx")
    return y.detach()


def _no_grad(arena: epbuf.Arena, x: Tensor) -> Tensor:
    with torch.no_grad():
        return _leased(arena, x)


def _inference(arena: epbuf.Arena, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return _leased(arena, x)


def _dropped(arena: epbuf.Arena, x: Tensor) -> Tensor:
    return _leased(arena, x).detach().clone()


def _frozen(arena: epbuf.Arena, x: Tensor) -> Tensor:
    scale = torch.tensor(2.0, requires_grad=True)
    with arena.acquire() as lease:
        assert frame_of(arena, lease) == 0
        y = run(lease, x.detach(), scale)
    y.backward(torch.ones_like(y))
    return y.detach()


def _retained(arena: epbuf.Arena, x: Tensor) -> Tensor:
    y = _leased(arena, x)
    y.backward(torch.ones_like(y), retain_graph=True)
    first, x.grad = x.grad, None
    y.backward(torch.ones_like(y))
    assert first is not None and x.grad is not None
    assert_same(x.grad, first, "dx of the second backward")
    return y.detach()


def _checkpointed(arena: epbuf.Arena, x: Tensor, reentrant: bool) -> Tensor:
    y = checkpoint(_leased, arena, x, use_reentrant=reentrant)
    with arena.acquire() as lease:  # nothing is held between the two passes
        assert frame_of(arena, lease) == 0
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert_same(x.grad, wanted(torch.ones_like(x)), "dx")
    return y.detach()


def _reentrant(arena: epbuf.Arena, x: Tensor) -> Tensor:
    return _checkpointed(arena, x, True)


def _non_reentrant(arena: epbuf.Arena, x: Tensor) -> Tensor:
    return _checkpointed(arena, x, False)


def _dispatch_only(arena: epbuf.Arena, x: Tensor) -> None:
    with arena.acquire() as lease:
        epbuf.dispatch(lease, x, CASE.topk_idx[0])


def _lease_dies(arena: epbuf.Arena, x: Tensor) -> Tensor:
    lease = arena.acquire()
    return run(lease, x).detach()


@pytest.mark.parametrize(
    "step",
    [
        _trained, _no_grad, _inference, _dropped, _frozen, _retained, _reentrant, _non_reentrant, _dispatch_only,
        _lease_dies,
    ],
    ids=lambda step: step.__name__.strip("_"),
)  # fmt: skip
def test_hundred_steps_leak_nothing(arena: epbuf.Arena, step: Callable[[epbuf.Arena, Tensor], Tensor | None]) -> None:
    """Rule 14: a frame frees itself after each of 100 steps, whatever mode ran them, with no garbage collection."""
    gc.disable()
    try:
        _steps(arena, step)
    finally:
        gc.enable()


def test_hundred_steps_are_no_early_reuse(single: epbuf.Arena) -> None:
    """Rule 16: frozen, retained and checkpointed steps never count as an early reuse."""
    for step in (_trained, _frozen, _retained, _reentrant, _non_reentrant):
        step(single, tokens())
    assert single.report()["num_early_reuses"] == 0


def _weighted(arena: epbuf.Arena, x: Tensor, weights: Tensor) -> Tensor:
    with arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, CASE.topk_idx[0], weights)
        rows = torch.where(recv.row_mask()[:, None], recv.tokens, 0) * 2.0
        return epbuf.combine(lease, rows, topk_weights=recv.topk_weights)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_weighted_combine_in_a_checkpoint(single: epbuf.Arena, reentrant: bool) -> None:
    """The second pass writes the received weights again: its gradients are those of a plain step, and none is left."""
    drawn = draw_inputs(CASE, 0, False)
    grads = []
    for run_layer in (_weighted, lambda *layer: checkpoint(_weighted, *layer, use_reentrant=reentrant)):
        x, weights = drawn.x.clone().requires_grad_(), drawn.topk_weights.clone().requires_grad_()
        run_layer(single, x, weights).backward(drawn.dy)
        assert x.grad is not None and weights.grad is not None
        grads.append((x.grad, weights.grad))
    for found, want in zip(grads[1], grads[0], strict=True):
        assert_same(found, want, "gradient")
    assert_all_free(single)


def _received_for_logging(arena: epbuf.Arena) -> list[float]:
    """Keep the last step's Received while the next step runs."""
    peaks, last = [], None
    for _ in range(NUM_STEPS):
        x = tokens()
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, CASE.topk_idx[0])
            y = epbuf.combine(lease, recv.tokens * 2.0)
        y.backward(torch.ones_like(y))
        if last is not None:
            peaks.append(float(last.total_recv_tokens))
        last = recv
    return peaks


def test_received_kept_for_logging() -> None:
    """Rule 14: 100 steps that each keep the previous Received need two frames, and no third."""
    with open_arena(2) as arena:
        peaks = _received_for_logging(arena)
        rows = float(sum(-(-int((CASE.topk_idx[0] == expert).sum()) // 16) * 16 for expert in range(4)))
        assert peaks == [rows] * (NUM_STEPS - 1)
        assert_all_free(arena)


def test_received_kept_with_one_frame_is_refused() -> None:
    """Rule 14: with one frame the second step is refused while the Received lives, and the message says who."""
    with open_arena(1) as arena:
        with pytest.raises(LeaseError, match=r"(?s)frame 0.*Received.*test_claims\.py.*Schedule"):
            _received_for_logging(arena)
        assert_all_free(arena)


def test_early_reuse_is_refused(single: epbuf.Arena) -> None:
    """Rule 14: a graph that waits for its backward keeps the frame; the message names frame, place and Schedule."""
    x = tokens()
    y = _leased(single, x)
    with pytest.raises(LeaseError, match=r"(?s)frame 0.*test_claims\.py:\d+.*Schedule"):
        single.acquire()
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert_same(x.grad, wanted(torch.ones_like(x)), "dx after the refused acquire")


def test_retain_graph_keeps_the_frame(single: epbuf.Arena) -> None:
    """Rule 14: after backward(retain_graph=True) the frame stays busy until the graph is gone."""
    x = tokens()
    y = _leased(single, x)
    y.backward(torch.ones_like(y), retain_graph=True)
    with pytest.raises(LeaseError, match="frame 0"):
        single.acquire()
    del y
    assert_all_free(single)


def test_release_does_not_end_autograds_claim(single: epbuf.Arena) -> None:
    """Rule 14: after release() the graph still owns the frame, and its backward is right."""
    x = tokens()
    lease = single.acquire()
    y = run(lease, x)
    lease.release()
    with pytest.raises(LeaseError, match="frame 0"):
        single.acquire()
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert_same(x.grad, wanted(torch.ones_like(x)), "dx")
    assert_all_free(single)


def test_ticket_keeps_rows_after_backward(single: epbuf.Arena) -> None:
    """Rule 14: a delayed weight gradient that keeps recv.ticket finds its rows untouched after backward."""
    x = tokens()
    with single.acquire() as lease:
        recv = epbuf.dispatch(lease, x, CASE.topk_idx[0])
        rows, ticket = recv.tokens.detach(), recv.ticket
        y = epbuf.combine(lease, recv.tokens * 2.0)
        before = rows[: int(recv.offs[-1])].clone()
    y.backward(torch.ones_like(y))
    del y, recv, lease
    with pytest.raises(LeaseError, match="frame 0"):
        single.acquire()
    assert_same(rows[: len(before)], before, "rows kept by the ticket")
    del ticket
    assert_all_free(single)


def test_views_outlive_release_while_a_ticket_lives(single: epbuf.Arena) -> None:
    """Rule 14: a lease's views stay valid after release() as long as a ticket keeps the frame, and then raise."""
    lease = single.acquire()
    recv = epbuf.dispatch(lease, tokens(), CASE.topk_idx[0])
    lease.release()
    end = int(recv.offs[-1])
    assert_same(lease.recv_tokens[:end], recv.tokens.detach()[:end], "view after release")
    del recv
    with pytest.raises(LeaseError, match=r"recv_tokens.*frame 0"):
        _ = lease.recv_tokens


def test_frozen_input_still_records_a_node(single: epbuf.Arena) -> None:
    """Rule 14: in grad mode dispatch records a node whatever its inputs need, so the experts' backward is covered."""
    scale = torch.tensor(2.0, requires_grad=True)
    with single.acquire() as lease:
        recv = epbuf.dispatch(lease, tokens().detach(), CASE.topk_idx[0])
        kept = torch.where(recv.row_mask()[:, None], recv.tokens, 0)
        y = epbuf.combine(lease, kept * scale)
        del recv
    with pytest.raises(LeaseError, match="frame 0"):
        single.acquire()
    (grad,) = torch.autograd.grad(y.sum(), scale)
    assert_same(grad, wanted(tokens(), 1.0).sum(), "gradient of the experts' parameter")


def test_dead_lease_frees_its_frame(single: epbuf.Arena) -> None:
    """Rule 14: a lease that dies without release() ends its claim."""
    lease = single.acquire()
    with pytest.raises(LeaseError, match="frame 0"):
        single.acquire()
    del lease
    assert_all_free(single)


def test_lease_ends_when_an_exception_leaves_its_block(single: epbuf.Arena) -> None:
    """Rule 14: leaving `with` by an exception ends the claim, and the next step is right."""
    with pytest.raises(KeyError, match="router"), single.acquire() as lease:
        epbuf.dispatch(lease, tokens(), CASE.topk_idx[0])
        raise KeyError("router")
    del lease
    assert_all_free(single)
    _trained(single, tokens())


def test_failed_backward_keeps_no_claim(single: epbuf.Arena) -> None:
    """Rule 14: an error in the experts' backward leaves a graph that can be dropped, and then the frame is free."""

    def fail(grad: Tensor) -> None:
        raise KeyError("hook")

    x = tokens()
    with single.acquire() as lease:
        recv = epbuf.dispatch(lease, x, CASE.topk_idx[0])
        rows = recv.tokens * 2.0
        rows.register_hook(fail)
        y = epbuf.combine(lease, rows)
    with pytest.raises(KeyError, match="hook"):
        y.backward(torch.ones_like(y))
    del lease, recv, rows, y
    assert_all_free(single)
    _trained(single, tokens())


def _two_rank_steps(rank: int, group: Any, reentrant: bool | None) -> Tensor:
    """Train on one frame; with a checkpoint, dispatch and combine run again inside backward on every rank."""

    def forward(x: Tensor) -> Tensor:
        with arena.acquire() as lease:
            return run(lease, x, case=PAIR, rank=rank)

    with open_arena(1, PAIR, group) as arena:
        for _ in range(10):
            x = tokens(PAIR, rank)
            y = forward(x) if reentrant is None else checkpoint(forward, x, use_reentrant=reentrant)
            y.backward(torch.ones_like(y))
        assert_all_free(arena)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
def test_two_ranks_train_on_one_frame(reentrant: bool | None) -> None:
    """Rule 14: recomputation inside backward is a round like any other, on every rank."""
    for rank, dx in enumerate(virtual(2, _two_rank_steps, reentrant)):
        assert_same(dx, wanted(torch.ones_like(dx), case=PAIR, rank=rank), f"dx of rank {rank}")


def _unfinished_rounds(rank: int, group: Any, kind: str) -> Tensor:
    """Leave rounds unfinished on all ranks, then train."""
    with open_arena(1, PAIR, group) as arena:
        for number in range(5):
            x = tokens(PAIR, rank)
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, PAIR.topk_idx[rank])
                if kind != "dispatch":
                    rows = recv.tokens * 1.0
                    y = epbuf.combine(lease, rows)
                    if kind == "combine_backward":
                        torch.autograd.grad(y, rows, torch.ones_like(y))
                    del rows, y
            del lease
            if kind == "dispatch_backward":
                time.sleep(0.02 * rank)  # a rank that does not wait for this one reads what is there from before
                grad = torch.full_like(recv.tokens, number + 1)
                (dx,) = torch.autograd.grad(recv.tokens, x, grad)
                assert_same(dx, wanted(torch.ones_like(x), number + 1, PAIR, rank), f"dx of round {number}")
                del grad
            del recv
        x = tokens(PAIR, rank)
        with arena.acquire() as lease:
            y = run(lease, x, case=PAIR, rank=rank)
        y.backward(torch.ones_like(y))
        assert_all_free(arena)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("kind", ["dispatch", "combine", "combine_backward", "dispatch_backward"])
def test_rounds_that_stop_early_leave_nothing(kind: str) -> None:
    """Rule 14: a round may stop after any op, on all ranks; claims end with their objects, later rounds are right."""
    for rank, dx in enumerate(virtual(2, _unfinished_rounds, kind)):
        assert_same(dx, wanted(torch.ones_like(dx), case=PAIR, rank=rank), f"dx of rank {rank}")


def _returned(book: LeaseBook) -> Ticket:
    """Leave a frame to a ticket whose backward has returned."""
    frame, lease = book.acquire(None, "model.py:1")
    ticket = book.open_ticket(frame, lease, 1, 16, None)
    book.end(lease)
    ticket.returned = True
    return ticket


@pytest.mark.parametrize("num_frames", [1, 3])
def test_a_ticket_that_is_about_to_end_is_waited_for(num_frames: int) -> None:
    """On CUDA a thread of autograd's drops the ticket a moment after the backward has returned to the caller.

    Another frame is free, too: which one is taken must not depend on that moment.
    """
    book = LeaseBook(1, num_frames, 1, patience_s=600)
    thread = threading.Timer(0.05, book.end_later, [_returned(book).serial])
    thread.start()
    assert book.acquire(None, "model.py:2")[0] == 0
    thread.join()


def test_a_ticket_that_is_kept_is_waited_for_once() -> None:
    """retain_graph keeps the ticket: the frame above is taken, later ones without a wait."""
    book = LeaseBook(1, 3, 1, patience_s=0.01)
    ticket = _returned(book)
    assert book.acquire(None, "model.py:2")[0] == 1
    assert ticket.outstayed
    book._patience_s = 600
    assert book.acquire(None, "model.py:3")[0] == 2


def test_what_is_in_use_is_not_waited_for() -> None:
    """Who forgot to end a lease, or has not run the backward, hears of it at once."""
    book = LeaseBook(1, 1, 1, patience_s=600)
    _, lease = book.acquire(None, "model.py:1")
    with pytest.raises(LeaseError, match=r"lease acquired at model\.py:1"):
        book.acquire(None, "model.py:2")
    book.open_ticket(0, lease, 1, 16, None)
    book.end(lease)
    with pytest.raises(LeaseError, match=r"autograd graph of the lease acquired at model\.py:1"):
        book.acquire(None, "model.py:2")
