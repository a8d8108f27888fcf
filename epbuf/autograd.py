"""Differentiable `dispatch` and `combine`.

The functions here hold no state: they call the ops, and what backward needs is the ticket that they save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from epbuf import _C, ops
from epbuf.checks import SAVE_ALL_OPS, Tokens, are_placed, check_out_grad, check_places, check_raw_grad
from epbuf.engine import Encoded
from epbuf.errors import ConfigError, LeaseError
from epbuf.generation import Generation, as_bytes
from epbuf.lease import Lease, refuse_while_recording


@dataclass
class Received:
    """What this rank received, expert-major: zone j holds the rows of local expert j.

    Rows past `offs[-1]` are not written: reduce over `trim()` or under `row_mask()`, never over all C rows.

    Attributes:
        tokens: [C, H] token dtype, or packed in a payload; padding rows inside a zone are 0. Only for payload "same" do
            they carry a gradient.
        scales: [C, S] block scales, in the order of the payload's scale_layout, 0 for padding rows; None when the
            payload has none.
        row_scales: [C] float32 for nvfp4, 0 for padding rows; else None.
        carrier: tensor that autograd runs through; for payload "same" it is `tokens`, else [C, H] token dtype with
            strides (0, 0) over one NaN. An expert kernel takes (carrier, tokens, scales) and gives its gradient, in
            the token dtype, to the carrier.
        topk_weights: [C] float32; 0 for padding, 1 for rows when dispatch had no weights.
        offs: [L] int32, ends of the zones, as `torch._grouped_mm(offs=)` takes them.
        tokens_per_expert: [L] int64, padded rows.
        valid_tokens_per_expert: [L] int64, true rows kept.
        total_recv_tokens: [1] int64, rows this step needs, padding included, before dropping.
        overflow: [1] float32, 1 on all ranks when any rank overflowed; usable as an optimiser's found_inf.
        ticket: [8] uint8; keeps the frame busy while it lives.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    row_scales: torch.Tensor | None
    carrier: torch.Tensor
    topk_weights: torch.Tensor
    offs: torch.Tensor
    tokens_per_expert: torch.Tensor
    valid_tokens_per_expert: torch.Tensor
    total_recv_tokens: torch.Tensor
    overflow: torch.Tensor
    ticket: torch.Tensor

    def trim(self) -> Received:
        """Return views of the rows that exist, at least max(A, 1) of them, zero where no zone reaches.

        Reads the device once.

        Raises:
            CaptureError: called while capturing.
        """
        arena, state = ops.state_of(self.ticket)
        refuse_while_recording(arena.book, "trim()", "use recv.offs or row_mask(), which stay on the device")
        num_rows = int(self.offs[-1].item())
        state.num_rows = min(max(num_rows, arena.plan.config.expert_alignment), arena.plan.capacity_rows)
        cut = partial(_first, num_rows=state.num_rows, are_written=num_rows > 0)
        tokens = cut(self.tokens)
        carrier = tokens if self.carrier is self.tokens else self.carrier[: state.num_rows]
        return replace(
            self, tokens=tokens, carrier=carrier, topk_weights=cut(self.topk_weights),
            scales=None if self.scales is None else cut(self.scales),
            row_scales=None if self.row_scales is None else cut(self.row_scales),
        )  # fmt: skip

    def dequantize(self) -> torch.Tensor:
        """Return rows in the token dtype, differentiable (straight through); `tokens` itself for payload "same".

        Rows past `offs[-1]` are not written. What rounding up made too large for the token dtype is its largest number.

        Shapes: [rows of tokens, H] token dtype, an ordinary tensor.

        Raises:
            ConfigError: raw bytes.
            LeaseError: save_recv=False, and combine has ended the workspace.
        """
        if self.carrier is self.tokens:
            return self.tokens
        scales = None if self.scales is None else as_bytes(self.scales)
        return cast(torch.Tensor, _apply(_Dequantize, self.carrier, self.tokens, scales, self.row_scales, self.ticket))

    def row_mask(self) -> torch.Tensor:
        """Tell which rows are true rows: neither padding nor past the last zone.

        Shapes: [rows of tokens] bool.
        """
        row = torch.arange(self.tokens.shape[0], device=self.offs.device)
        zone = torch.searchsorted(self.offs, row, right=True).clamp(max=self.offs.shape[0] - 1)
        start = self.offs[zone] - self.tokens_per_expert[zone]
        return (row < self.offs[-1]) & (row - start < self.valid_tokens_per_expert[zone])


