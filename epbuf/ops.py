"""The torch.library ops: schema, fake, checks, and the call of the engine.

An op names in its schema the regions that a user can read and writes them, bumps their version counters, and compares
their addresses with the plan. `order` is written by every op, so compiled code keeps program order. No op returns
window memory; `route` returns the ticket. The lease book advances here and nowhere else.

On every rank an op completes its round before it raises, so that a refusal reaches all ranks and no one waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch.autograd.graph import increment_version

from epbuf import _C
from epbuf.checks import (
    ROW_ALIGNMENT,
    Tokens,
    check_combine_order,
    check_dispatch_order,
    check_expert_out,
    check_gradient,
    check_out,
    check_row_weights,
    check_sent,
    is_encoded,
    is_plain_combine,
    refusal_of,
    refuse,
)
from epbuf.engine import Encoded, Place, Rows, peer_error
from epbuf.errors import CapacityError, ConfigError, EpbufError, LeaseError
from epbuf.generation import RECEIVED, Generation, arena_of
from epbuf.lease import (
    NO_CLAIM,
    NO_FRAME,
    Direction,
    Lease,
    Ticket,
    caller,
    make_ticket_tensor,
    read_ticket,
)

_LIBRARY = torch.library.Library("epbuf", "DEF")  # type: ignore[no-untyped-call]

_SCHEMAS = (
    "route(Tensor(a!) order, Tensor(b!) offs, Tensor(c!) counts, Tensor(d!) overflow, Tensor token, Tensor topk_idx, "
    "Tensor? num_tokens, Tensor x, Tensor? x_scales, Tensor? x_row_scales, Tensor? topk_weights) -> Tensor",
    "dispatch(Tensor(a!) order, Tensor(b!) recv_tokens, Tensor(c!)? recv_scales, Tensor(d!)? recv_row_scales, "
    "Tensor(e!) recv_topk_weights, Tensor ticket, Tensor x, Tensor topk_idx, Tensor? topk_weights, Tensor? x_scales, "
    "Tensor? x_row_scales, Tensor? num_tokens) -> ()",
    "combine(Tensor(a!) order, Tensor(b!) out, Tensor token, Tensor? ticket, Tensor expert_out, Tensor? topk_weights, "
    "bool has_backward) -> ()",
    "combine_backward(Tensor(a!) order, Tensor(b!) grad_expert_out, Tensor(c!)? grad_scales, "
    "Tensor(d!)? grad_row_scales, Tensor(e!)? grad_rows, Tensor(f!)? grad_topk_weights, Tensor ticket, Tensor grad, "
    "Tensor? expert_out, Tensor? topk_weights) -> ()",
    "redispatch(Tensor(a!) order, Tensor(b!) recv_tokens, Tensor(c!)? recv_scales, Tensor(d!)? recv_row_scales, "
    "Tensor ticket, Tensor x, Tensor topk_idx, Tensor? topk_weights, Tensor? x_scales, Tensor? x_row_scales, "
    "Tensor? num_tokens) -> ()",
    "restore(Tensor(a!) order, Tensor(b!) recv_tokens, Tensor(c!)? recv_scales, Tensor(d!)? recv_row_scales, "
    "Tensor ticket, bool is_last) -> ()",
    "dispatch_backward(Tensor(a!) order, Tensor(b!)? grad_x, Tensor(c!)? grad_topk_weights, Tensor ticket, "
    "Tensor? grad_tokens, Tensor? grad_recv_weights) -> ()",
    "decode(Tensor(a!) out, Tensor ticket, Tensor tokens, Tensor? scales, Tensor? row_scales) -> ()",
)

_MOVED_GRADS = ("grad_expert_out", "grad_expert_out_scales", "grad_expert_out_row_scales")

_OK, _REFUSED = int(_C.Status.OK), int(_C.Status.REFUSED)


@dataclass(slots=True)
class Attempt:
    """What the checks of one op found: the values that the call needs, or why this rank refuses."""

    error: Exception | None = None

    def take(self) -> Exception | None:
        """Hand the error over: one that a frame of its own traceback refers to keeps that frame's tickets alive."""
        error, self.error = self.error, None
        return error

    def run(self, check: Callable[[], None]) -> int:
        """Run the checks; return this rank's refusal for the peers."""
        try:
            check()
        except Exception as error:  # whatever it is, peers must not wait; `settle` raises it after the round
            self.error = error
            return refusal_of(error)
        return 0