def dispatch(
    lease: Lease, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
    x_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None, num_tokens: torch.Tensor | None = None,
) -> Received:  # fmt: skip
    """Send each token to the ranks of its experts; one dispatch per lease.

    Collective: every rank calls it for the same frame, with its own T (0 included). Differentiable in `x` and
    `topk_weights`. Runs on the current stream; does not synchronise with the host on CUDA.

    Args:
        lease: a living lease that has not dispatched.
        x: [T, H] token dtype, which a quantised payload encodes on the way; or rows that are encoded already, and all
            rows of a raw payload ([T, row_bytes] uint8): these get no gradient. Row stride and base are multiples of 16
            bytes.
        topk_idx: [T, K] int32 or int64; negative: no expert.
        topk_weights: [T, K] float32, or None.
        x_scales: block scales of rows that are encoded already, [T, S] row by row whatever the scale_layout; for nvfp4
            (block scales, row scales [T] float32); of a raw payload [T, scale_row_bytes] uint8. Scales of one byte may
            come as uint8.
        num_tokens: [1] int32 or int64 on the device; rows at or past it are ignored, their y, dx and dw are 0.

    Raises:
        ConfigError: a bad argument here, or on the rank that is named.
        LeaseError: the lease has dispatched or ended, no workspace is free, or ranks disagree about the frame.
        CapacityError: overflow_policy="error" and some rank overflowed (eager; on all ranks).
        PeerTimeoutError: a rank did not arrive.
    """
    arena = _arena(lease)
    if arena.is_external:
        _refuse_external("dispatch")
    if torch.compiler.is_compiling() and (policy := arena.policies[lease.frame]) != "keep":
        raise ConfigError(
            f'recv_policy="{policy}" inside torch.compile: compiled code would read the rows of the first dispatch; '
            "call the layer outside the compiled function, or compile the experts alone"
        )
    sent = _tokens_of(lease, x, topk_idx, topk_weights, x_scales, num_tokens)
    if _records():
        carrier, weights, ticket = _apply(_Dispatch, arena.anchor, x, topk_weights, sent, lease)
    else:
        carrier, weights, ticket = _forward_dispatch(lease, sent, x, topk_weights)
    arena, frame = _arena(lease), lease.frame  # others than before, if the arena has grown
    if torch.compiler.is_compiling():
        ticket = ticket.detach()  # a checkpoint returns to the code around it what torch ops made, but no HOP's results
    lease.ticket, lease.num_tokens = ticket, x.shape[0]
    if arena.policies[frame] == "recompute":
        parts = (x, topk_idx, topk_weights, sent.x_scales, sent.x_row_scales, num_tokens)
        lease.sent = tuple(None if part is None else part.detach() for part in parts)
    tokens, recv_scales, recv_row_scales = _received_views(arena, frame, carrier)
    offs, per_expert, valid_per_expert, total, overflow = _routing_views(arena, frame)
    return Received(
        tokens, recv_scales, recv_row_scales, carrier, weights, offs, per_expert, valid_per_expert, total, overflow,
        ticket,
    )  # fmt: skip


def _tokens_of(
    lease: Lease, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None,
    x_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None, num_tokens: torch.Tensor | None,
) -> Tokens:  # fmt: skip
    """Return what dispatch was given; complete the round and raise if a tensor is none, or on another device."""
    arena = _arena(lease)
    scales, row_scales = x_scales if isinstance(x_scales, tuple) and len(x_scales) == 2 else (x_scales, None)
    if not are_placed(arena, (x, topk_idx), (topk_weights, scales, row_scales, num_tokens)):
        needed = {"x": x, "topk_idx": topk_idx}
        is_pair = arena.recv_payload.format == "nvfp4"
        block_scales = "the first of x_scales=(scales, row_scales)" if is_pair else "x_scales"
        optional = {"topk_weights": topk_weights, block_scales: scales, "num_tokens": num_tokens}
        if row_scales is not None:
            optional["the row scales of x_scales"] = row_scales
        _refuse(lease, ops.refuse_dispatch, lambda: check_places(arena, needed, optional))
    if torch.compiler.is_compiling() and isinstance(scales, torch.Tensor) and scales.dtype == arena.recv_scale_dtype:
        scales = as_bytes(scales)
    return Tokens(x, topk_idx, topk_weights, cast(torch.Tensor, scales), row_scales, num_tokens)


def combine(
    lease: Lease, expert_out: torch.Tensor, *, topk_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None, raw_grad: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Bring each token's rows back and add them: y[t] = sum over k, in float32 and k order, rounded once.

    With combine_order="by_rank" each rank adds its rows of a token so, and y is the sum of what it gets, in rank order.
    Collective, like dispatch. Reads rows below `offs[-1]` only and never changes `expert_out`. `lease.expert_out`,
    written by the experts themselves, is read in place; any other tensor is staged by one copy of the live rows.

    Args:
        expert_out: [C, H] token dtype (or the rows of `Received.trim()`).
        topk_weights: [C] float32, `recv.topk_weights`: each row times its weight, in the copy that stages it.
        out: [T, H] token dtype to write y into.
        raw_grad: give the experts the gradient as it came, in the format of combine_grad_payload: a NaN carrier, behind
            which `unpack` finds data and scales. Otherwise they get rows decoded into the token dtype.

    Raises:
        ConfigError: a bad argument here, or on the rank that is named.
        LeaseError: combine before dispatch, after release(), or twice.
        PeerTimeoutError: a rank did not arrive.

    Shapes: returns [T, H] token dtype.
    """
    arena = _arena(lease)
    if arena.is_external:
        _refuse_external("combine")
    if not are_placed(arena, (expert_out,), (topk_weights, out)):
        optional = {"topk_weights": topk_weights, "out": out}
        _refuse(lease, ops.refuse_combine, lambda: check_places(arena, {"expert_out": expert_out}, optional))
    if raw_grad or arena.grad_payload.format == "raw":
        _refuse(lease, ops.refuse_combine, lambda: check_raw_grad(arena, raw_grad, topk_weights))
    if out is not None:
        _refuse(lease, ops.refuse_combine, lambda: check_out_grad(out))
    if out is not None or _records():
        has_backward = torch.is_grad_enabled()
        return cast(torch.Tensor, _apply(_Combine, expert_out, topk_weights, out, lease, raw_grad, has_backward))
    return _forward_combine(lease, expert_out, topk_weights, None, has_backward=False)


def _refuse_external(call: str) -> NoReturn:
    raise ConfigError(
        f'{call} on an arena of engine="external", whose rows the caller\'s own kernels move: mark those with '
        'lease.begin(...) and lease.end(...), or open the arena with engine="native"'
    )


def unpack(grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return what lies behind the gradient that a combine with raw_grad=True gave its experts.

    Views of the backward workspace, valid until dispatch's backward. Local; reads nothing.

    Shapes: data [rows of grad, H or packed], scales [rows, S] or None, and, for nvfp4 only, row_scales [rows] float32.

    Raises:
        ConfigError: any other tensor, also some rows of the gradient and what was computed from it.
        LeaseError: the workspace has ended.
    """
    for reference in _C.handle_objects():
        arena: Generation | None = reference()
        found = arena.find_carried(grad) if arena is not None and isinstance(grad, torch.Tensor) else None
        if arena is not None and found is not None:
            return _behind(arena, *found, grad.shape[0])
    what = f"a {list(grad.shape)} {grad.dtype} tensor" if isinstance(grad, torch.Tensor) else type(grad).__name__
    raise ConfigError(f"unpack takes the gradient that combine(raw_grad=True) gives, found {what}")


def _behind(arena: Generation, frame: int, workspace: int, num_rows: int) -> tuple[torch.Tensor | None, ...]:
    if arena.book.workspace(frame, "backward") != workspace:
        raise LeaseError(
            f"unpack of a gradient of frame {frame} whose backward workspace has ended: its rows last from combine "
            "backward to dispatch backward; unpack it in the backward of the experts"
        )
    moved = arena.moved_grads(workspace)
    scales = None
    if moved.scales is not None:
        scales = arena.region("grad_expert_out_scales", workspace)[:, : arena.plan.num_grad_scale_columns]
    parts = (moved.data, scales, moved.row_scales)
    views = [None if part is None else _trimmed(arena, frame, part.detach(), num_rows) for part in parts]
    return tuple(views if moved.row_scales is not None else views[:2])


class _Dequantize(torch.autograd.Function):
    """Straight through: the gradient of the decoded rows is the carrier's."""

    @staticmethod
    def forward(
        ctx: Any, carrier: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor | None,
        row_scales: torch.Tensor | None, ticket: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        out = torch.empty(carrier.shape, dtype=carrier.dtype, device=carrier.device)
        if ops.is_direct():
            ops.decode(out, ticket, tokens, scales, row_scales)
        elif torch.compiler.is_compiling():
            ops.DECODE(out, ticket, tokens, scales, row_scales)
        else:
            _decode_watched(out, ticket, tokens, scales, row_scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None, None, None, None


def _decode_watched(
    out: torch.Tensor, ticket: torch.Tensor, tokens: torch.Tensor, scales: torch.Tensor | None,
    row_scales: torch.Tensor | None,
) -> None:  # fmt: skip
    """Decode under a dispatch mode; once more where a selective checkpoint has saved the op, which returns nothing."""
    state = ops.state_of(ticket)[1]
    state.decoded = False
    ops.DECODE(out, ticket, tokens, scales, row_scales)
    if not state.decoded:
        with _disable_current_modes():  # the checkpoint knows ops of its first pass only
            ops.decode(out, ticket, tokens, scales, row_scales)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor | None, sent: Tokens,
        lease: Lease,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        carrier, weights, ticket = _forward_dispatch(lease, sent, x, topk_weights)
        ctx.save_for_backward(ticket)
        ctx.arena, ctx.num_tokens = lease.arena, x.shape[0]
        ctx.takes_gradient = x.dtype == carrier.dtype
        ctx.set_materialize_grads(False)
        return carrier, weights, ticket

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_tokens: torch.Tensor | None, grad_weights: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        arena: Generation = ctx.arena
        (ticket,) = ctx.saved_tensors
        _require_backward(arena)
        dx = _token_rows(arena, ctx.num_tokens) if ctx.needs_input_grad[1] and ctx.takes_gradient else None
        dw = _token_weights(arena, ctx.num_tokens) if ctx.needs_input_grad[2] else None
        ops.DISPATCH_BACKWARD(arena.order, dx, dw, ticket, grad_tokens, grad_weights)
        return None, dx, dw, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, expert_out: torch.Tensor, topk_weights: torch.Tensor | None, out: torch.Tensor | None, lease: Lease,
        raw_grad: bool, has_backward: bool,
    ) -> torch.Tensor:  # fmt: skip
        arena, ticket = _arena(lease), lease.ticket
        y = _forward_combine(lease, expert_out, topk_weights, out, has_backward=has_backward)
        ctx.arena, ctx.num_rows, ctx.weighted = arena, expert_out.shape[0], topk_weights is not None
        ctx.frame, ctx.raw_grad = lease.frame, raw_grad
        if topk_weights is None:
            ctx.save_for_backward(ticket, None, None, *lease.sent)
        else:
            ctx.save_for_backward(ticket, expert_out, _saved_weights(arena, lease, topk_weights), *lease.sent)
            if (
                ticket is not None and not torch.compiler.is_compiling()
            ):  # a checkpoint's second pass has its own ticket
                ops.state_of(ticket)[1].weights_version = topk_weights._version
        ctx.set_materialize_grads(False)
        if out is not None:
            ctx.mark_dirty(out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        arena: Generation = ctx.arena
        ticket, expert_out, weights, *sent = ctx.saved_tensors  # once: a checkpoint unpacks them once
        _require_backward(arena)
        workspace = _backward_workspace(arena, ticket)
        moved = arena.moved_grads(workspace)
        grad_weights = arena.region("grad_recv_topk_weights", workspace) if ctx.weighted else None
        decodes = arena.grad_payload.format != "same" and not ctx.raw_grad
        decoded = _token_rows(arena, ctx.num_rows) if decodes else None
        if ctx.weighted and weights is None:
            weights = _weights_of(arena, ticket)
        dy = grad if grad is not None else _missing_gradient(arena, ticket)
        ops.COMBINE_BACKWARD(
            arena.order, moved.data, moved.scales, moved.row_scales, decoded, grad_weights, ticket, dy, expert_out,
            weights,
        )  # fmt: skip
        if not torch.compiler.is_compiling():
            _bring_back(arena, ticket, sent)
        if grad_weights is not None:
            grad_weights = _first_rows(arena, ticket, grad_weights, ctx.num_rows)
        if ctx.raw_grad:
            frame = ctx.frame if torch.compiler.is_compiling() else ops.state_of(ticket)[1].frame
            return arena.grad_carrier(frame, workspace, ctx.num_rows), grad_weights, None, None, None, None
        rows = _first_rows(arena, ticket, moved.data, ctx.num_rows) if decoded is None else decoded
        return rows, grad_weights, None, None, None, None


def _bring_back(arena: Generation, ticket: torch.Tensor, sent: list[torch.Tensor | None]) -> None:
    """Bring received rows back into the workspace that they came from, unless the frame keeps them."""
    state = ops.state_of(ticket)[1]
    policy = arena.policies[state.frame]
    if policy == "keep":
        return
    parts = arena.received(state.frame, state.workspace).parts
    if policy == "recompute":
        ops.REDISPATCH(arena.order, *parts, ticket, *sent)
    else:
        ops.RESTORE(arena.order, *parts, ticket, not torch._C._autograd._get_current_graph_task_keep_graph())


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Any:
    """Call `function.apply`; in eager code without what that adds for functorch, half of its time."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def _records() -> bool:
    """Tell whether a call must go through its autograd.Function: in grad mode, whatever the inputs need."""
    return torch.is_grad_enabled() or not ops.is_direct()


def _forward_dispatch(
    lease: Lease, sent: Tokens, x: torch.Tensor, topk_weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the carrier of the rows that arrived, a view of their weights, and the ticket.

    `x` and `topk_weights` are those of `sent`, as traced code must see them: arguments of the autograd.Function.
    """
    if ops.is_direct():
        filled, recv_weights, ticket = ops.route_and_dispatch(lease, sent)
        return _carrier(_arena(lease), lease.frame, filled), recv_weights.detach(), ticket
    arena, frame = _arena(lease), max(lease.frame, 0)  # the op, or a saved route, says which frame it is if any may be
    ticket = ops.ROUTE(
        arena.order, arena.region("offs", frame), arena.region("counts", frame), arena.region("overflow", frame),
        lease.token, sent.topk_idx, sent.num_tokens, x, sent.x_scales, sent.x_row_scales, topk_weights,
    )  # fmt: skip
    arena, frame = _follow(lease, ticket)
    filled, recv_weights = _filled(arena, frame), arena.region("recv_topk_weights", frame)
    ops.DISPATCH(
        arena.order, filled.data, filled.scales, filled.row_scales, recv_weights, ticket, x, sent.topk_idx,
        topk_weights, sent.x_scales, sent.x_row_scales, sent.num_tokens,
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        _require_rows(arena, ticket)
    return _carrier(arena, frame, filled), recv_weights.detach(), ticket


def _require_rows(arena: Generation, ticket: torch.Tensor) -> None:
    """Refuse a dispatch that a selective checkpoint has saved, so that it did not run, where its rows are not."""
    state = ops.state_of(ticket)[1]
    if not state.filled:
        raise LeaseError(f"a selective checkpoint has saved the dispatch and not its route: {SAVE_ALL_OPS}")
    if state.combined and not arena.recv_in_frame[state.frame]:
        raise LeaseError(
            "a selective checkpoint has saved the dispatch, and its rows are gone: with this plan they last from "
            "dispatch to combine. Let it save epbuf.ops.ROUTE alone, which dispatches again, or keep the rows: "
            'save_recv=True, recv_policy="keep"'
        )


def _follow(lease: Lease, ticket: torch.Tensor) -> tuple[Generation, int]:
    """Return where a lease's dispatch goes; a route that a selective checkpoint has saved brings its lease there."""
    if not torch.compiler.is_compiling():
        arena, state = ops.state_of(ticket)
        if (state.frame, state.lease) != (lease.frame, lease.serial):
            lease.take(arena, arena.book, state.frame, state.lease)
    return _arena(lease), lease.frame


def _carrier(arena: Generation, frame: int, filled: Encoded) -> torch.Tensor:
    """Return what gradients of received rows come to: the rows themselves, or a NaN in their place."""
    return filled.data.detach() if arena.recv_payload.format == "same" else arena.carrier(frame)


def _received_views(
    arena: Generation, frame: int, carrier: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Return data, scales and row scales as the user sees them: without the padding of compact rows of scales."""
    if arena.recv_payload.format == "same":
        return carrier, None, None
    filled = _filled(arena, frame)
    scales = None
    if filled.scales is not None and arena.recv_scale_dtype is not None:
        scales = filled.scales.detach().view(arena.recv_scale_dtype)[:, : arena.plan.num_scale_columns]
    return filled.data.detach(), scales, None if filled.row_scales is None else filled.row_scales.detach()


def _forward_combine(
    lease: Lease, expert_out: torch.Tensor, topk_weights: torch.Tensor | None, out: torch.Tensor | None, *,
    has_backward: bool,
) -> torch.Tensor:  # fmt: skip
    if ops.is_direct():
        return ops.combine_lease(lease, expert_out, topk_weights, out, has_backward=has_backward)
    arena = _arena(lease)
    y = _token_rows(arena, lease.num_tokens) if out is None else out
    if torch.compiler.is_compiling():
        ops.COMBINE(arena.order, y, lease.token, lease.ticket, expert_out, topk_weights, has_backward)
        return y
    was_combined = lease.ticket is not None and ops.state_of(lease.ticket)[1].combined
    ops.COMBINE(arena.order, y, lease.token, lease.ticket, expert_out, topk_weights, has_backward)
    _require_combined(lease)
    if was_combined and out is None:  # this one did not run: y must not look right
        with _disable_current_modes():  # the checkpoint knows ops of its first pass only
            y.fill_(torch.nan)
    if lease.released:  # a second pass on a lease of the first one
        lease.ticket = None
    return y


def _require_combined(lease: Lease) -> None:
    """Refuse a combine that a selective checkpoint has saved, so that it did not run, without its dispatch."""
    assert lease.ticket is not None, "combine refuses a lease without a ticket"
    if not ops.state_of(lease.ticket)[1].combined:
        raise LeaseError(f"a selective checkpoint has saved the combine and not its dispatch: {SAVE_ALL_OPS}")


def _arena(lease: Lease) -> Generation:
    return lease.arena  # type: ignore[return-value]  # the book's tests make leases of less than an arena


def _refuse(lease: Lease, complete_round: Any, check: Callable[[], None]) -> None:
    attempt = ops.Attempt()
    if attempt.run(check):
        complete_round(lease, attempt)


def _routing_views(arena: Generation, frame: int) -> tuple[torch.Tensor, ...]:
    """Return offs, both counts per expert, the total and the overflow flag; views that last as long as the arena."""
    if torch.compiler.is_compiling():
        return _make_routing_views(arena, frame)
    views = arena.routing_views.get(frame)
    if views is None:
        views = arena.routing_views[frame] = _make_routing_views(arena, frame)
    return views


def _make_routing_views(arena: Generation, frame: int) -> tuple[torch.Tensor, ...]:
    counts, num_local = arena.region("counts", frame).detach(), arena.plan.num_local_experts
    per_expert, valid_per_expert = counts[:num_local], counts[num_local : 2 * num_local]
    offs, overflow = arena.region("offs", frame).detach(), arena.region("overflow", frame).detach()
    return offs, per_expert, valid_per_expert, counts[2 * num_local :], overflow


def _filled(arena: Generation, frame: int) -> Encoded:
    """Return the regions that a dispatch fills: the frame's, or those of the workspace that it has or will claim."""
    is_known = arena.recv_in_frame[frame] or torch.compiler.is_compiling()
    return arena.received(frame, 0 if is_known else arena.book.next_workspace(frame, "forward"))


def _require_backward(arena: Generation) -> None:
    if arena.plan.config.inference_only:
        raise ConfigError(
            "backward through an arena whose plan has inference_only=True: it has no regions for gradients; "
            "build the plan with inference_only=False"
        )


def _token_rows(arena: Generation, num_tokens: int) -> torch.Tensor:
    return torch.empty((num_tokens, arena.hidden), dtype=arena.token_dtype, device=arena.device)


def _token_weights(arena: Generation, num_tokens: int) -> torch.Tensor:
    return torch.empty((num_tokens, arena.num_topk), dtype=torch.float32, device=arena.device)


def _saved_weights(arena: Generation, lease: Lease, weights: torch.Tensor) -> torch.Tensor | None:
    """Return what backward must keep of the row weights: nothing when they are the frame's own region."""
    if torch.compiler.is_compiling():
        return weights.clone()
    return None if weights.data_ptr() == arena.address("recv_topk_weights", lease.frame) else weights


def _weights_of(arena: Generation, ticket: torch.Tensor) -> torch.Tensor:
    """Return the frame's weights, as they were in combine: they are not saved, so autograd cannot check them."""
    state = ops.state_of(ticket)[1]
    weights, version = arena.region("recv_topk_weights", state.frame), state.weights_version
    if version is not None and weights._version != version:
        raise LeaseError(
            f"recv.topk_weights was modified by an in-place operation between combine (version {version}) and its "
            f"backward (version {weights._version}): scale a copy of them instead"
        )
    return weights


def _backward_workspace(arena: Generation, ticket: torch.Tensor) -> int:
    """Return the workspace that the op will claim; compiled code bakes workspace 0 in."""
    if torch.compiler.is_compiling():
        return 0
    return arena.book.next_workspace(ops.state_of(ticket)[1].frame, "backward")


def _missing_gradient(arena: Generation, ticket: torch.Tensor) -> torch.Tensor:
    return _token_rows(arena, ops.state_of(ticket)[1].num_tokens).zero_()


def _first_rows(arena: Generation, ticket: torch.Tensor, region: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the gradient of all C rows: a view of the region; of trimmed rows: a copy, zero where no zone reaches.

    The view is one that the arena keeps: autograd copies a gradient that others refer to before it becomes a `.grad`.
    """
    if num_rows == arena.capacity_rows:
        return region.detach() if torch.compiler.is_compiling() else _lasting_view(arena, region)
    return _trimmed(arena, ops.state_of(ticket)[1].frame, region, num_rows)


def _trimmed(arena: Generation, frame: int, region: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the first rows of a region: all as they lie, fewer as a copy that is zero where no zone reaches."""
    if num_rows == arena.capacity_rows:
        return region
    tail = torch.arange(num_rows, device=region.device) >= arena.region("offs", frame)[-1]
    return _zero_where(tail.view(-1, *[1] * (region.ndim - 1)), region[:num_rows])


def _zero_where(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows with zeros under a mask: differentiable, but for dtypes that torch cannot compute with."""
    if rows.element_size() > 1:
        return rows.masked_fill(mask, 0)
    return rows.view(torch.uint8).masked_fill(mask, 0).view(rows.dtype)


def _lasting_view(arena: Generation, region: torch.Tensor) -> torch.Tensor:
    address = region.data_ptr()
    view = arena.views.get(address)
    if view is None:
        view = arena.views[address] = region.detach()
    return view


def _first(rows: torch.Tensor, num_rows: int, are_written: bool) -> torch.Tensor:
    """Return a view of the first rows, or zeros that stay connected to them in the autograd graph."""
    view = rows[:num_rows]
    if are_written:
        return view
    return _zero_where(torch.ones((), dtype=torch.bool, device=rows.device), view)