def _settle(arena: Generation, outcome: _C.Outcome, attempt: Attempt, op: str) -> None:
    """Raise what this rank, a peer, or a wait has to say about a call.

    Raises:
        EpbufError: own error; that of the refusing rank; what poisoned the arena.
    """
    if outcome.status == _OK and attempt.error is None:
        return
    error = attempt.take()
    try:
        if error is not None or (outcome.status == _REFUSED and not arena.engine.synchronous):
            arena.count_own_refusal()
        if outcome.status == _REFUSED:
            raise error or peer_error(op, outcome.refusing_rank, outcome.refusal)
        if outcome.status != _OK:
            raise arena.failure() from error
        if error is not None:
            raise error
    finally:
        del error


def route(
    order: torch.Tensor, offs: torch.Tensor, counts: torch.Tensor, overflow: torch.Tensor, token: torch.Tensor,
    topk_idx: torch.Tensor, num_tokens: torch.Tensor | None, x: torch.Tensor, x_scales: torch.Tensor | None,
    x_row_scales: torch.Tensor | None, topk_weights: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Exchange counts, compute slots, claim a forward workspace and the ticket.

    Takes the tensors of the dispatch that follows, too: COUNT is the one place where a rank can refuse them.
    """
    handle, frame, lease, *among = token.tolist()
    arena, tokens = arena_of(handle), Tokens(x, topk_idx, topk_weights, x_scales, x_row_scales, num_tokens)
    if lease == NO_CLAIM:
        return _acquire_and_route(arena, None if frame == NO_FRAME else frame, among or None, tokens)
    ticket, _ = _route(arena, frame, lease, (offs, counts, overflow), tokens)
    return make_ticket_tensor(arena.book, ticket.serial)


def _acquire_and_route(arena: Generation, asked: int | None, among: list[int] | None, tokens: Tokens) -> torch.Tensor:
    """Route for a lease that a selective checkpoint's second pass acquired, when no route was saved for it."""
    frame, lease = arena.book.acquire(asked, caller(), among)
    try:
        ticket, _ = _route(arena, frame, lease, arena.routed(frame), tokens)
    except BaseException:
        arena.book.end(lease)
        raise
    return make_ticket_tensor(arena.book, ticket.serial)


def dispatch(
    order: torch.Tensor, recv_tokens: torch.Tensor, recv_scales: torch.Tensor | None,
    recv_row_scales: torch.Tensor | None, recv_topk_weights: torch.Tensor, ticket: torch.Tensor, x: torch.Tensor,
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, x_scales: torch.Tensor | None,
    x_row_scales: torch.Tensor | None, num_tokens: torch.Tensor | None,
) -> None:  # fmt: skip
    """Move rows, scales and weights into their slots, zero padding, wait until all have arrived.

    A ticket whose combine is over comes from a selective checkpoint that has saved the route: its round is repeated.

    Raises:
        CapacityError: overflow_policy="error" and some rank overflowed; on every rank.
        ConfigError: validate_ids and some rank's id is not below num_experts; on every rank.
    """
    arena, state = state_of(ticket)
    frame, attempt, place = state.frame, Attempt(), Place(state.frame, -1)
    filled = Encoded(recv_tokens, recv_scales, recv_row_scales)
    sent = Tokens(x, topk_idx, topk_weights, x_scales, x_row_scales, num_tokens)

    def check() -> None:
        if state.combined:
            check_sent(arena, sent, frame)
        place.workspace = _claim(arena, frame, "forward")
        arena.expect_same(RECEIVED, filled, arena.received(frame, place.workspace))
        arena.expect("recv_topk_weights", frame, recv_topk_weights)

    place.refusal = attempt.run(check)
    if state.combined:
        _route_again(arena, state, place, sent, attempt)
    increment_version((*filled.regions, recv_topk_weights))
    _remember_versions(arena, state, filled)
    _push(arena, state, place, sent, attempt)


def _route_again(arena: Generation, state: Ticket, place: Place, sent: Tokens, attempt: Attempt) -> None:
    """Begin one more round of a frame, on every rank: the same slots, for the same lease and ticket."""
    arena.raise_pending()
    arena.book.touch(state.frame, state.recorded_in)
    outcome = arena.engine.route(place, sent.topk_idx, sent.num_tokens)
    if outcome.status != _OK or attempt.error is not None:
        arena.book.end_workspace(state.frame, "forward")
        _settle(arena, outcome, attempt, "dispatch")
    state.workspace, state.combined = place.workspace, False


def combine(
    order: torch.Tensor, out: torch.Tensor, token: torch.Tensor, ticket: torch.Tensor | None,
    expert_out: torch.Tensor, topk_weights: torch.Tensor | None, has_backward: bool,
) -> None:  # fmt: skip
    """Stage rows unless they lie in the window, then add each token's rows in the plan's order into `out`.

    Received rows that are stashed go into their pages, if a backward may follow.
    """
    handle, frame, *_ = token.tolist()
    _pull(arena_of(handle), frame, ticket, (expert_out, topk_weights), out, has_backward=has_backward)


def is_direct() -> bool:
    """Tell whether nobody watches the ops: no compiler traces and no dispatch mode is on.

    Eager code then calls what stands behind an op: the dispatcher takes 2 to 3 us a call.
    """
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0


def route_and_dispatch(lease: Lease, tokens: Tokens) -> tuple[Encoded, torch.Tensor, torch.Tensor]:
    """Do what the ops route and dispatch do, in one call; return the regions of rows and weights, and the ticket.

    Where the arena may grow it does so, and all begins anew in its new memory: before rows move, when there are too
    many, and after that when too few pages of the stash are free, which ranks tell each other with ARRIVED.
    """
    while True:
        arena, frame = cast(Generation, lease.arena), lease.frame
        state, place = _route(arena, frame, lease.serial, arena.routed(frame), tokens)
        grower, num_rows = arena.grower, 0
        if grower is None or not (num_rows := _missing_rows(arena, state)):
            filled, weights, ticket = _push_routed(arena, state, place, tokens)
            if grower is None or state.full_stash < 0 or arena.book.recording is not None:
                return filled, weights, ticket
        arena.book.cancel_ticket(state)
        grower(lease, num_rows)


def _push_routed(
    arena: Generation, state: Ticket, place: Place, tokens: Tokens
) -> tuple[Encoded, torch.Tensor, torch.Tensor]:  # fmt: skip
    ticket = make_ticket_tensor(arena.book, state.serial)
    filled = arena.received(state.frame, place.workspace)
    recv_topk_weights = arena.region("recv_topk_weights", state.frame)
    increment_version((*filled.regions, recv_topk_weights))
    _remember_versions(arena, state, filled)
    _push(arena, state, place, tokens, Attempt(), may_grow=True)
    return filled, recv_topk_weights, ticket


def _missing_rows(arena: Generation, ticket: Ticket) -> int:
    """Return how many rows a routed dispatch needs if those are more than C, else 0. One host read on CUDA.

    A round that a peer refused says nothing about rows, and its rank does not come to grow: all raise instead.
    """
    if arena.book.recording is not None:
        return 0
    error = _read_round(arena, ticket)
    if error is not None:
        arena.book.cancel_ticket(ticket)
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
    if arena.policies[ticket.frame] == "stash":
        ticket.control = _control_before(arena)  # for what dispatch adds
    return ticket.overflowed[1] if ticket.overflowed is not None else 0


def combine_lease(
    lease: Lease, expert_out: torch.Tensor, topk_weights: torch.Tensor | None, out: torch.Tensor | None, *,
    has_backward: bool,
) -> torch.Tensor:  # fmt: skip
    """Do what the op combine does, into a new tensor where `out` is None."""
    arena = cast(Generation, lease.arena)
    arena.require_open("combine")
    return _pull(arena, lease.frame, lease.ticket, (expert_out, topk_weights), out, has_backward=has_backward)


def _route(
    arena: Generation, frame: int, lease: int, regions: tuple[torch.Tensor, torch.Tensor, torch.Tensor], tokens: Tokens
) -> tuple[Ticket, Place]:
    arena.raise_pending()
    book, attempt, x = arena.book, Attempt(), tokens.x
    place = Place(frame, -1, stream=arena.engine.stream_state())

    def check() -> None:
        check_dispatch_order(arena, frame, lease)
        check_sent(arena, tokens, frame)
        if regions is not arena.routed(frame):
            _expect_routed(arena, frame, regions)
        place.workspace = _claim(arena, frame, "forward")

    place.refusal = attempt.run(check)
    graph = book.touch(frame, capture=place.capture)
    control = _control_before(arena) if graph is None else None
    outcome = arena.engine.route(place, tokens.topk_idx, tokens.num_tokens)
    if outcome.status != _OK or attempt.error is not None:
        if place.workspace >= 0:
            book.end_workspace(frame, "forward")
        _settle(arena, outcome, attempt, "dispatch")
    increment_version(regions)
    ticket = book.open_ticket(frame, lease, x.shape[0], arena.capacity_rows, graph)
    ticket.control, ticket.workspace = control, place.workspace
    _remember(ticket, outcome)
    return ticket, place


def _expect_routed(arena: Generation, frame: int, regions: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    for name, region in zip(("offs", "counts", "overflow"), regions, strict=True):
        arena.expect(name, frame, region)


def _push(
    arena: Generation, state: Ticket, place: Place, sent: Tokens, attempt: Attempt, *, may_grow: bool = False
) -> None:  # fmt: skip
    graph = arena.book.touch(state.frame, state.recorded_in, place.capture)
    rows = Encoded(sent.x, sent.x_scales, sent.x_row_scales) if is_encoded(arena, sent) else sent.x
    if arena.policies[state.frame] == "stash" and graph is None:
        for frame in arena.book.take_pages(state.frame):
            arena.engine.return_pages(Place(frame, 0))
    outcome = arena.engine.dispatch(place, rows, sent.topk_weights)
    if attempt.error is not None:
        arena.book.cancel_ticket(state)
    _settle(arena, outcome, attempt, "dispatch")
    if outcome.overflow:
        state.full_stash = outcome.stash_rank
    arena.book.note_overflow(state.frame, arena.routed(state.frame)[2])
    state.filled = True
    if graph is not None or not (arena.may_refuse_result or arena.grower is not None):
        return
    attempt.error = _read_round(arena, state) or _policy_error(arena, state, may_grow=may_grow)
    if attempt.error is not None:
        arena.book.cancel_ticket(state)
        raise attempt.take() or AssertionError("checked above")


def _pull(
    arena: Generation, frame: int, ticket: torch.Tensor | None, rows: tuple[torch.Tensor, torch.Tensor | None],
    out: torch.Tensor | None, *, has_backward: bool,
) -> torch.Tensor:  # fmt: skip
    arena.raise_pending()
    expert_out, topk_weights = rows
    book, attempt, found = arena.book, Attempt(), Rows(in_window=True)
    workspace = book.workspace(frame, "forward")
    state = None if ticket is None else book.ticket(read_ticket(ticket)[1])

    def check() -> None:
        open_ticket = check_combine_order(state, frame)
        assert workspace is not None, "a dispatch without its combine has a forward workspace"
        in_window = False
        if not is_plain_combine(arena, expert_out, topk_weights):
            in_window = check_expert_out(arena, expert_out, open_ticket, workspace)
            check_row_weights(arena, topk_weights, expert_out.shape[0], in_window)
        if out is not None:
            check_out(arena, out, open_ticket.num_tokens, expert_out)
        found.tensor, found.in_window = None if in_window else expert_out, in_window

    refusal = attempt.run(check)
    if workspace is None:  # no cell is owed: all ranks run the same program and raise here
        raise attempt.take() or AssertionError("a combine without a workspace passed its checks")
    if state is None:  # released after its dispatch: the peers wait for READY
        _complete_combine(arena, frame, workspace, attempt, None)
    assert state is not None
    place = Place(frame, workspace, refusal, stream=arena.engine.stream_state())
    book.touch(frame, state.recorded_in, place.capture)
    y = arena.new_token_rows(state.num_tokens) if out is None else out
    outcome = arena.engine.combine(place, found, None if refusal else topk_weights, y)
    if found.tensor is not None:
        increment_version(arena.region("expert_out", workspace))
    _settle_combine(arena, frame, outcome, attempt, state)
    state.combined = True
    if arena.policies[frame] == "stash":
        if has_backward:
            arena.engine.stash(place)
        else:
            arena.engine.return_pages(place)
            arena.book.end_pages(frame)
        state.versions = tuple(region._version for region in arena.received(frame, workspace).regions)
    book.end_workspace(frame, "forward")
    return y


def combine_backward(
    order: torch.Tensor, grad_expert_out: torch.Tensor, grad_scales: torch.Tensor | None,
    grad_row_scales: torch.Tensor | None, grad_rows: torch.Tensor | None, grad_topk_weights: torch.Tensor | None,
    ticket: torch.Tensor, grad: torch.Tensor, expert_out: torch.Tensor | None, topk_weights: torch.Tensor | None,
) -> None:  # fmt: skip
    """Move gradients of tokens into the slots of their rows; with weights, make them the rows' and the weights'.

    An encoded gradient is decoded into `grad_rows`, or left as it is where that is None.
    """
    arena, state = state_of(ticket)
    book, attempt = arena.book, Attempt()
    arena.raise_pending()
    place = Place(state.frame, book.next_workspace(state.frame, "backward"))
    moved = Encoded(grad_expert_out, grad_scales, grad_row_scales)

    def check() -> None:
        nonlocal grad
        grad = _readable(grad)
        check_gradient(arena, "the gradient of y", grad, state.num_tokens)
        place.workspace = arena.index_at("grad_expert_out", grad_expert_out)
        arena.expect_same(_MOVED_GRADS, moved, arena.moved_grads(place.workspace))
        _claim(arena, state.frame, "backward", place.workspace)
        if arena.policies[state.frame] == "stash":
            _claim(arena, state.frame, "forward", state.workspace)

    place.refusal = attempt.run(check)
    book.touch(state.frame, state.recorded_in)
    outcome = arena.engine.combine_backward(place, grad, expects_open=book.crosses(state))
    if outcome.status != _OK or attempt.error is not None:
        book.end_workspace(state.frame, "forward")
    _settle(arena, outcome, attempt, "combine backward")
    if grad_rows is not None:
        _decode(arena, place, moved, grad_rows, is_grad=True)
    if expert_out is not None and topk_weights is not None and grad_topk_weights is not None:
        arena.engine.weight_grad(place, expert_out, topk_weights, grad_topk_weights, grad_rows)
        increment_version(grad_topk_weights)
    increment_version(moved.regions)


def redispatch(
    order: torch.Tensor, recv_tokens: torch.Tensor, recv_scales: torch.Tensor | None,
    recv_row_scales: torch.Tensor | None, ticket: torch.Tensor, x: torch.Tensor, topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None, x_scales: torch.Tensor | None, x_row_scales: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> None:  # fmt: skip
    """Dispatch the same tokens once more, into the workspace that their rows came from, for the experts' backward.

    The frame keeps that workspace until dispatch's backward. Slots and zones come out as they were, weights are not
    sent again, and the regions get the version back that autograd has saved.

    Raises:
        LeaseError: another frame has the workspace.
    """
    arena, state = state_of(ticket)
    frame, attempt, place = state.frame, Attempt(), Place(state.frame, -1, repeats=True)
    filled = Encoded(recv_tokens, recv_scales, recv_row_scales)
    sent = Tokens(x, topk_idx, topk_weights, x_scales, x_row_scales, num_tokens)

    def check() -> None:
        arena.expect_same(RECEIVED, filled, arena.received(frame, state.workspace))
        place.workspace = _claim(arena, frame, "forward", state.workspace)

    place.refusal = attempt.run(check)
    arena.book.touch(frame, state.recorded_in)
    try:
        outcome = arena.engine.route(place, topk_idx, num_tokens)
        _settle(arena, outcome, attempt, "combine backward")
        rows = Encoded(x, x_scales, x_row_scales) if is_encoded(arena, sent) else x
        outcome = arena.engine.dispatch(place, rows, None)
        torch._C._autograd._unsafe_set_version_counter(filled.regions, state.versions)
        _settle(arena, outcome, attempt, "combine backward")
    except BaseException:
        arena.book.end_workspace(frame, "forward")
        raise


def restore(
    order: torch.Tensor, recv_tokens: torch.Tensor, recv_scales: torch.Tensor | None,
    recv_row_scales: torch.Tensor | None, ticket: torch.Tensor, is_last: bool,
) -> None:  # fmt: skip
    """Copy stashed rows back into the workspace that they came from, for the experts' backward.

    The frame keeps that workspace, which combine's backward has claimed, until dispatch's backward. The regions get the
    version back that they had in combine. With `is_last` the pages are free again; else another backward may follow.
    """
    arena, state = state_of(ticket)
    attempt, filled = Attempt(), Encoded(recv_tokens, recv_scales, recv_row_scales)
    attempt.run(lambda: arena.expect_same(RECEIVED, filled, arena.received(state.frame, state.workspace)))
    arena.book.touch(state.frame, state.recorded_in)
    outcome = arena.engine.restore(Place(state.frame, state.workspace), returns_pages=is_last)
    if is_last:
        arena.book.end_pages(state.frame)
    torch._C._autograd._unsafe_set_version_counter(filled.regions, state.versions)
    _settle(arena, outcome, attempt, "combine backward")


def _remember_versions(arena: Generation, state: Ticket, filled: Encoded) -> None:
    """Note the versions that rows have when they come back; no dispatch gets one that another had before it."""
    if arena.policies[state.frame] != "keep":
        state.versions = arena.new_versions(state.workspace, filled.regions)


def dispatch_backward(
    order: torch.Tensor, grad_x: torch.Tensor | None, grad_topk_weights: torch.Tensor | None, ticket: torch.Tensor,
    grad_tokens: torch.Tensor | None, grad_recv_weights: torch.Tensor | None,
) -> None:  # fmt: skip
    """Stage gradients of rows unless they lie in the window, then add each token's, and fetch those of the weights."""
    arena, state = state_of(ticket)
    arena.raise_pending()
    book, attempt = arena.book, Attempt()
    workspace, begins_use = book.workspace(state.frame, "backward"), False
    if workspace is None:
        workspace, begins_use = book.claim_workspace(state.frame, "backward"), True
    rows, weights = Rows(), Rows()
    row_grads = None if grad_tokens is None else _readable(grad_tokens)
    weight_grads = None if grad_recv_weights is None else _readable(grad_recv_weights)

    def check() -> None:
        if row_grads is not None:
            check_gradient(arena, "the gradient of recv.tokens", row_grads, arena.capacity_rows)
        _fill(arena, rows, "grad_recv_tokens", row_grads, workspace)
        _fill(arena, weights, "grad_recv_topk_weights", weight_grads, workspace)

    refusal = attempt.run(check)
    if refusal:
        rows, weights = Rows(), Rows()
    is_rehearsal = book.rehearses(state)
    book.touch(state.frame, state.recorded_in)
    outcome = arena.engine.dispatch_backward(
        Place(state.frame, workspace, refusal), (rows, weights), grad_x, grad_topk_weights,
        num_tokens=state.num_tokens, begins_use=begins_use, clears_open=not (state.returned or is_rehearsal),
    )  # fmt: skip
    book.end_workspace(state.frame, "backward")
    if arena.policies[state.frame] != "keep" and state.combined:
        book.end_workspace(state.frame, "forward")
    _settle(arena, outcome, attempt, "dispatch backward")
    increment_version((arena.region("grad_recv_tokens", workspace), arena.region("grad_recv_topk_weights", workspace)))
    state.returned = state.returned or not is_rehearsal


def decode(
    out: torch.Tensor, ticket: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor | None,
    row_scales: torch.Tensor | None,
) -> None:  # fmt: skip
    """Turn received rows back into the token dtype: those below offs[-1]; of trimmed ones the others become 0.

    Raises:
        ConfigError: raw bytes, which only their maker can read.
        LeaseError: save_recv=False, and combine has ended the workspace that they lie in.
    """
    arena, state = state_of(ticket)
    arena.raise_pending()
    if not arena.recv_payload.is_quantised:
        raise ConfigError(f'dequantize() of a "{arena.recv_payload.format}" payload: read recv.tokens and recv.scales')
    if not arena.recv_in_frame[state.frame] and arena.book.workspace(state.frame, "forward") is None:
        raise LeaseError(
            f"dequantize() after the combine of frame {state.frame}: with save_recv=False received rows last from "
            "dispatch to combine; call it before, or keep the rows: save_recv=True, recv_policy='keep'"
        )
    arena.book.touch(state.frame, state.recorded_in)
    _decode(arena, Place(state.frame, -1), Encoded(tokens, scales, row_scales), out, is_grad=False)
    state.decoded = True


def _decode(arena: Generation, place: Place, rows: Encoded, out: torch.Tensor, *, is_grad: bool) -> None:
    """Decode rows below offs[-1]; of fewer rows than C, those of trim(), the others become 0."""
    if out.shape[0] != arena.capacity_rows:
        out.zero_()
    arena.engine.decode(place, rows, out, is_grad=is_grad)
    increment_version(out)


def _readable(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient that the engine can read: dense, 16-byte aligned. Autograd hands over views of any kind."""
    dense = grad.contiguous()
    is_padded = dense.ndim == 2 and dense.stride(0) != dense.shape[1]  # one row of a wider tensor counts as contiguous
    if is_padded or dense.data_ptr() % ROW_ALIGNMENT:
        return dense.clone(memory_format=torch.contiguous_format)
    return dense


def refuse_dispatch(lease: Lease, attempt: Attempt) -> None:
    """Complete the round of a dispatch whose arguments no op schema takes, then raise."""
    handle, frame, *_ = lease.token.tolist()
    arena = arena_of(handle)
    outcome = arena.engine.route(Place(frame, -1, refusal_of(attempt.error)), lease.token, None)
    _settle(arena, outcome, attempt, "dispatch")


def refuse_combine(lease: Lease, attempt: Attempt) -> None:
    """Complete the round of a combine whose arguments no op schema takes, then raise."""
    handle, frame, *_ = lease.token.tolist()
    arena = arena_of(handle)
    workspace = arena.book.workspace(frame, "forward")
    if workspace is None:
        raise attempt.take() or AssertionError("refused without an error")
    state = None if lease.ticket is None else arena.book.ticket(read_ticket(lease.ticket)[1])
    _complete_combine(arena, frame, workspace, attempt, state)


def _complete_combine(
    arena: Generation, frame: int, workspace: int, attempt: Attempt, state: Ticket | None
) -> None:  # fmt: skip
    place = Place(frame, workspace, refusal_of(attempt.error))
    outcome = arena.engine.combine(place, Rows(in_window=True), None, arena.new_token_rows(0))
    _settle_combine(arena, frame, outcome, attempt, state)


def _settle_combine(
    arena: Generation, frame: int, outcome: _C.Outcome, attempt: Attempt, state: Ticket | None
) -> None:  # fmt: skip
    """Settle; where peers do not hear of a refusal before their next dispatch, this combine is over for them."""
    if attempt.error is not None and arena.engine.refuses_later:
        arena.book.end_workspace(frame, "forward")
        if state is not None:
            state.combined = True
    _settle(arena, outcome, attempt, "combine")


def _claim(arena: Generation, frame: int, direction: Direction, index: int | None = None) -> int:
    try:
        return arena.book.claim_workspace(frame, direction, index)
    except LeaseError as error:
        refuse(_C.Refusal.WORKSPACE, error)


def state_of(ticket: torch.Tensor) -> tuple[Generation, Ticket]:
    """Return the arena and the record behind a ticket tensor.

    Raises:
        LeaseError: either has ended.
    """
    handle, serial = read_ticket(ticket)
    arena = arena_of(handle)
    return arena, arena.book.ticket(serial)


def _fill(arena: Generation, rows: Rows, name: str, tensor: torch.Tensor | None, workspace: int) -> None:
    rows.in_window = tensor is not None and tensor.data_ptr() == arena.address(name, workspace)
    rows.tensor = None if rows.in_window else tensor


def _remember(ticket: Ticket, outcome: _C.Outcome) -> None:
    if outcome.overflow:
        ticket.overflowed = (outcome.max_demand_rank, outcome.max_demand_rows)
    if outcome.num_bad_ids:
        ticket.bad_id = (outcome.bad_rank, outcome.bad_token, outcome.bad_value)


def _control_before(arena: Generation) -> torch.Tensor | None:
    """Copy this rank's own words in stream order, where an eager dispatch must tell what its round adds to them.

    The COUNT cells say it too, but a faster peer may overwrite them as soon as this rank has dispatched.
    """
    needed = (arena.may_refuse_result or arena.grower is not None) and not arena.engine.synchronous
    return arena.region("control").clone() if needed else None


def _read_round(arena: Generation, ticket: Ticket) -> EpbufError | None:
    """Read what an eager dispatch on CUDA recorded: the one host read, made only where a policy asks for it.

    Notes overflow and bad ids in the ticket; returns what poisoned the arena, or a rank that refused has to say.
    """
    if ticket.control is None:
        return None
    both = torch.stack((ticket.control, arena.region("control"))).cpu()
    ticket.control = None
    before, now = _C.Control.at(both[0].data_ptr()), _C.Control.at(both[1].data_ptr())
    error = arena.trouble(now)
    if error is not None:
        return error
    # Another stream's dispatch may have overflowed meanwhile, so this frame's own flag decides.
    if now.num_overflows > before.num_overflows and bool(arena.region("overflow", ticket.frame)):
        ticket.overflowed = (now.max_demand_rank, now.max_demand_rows)
    if now.num_stash_overflows > before.num_stash_overflows and bool(arena.region("overflow", ticket.frame)):
        ticket.full_stash = now.stash_rank
    if now.num_bad_ids > before.num_bad_ids:
        ticket.bad_id = (now.bad_rank, now.bad_token, now.bad_value)
    return None


def _policy_error(arena: Generation, ticket: Ticket, *, may_grow: bool) -> EpbufError | None:
    """Return what an eager dispatch must raise, on every rank, once its round is complete."""
    config = arena.plan.config
    if ticket.bad_id is not None and config.validate_ids:
        rank, token, value = ticket.bad_id
        return ConfigError(
            f"rank {rank} routes token {token} to expert {value}; ids lie in [0, num_experts={config.num_experts}), "
            "and a negative id means no expert"
        )
    found = _shortage(arena, ticket)
    if not found or (arena.grower is not None and may_grow):
        return None
    if arena.grower is not None:
        return CapacityError(
            f"{found}: a dispatch in compiled code, or under a torch dispatch mode, cannot grow the arena; run it "
            'eagerly, for example with stance("force_eager")'
        )
    if config.overflow_policy == "error":
        return CapacityError(f'{found}; plan more, balance the router, or use overflow_policy="drop"')
    return None


def _shortage(arena: Generation, ticket: Ticket) -> str:
    """Say what a dispatch had too little of; nothing if it had enough."""
    if ticket.overflowed is not None:
        found = "rank {} needs {} rows (padding included)".format(*ticket.overflowed)
        return f"{found} and recv_capacity_per_rank is {arena.plan.capacity_rows}"
    if ticket.full_stash >= 0:
        return (
            f"rank {ticket.full_stash} receives more rows than the free pages of its stash hold, which has "
            f"stash_rows={arena.stash_rows} for all dispatches that wait for their backward"
        )
    return ""


def _fake_route(*_: object) -> torch.Tensor:
    return torch.empty(8, dtype=torch.uint8, device="cpu")


def _fake_nothing(*_: object) -> None:
    return None


def _register() -> None:
    ops = (route, dispatch, combine, combine_backward, redispatch, restore, dispatch_backward, decode)
    kernels = {op.__name__: op for op in ops}
    for schema in _SCHEMAS:
        name = schema.split("(")[0]
        # The book advances when an op is called: a graph that the compiler makes and replays would not.
        _LIBRARY.define(schema, tags=torch.Tag.cudagraph_unsafe)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, kernels[name], "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"epbuf::{name}", _fake_route if name == "route" else _fake_nothing, lib=_LIBRARY)


_register()

# The overloads themselves: the packet behind `torch.ops.epbuf.route` would look for the right one at every call.
ROUTE: torch._ops.OpOverload = torch.ops.epbuf.route.default
DISPATCH: torch._ops.OpOverload = torch.ops.epbuf.dispatch.default
COMBINE: torch._ops.OpOverload = torch.ops.epbuf.combine.default
COMBINE_BACKWARD: torch._ops.OpOverload = torch.ops.epbuf.combine_backward.default
DECODE: torch._ops.OpOverload = torch.ops.epbuf.decode.default
REDISPATCH: torch._ops.OpOverload = torch.ops.epbuf.redispatch.default
RESTORE: torch._ops.OpOverload = torch.ops.epbuf.restore.default
DISPATCH_BACKWARD: torch._ops.OpOverload = torch.ops.epbuf.dispatch_backward.default
