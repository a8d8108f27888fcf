"""Who moves the data.

An engine stands behind five calls: open (its constructor), route, dispatch, combine, close. Dispatch and combine come
in two directions each: combine backward is a dispatch of gradients, dispatch backward is a combine of gradients.
`NativeEngine` is ours: one NVLink domain on CUDA, one host on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from epbuf import _C
from epbuf.config import EpConfig, Payload
from epbuf.errors import ConfigError, EpbufError, LeaseError, NativeError, PeerTimeoutError
from epbuf.plan import STASH_PAGE_ROWS, Plan, Region
from epbuf.windows import Window

TOKEN_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NATIVE_DTYPE = {"bf16": 0, "fp16": 1, "fp32": 2}
_TENSOR, _WINDOW, _ZERO = int(_C.Source.TENSOR), int(_C.Source.WINDOW), int(_C.Source.ZERO)


class StreamState(NamedTuple):
    """A stream's handle, and the id of the capture that it takes part in, 0 outside."""

    handle: int
    capture: int


@dataclass(slots=True)
class Place:
    """Where a call works, and what its rank has to say about it.

    Attributes:
        frame: index of the frame.
        workspace: index in the forward or backward set; -1 when a refusing rank holds none.
        refusal: why this rank refuses, `_C.Refusal.NONE` if it does not. It completes the round all the same.
        repeats: whether route and dispatch send the same tokens once more, inside combine's backward: weights stay
            where they are, and nothing is counted again.
        stream: what `Engine.stream_state` said when the call began, for calls that need it more than once.
    """

    frame: int
    workspace: int
    refusal: int = 0
    repeats: bool = False
    stream: StreamState | None = None

    @property
    def capture(self) -> int | None:
        """The capture that the call is in, if `stream` is known."""
        return self.stream.capture if self.stream is not None else None


@dataclass(slots=True)
class Rows:
    """Rows that an op stages or pushes: a tensor, our own region (`in_window`), or zeros (both unset)."""

    tensor: torch.Tensor | None = None
    in_window: bool = False

    @property
    def source(self) -> int:
        if self.in_window:
            return _WINDOW
        return _ZERO if self.tensor is None else _TENSOR


@dataclass(slots=True)
class Encoded:
    """Rows in the format of a payload: data, block scales, row scales (nvfp4)."""

    data: torch.Tensor
    scales: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None

    @property
    def regions(self) -> tuple[torch.Tensor, ...]:
        """Those that exist."""
        return tuple(part for part in self.parts if part is not None)

    @property
    def parts(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Data, block scales and row scales, None for those that the payload has not."""
        return self.data, self.scales, self.row_scales


class Engine(Protocol):
    """The calls that an arena needs of whoever moves its data. All but `close` are collective in program order."""

    def route(self, place: Place, topk_idx: torch.Tensor, live_tokens: torch.Tensor | None) -> _C.Outcome:
        """Exchange counts and compute slots, zones and overflow of the frame."""

    def dispatch(
        self, place: Place, x: torch.Tensor | Encoded, topk_weights: torch.Tensor | None
    ) -> _C.Outcome:  # fmt: skip
        """Move rows and weights into their slots; rows of the token dtype are encoded on the way."""

    def combine(self, place: Place, rows: Rows, weights: torch.Tensor | None, out: torch.Tensor) -> _C.Outcome:
        """Add the rows of each token's slots, in the plan's order, into `out`."""

    def combine_backward(self, place: Place, grad: torch.Tensor, expects_open: bool) -> _C.Outcome:
        """Move gradients of tokens into the slots of their rows."""

    def weight_grad(
        self, place: Place, expert_out: torch.Tensor, weights: torch.Tensor, grad_weights: torch.Tensor,
        grad_rows: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Turn moved gradients into those of a weighted combine: rows times weights, and the weights' own.

        In place on `grad_rows`, or on the region itself.
        """

    def decode(self, place: Place, rows: Encoded, out: torch.Tensor, *, is_grad: bool) -> None:
        """Turn received rows below offs[-1] back into the token dtype."""

    def stash(self, place: Place) -> None:
        """Copy received rows into the pages that their dispatch took. Local."""

    def return_pages(self, place: Place) -> None:
        """Free the pages that a dispatch took and no backward will read. Local."""

    def restore(self, place: Place, *, returns_pages: bool) -> _C.Outcome:
        """Copy received rows back into the forward workspace, once its readers are done; `returns_pages` frees them."""

    def dispatch_backward(
        self, place: Place, grads: tuple[Rows, Rows], out: torch.Tensor | None, out_weights: torch.Tensor | None,
        *, num_tokens: int, begins_use: bool, clears_open: bool,
    ) -> _C.Outcome:  # fmt: skip
        """Add gradients of rows and fetch those of weights, per token."""

    def follow(self, frame: int) -> None:
        """Let the current stream wait for the ops that used a frame before."""

    synchronous: bool
    """Whether a call returns when its round is complete, with its outcome."""

    encodes: bool
    """Whether `dispatch` takes rows of the token dtype for a quantised payload."""

    refuses_later: bool
    """Whether peers hear of a refused combine, or backward, in their next dispatch only: their round is complete."""

    def control(self) -> _C.Control:
        """Read this rank's error and counter words. Synchronises on CUDA."""

    def status(self) -> _C.Control:
        """Read the same words as the kernels last mirrored them to the host, without synchronising."""

    def stream_state(self) -> StreamState:
        """Describe the current stream."""

    def capture_key(self) -> int:
        """Return the id of the capture that the current stream takes part in, 0 outside."""

    def hold(self) -> Callable[[], bool]:
        """Add a hold to the graph being captured; return what tells whether any graph still has it."""

    def progress(self) -> list[tuple[int, int, int, int]]:
        """Return (call, op, frame, workspace) that every rank published last, as seen here."""

    def abort(self) -> None:
        """Tell every peer that this rank abandons the arena."""

    def close(self, *, is_healthy: bool = True) -> None:
        """Let go of everything native, behind a barrier; of an unhealthy group without communication."""


class OnStreams:
    """What an engine says of the current stream and its capture: nothing on CPU, where there are none."""

    _streams: StreamOrder | None

    def stream_state(self) -> StreamState:
        return StreamState(0, 0) if self._streams is None else self._streams.state()

    def capture_key(self) -> int:
        return self.stream_state().capture

    def hold(self) -> Callable[[], bool]:
        assert self._streams is not None, "only CUDA graphs are held"
        hold = _C.GraphHold(self._streams.current())
        return lambda: hold.alive


class NativeEngine(OnStreams):
    """Our own host and CUDA engines behind the five calls.

    On CUDA the calls enqueue on torch's current stream and return; what went wrong is read by `status` and `control`.
    """

    encodes = True
    refuses_later = False

    def __init__(self, plan: Plan, rank: int, window: Window, device: torch.device) -> None:
        self.synchronous = device.type == "cpu"
        self._streams = None if self.synchronous else StreamOrder(device, plan.schedule.num_workspaces == 1)
        arguments = (_geometry(plan, rank), *_sets(plan), window.peers)
        self._scales_in_grad = _scales_in_grad(plan)
        self.native = _C.HostEngine(*arguments) if self.synchronous else _C.CudaEngine(*arguments, device.index or 0)

    def route(self, place: Place, topk_idx: torch.Tensor, live_tokens: torch.Tensor | None) -> _C.Outcome:
        call = route_call(self._begin(place, "forward"), topk_idx, live_tokens)
        if place.repeats:
            call.repeats = 1
        return self.native.route(call)

    def dispatch(
        self, place: Place, x: torch.Tensor | Encoded, topk_weights: torch.Tensor | None
    ) -> _C.Outcome:  # fmt: skip
        rows = x.data if isinstance(x, Encoded) else x
        call = _C.DispatchCall(*self._begin(place, "forward"), *_token_rows(place, rows))
        if place.repeats:
            call.repeats = 1
        if isinstance(x, Encoded) and not place.refusal:
            _add_scales(call, x)
        if topk_weights is not None:
            call.topk_weights = topk_weights.data_ptr()
            call.topk_weights_row_stride = topk_weights.stride()[0]
        return self.native.dispatch(call)

    def combine(self, place: Place, rows: Rows, weights: torch.Tensor | None, out: torch.Tensor) -> _C.Outcome:
        call = _staged(self._begin(place, "forward"), rows, Rows(weights), out.shape[0])
        _token_out(call, out)
        return self.native.combine(call)

    def combine_backward(self, place: Place, grad: torch.Tensor, expects_open: bool) -> _C.Outcome:
        call = _C.DispatchCall(*self._begin(place, "backward"), *_token_rows(place, grad))
        call.expects_open = int(expects_open)
        if self._scales_in_grad >= 0 and not place.refusal:
            call.scales, call.scales_row_stride_bytes = call.rows + self._scales_in_grad, call.row_stride_bytes
        return self.native.combine_backward(call)

    def weight_grad(
        self, place: Place, expert_out: torch.Tensor, weights: torch.Tensor, grad_weights: torch.Tensor,
        grad_rows: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        call = _C.WeightGradCall()
        call.frame, call.workspace = place.frame, place.workspace
        call.stream = self._streams.enter(place, "backward") if self._streams is not None else 0
        call.expert_out = expert_out.data_ptr()
        call.expert_out_row_stride_bytes = expert_out.stride()[0] * expert_out.element_size()
        call.weights, call.grad_weights = weights.data_ptr(), grad_weights.data_ptr()
        call.grad_rows = grad_rows.data_ptr() if grad_rows is not None else 0
        self.native.weight_grad(call)

    def decode(self, place: Place, rows: Encoded, out: torch.Tensor, *, is_grad: bool) -> None:
        assert rows.scales is not None, "every quantised format has block scales"
        call = _C.DecodeCall()
        call.frame, call.workspace, call.is_grad = place.frame, place.workspace, int(is_grad)
        if self._streams is not None:
            call.stream = self._streams.enter(place, "backward" if is_grad else "forward")
        call.data, call.row_stride_bytes = rows.data.data_ptr(), _row_stride_bytes(rows.data)
        call.scales, call.scales_row_stride_bytes = rows.scales.data_ptr(), _row_stride_bytes(rows.scales)
        call.row_scales = rows.row_scales.data_ptr() if rows.row_scales is not None else 0
        call.out, call.num_rows = out.data_ptr(), out.shape[0]
        self.native.decode(call)

    def stash(self, place: Place) -> None:
        self.native.stash(self._stash_call(place, _C.StashMove.STASH, returns_pages=False))

    def return_pages(self, place: Place) -> None:
        self.native.stash(self._stash_call(place, _C.StashMove.NOTHING, returns_pages=True))

    def restore(self, place: Place, *, returns_pages: bool) -> _C.Outcome:
        return self.native.stash(self._stash_call(place, _C.StashMove.RESTORE, returns_pages=returns_pages))

    def _stash_call(self, place: Place, move: _C.StashMove, *, returns_pages: bool) -> _C.StashCall:
        call = _C.StashCall()
        call.frame, call.workspace = place.frame, place.workspace
        call.stream = self._streams.enter(place, "forward") if self._streams is not None else 0
        call.move, call.returns_pages = int(move), int(returns_pages)
        return call

    def dispatch_backward(
        self, place: Place, grads: tuple[Rows, Rows], out: torch.Tensor | None, out_weights: torch.Tensor | None,
        *, num_tokens: int, begins_use: bool, clears_open: bool,
    ) -> _C.Outcome:  # fmt: skip
        call = _staged(self._begin(place, "backward"), *grads, num_tokens)
        _token_out(call, out)
        call.out_weights = out_weights.data_ptr() if out_weights is not None else 0
        call.begins_use, call.clears_open = int(begins_use), int(clears_open)
        return self.native.dispatch_backward(call)

    def follow(self, frame: int) -> None:
        if self._streams is not None:
            self._streams.enter(Place(frame, -1), "forward")

    def control(self) -> _C.Control:
        return self.native.control()

    def status(self) -> _C.Control:
        return self.native.control() if isinstance(self.native, _C.HostEngine) else self.native.status()

    def progress(self) -> list[tuple[int, int, int, int]]:
        return list(self.native.progress())

    def abort(self) -> None:
        self.native.abort(int(_C.Status.ABORTED))

    def close(self, *, is_healthy: bool = True) -> None:
        if not isinstance(self.native, _C.HostEngine):
            self.native.close()
        del self.native

    def _begin(self, place: Place, direction: str) -> tuple[int, int, int, int, int]:
        """Return what all calls begin with: frame, workspace, refusal, check_progress, stream."""
        if self._streams is None:
            return place.frame, place.workspace, place.refusal, 1, 0
        stream = self._streams.enter(place, direction)
        return place.frame, place.workspace, place.refusal, self._streams.is_one_order, stream


class StreamOrder:
    """Orders ops that come on different streams, within one capture or outside any.

    In one order (a plan with one workspace) each op waits for the last one, whatever it used, so that equal call
    numbers mean equal ops on all ranks. Otherwise ops wait that share a frame or a workspace; a refusal without a
    workspace counts as a use of all of its direction, since its COUNT speaks for them. Across the boundary of a capture
    the caller orders the streams.
    """

    def __init__(self, device: torch.device, is_one_order: bool) -> None:
        self.is_one_order = is_one_order
        self._device = device
        self._index = device.index or 0
        self._last: dict[tuple[str, int, bool], tuple[int, int]] = {}  # (stream, capture) of the last op, in captures
        self._latest: tuple[object, ...] = ()

    def enter(self, place: Place, direction: str) -> int:
        """Let the current stream wait for the ops that this one must follow; return its handle."""
        now = place.stream or self.state()
        stream = now.handle
        latest = now, place.frame, direction, place.workspace, place.refusal
        if latest == self._latest:  # the op before waited for all that this one would wait for
            return stream
        self._latest = latest
        behind = set()
        for name, index in self._shared(place, direction):
            # Ops outside captures follow each other, whatever was captured between.
            used = name, index, now.capture != 0
            last = self._last.get(used, now)
            if last[0] != stream and last[1] == now.capture == self.capture_of(last[0]):
                behind.add(last[0])
            self._last[used] = now
        for other in behind:
            self.wait_for(other)
        return stream

    def _shared(self, place: Place, direction: str) -> set[tuple[str, int]]:
        """Name what an op must not use before those that used it last are over."""
        if self.is_one_order:
            return {("arena", 0)}
        if place.workspace < 0 and place.refusal:
            return {("frame", place.frame), *((name, index) for name, index, _ in self._last if name == direction)}
        return {("frame", place.frame), (direction, place.workspace)}

    def state(self) -> StreamState:
        """Describe torch's current stream."""
        stream = self.current()
        return StreamState(stream, self.capture_of(stream))

    def current(self) -> int:
        """Return the handle of torch's current stream, without making a Stream object of it."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def capture_of(self, stream: int) -> int:
        """Return the id of the capture that a stream takes part in, 0 outside."""
        return int(_C.capture_id(stream))

    def wait_for(self, stream: int) -> None:
        """Let the current stream wait for what another one was given so far."""
        torch.cuda.current_stream(self._device).wait_event(self._stream(stream).record_event())

    def _stream(self, handle: int) -> torch.cuda.Stream:
        if handle == 0:  # ExternalStream(0) would be a new stream of the pool
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(handle, self._device)  # type: ignore[no-untyped-call]


def check_raw_grad(plan: Plan) -> None:
    """Refuse raw gradients that no gradient row holds: raw rows are its first bytes, data and then scales.

    Raises:
        ConfigError: they are longer.
    """
    payload, nbytes = plan.config.combine_grad_payload, plan.grad_row_bytes + plan.grad_scale_row_bytes
    if payload.format == "raw" and not plan.config.inference_only and nbytes > plan.token_row_bytes:
        raise ConfigError(
            f"combine_grad_payload=raw sends {plan.grad_row_bytes} bytes of data and {plan.grad_scale_row_bytes} of "
            f"scales a row, which a gradient row of {plan.token_row_bytes} bytes must hold; make them smaller"
        )


def _scales_in_grad(plan: Plan) -> int:
    """Return at which byte of a gradient row raw scales begin; -1: there are none."""
    payload = plan.config.combine_grad_payload
    return plan.grad_row_bytes if payload.format == "raw" and payload.scale_row_bytes else -1


_PEER_ERRORS: dict[int, type[EpbufError]] = {
    int(_C.Refusal.CALL_ORDER): LeaseError,
    int(_C.Refusal.LEASE): LeaseError,
    int(_C.Refusal.WORKSPACE): LeaseError,
    int(_C.Refusal.COPIED_REGION): NativeError,
    int(_C.Refusal.INTERNAL): NativeError,
}

_CAUSES = {
    _C.Refusal.ARGUMENT: "an argument of the wrong kind",
    _C.Refusal.DTYPE: "a tensor of the wrong dtype",
    _C.Refusal.SHAPE: "a tensor of the wrong shape",
    _C.Refusal.DEVICE: "a tensor on the wrong device",
    _C.Refusal.STRIDES: "a tensor whose strides it cannot read",
    _C.Refusal.ALIGNMENT: "a tensor that is not 16-byte aligned",
    _C.Refusal.TOO_MANY_TOKENS: "more tokens than max_tokens_per_rank",
    _C.Refusal.OVERLAP: "a tensor that overlaps a region the call writes",
    _C.Refusal.CALL_ORDER: "a call out of order (one dispatch per lease, then one combine)",
    _C.Refusal.LEASE: "a lease that has ended",
    _C.Refusal.WORKSPACE: "no free workspace",
    _C.Refusal.COPIED_REGION: "a compiler's copy of a region",
    _C.Refusal.INTERNAL: "an unexpected error",
    _C.Refusal.REPEATED_EXPERT: 'an expert that one token names twice, which engine="nccl_ep" cannot send',
}


def peer_error(op: str, rank: int, refusal: int) -> EpbufError:
    """Say on this rank that another one refused."""
    kind = _PEER_ERRORS.get(refusal, ConfigError)
    return kind(
        f"rank {rank} refused {op}: {_CAUSES[_C.Refusal(refusal)]}. Nothing moved on any rank; its own error says "
        "what was asked and found"
    )


def failure(record: _C.ErrorRecord, rank: int, timeout_s: float, progress: Sequence[str]) -> EpbufError:
    """Say what poisoned an arena, with every peer's last progress."""
    op, phase = _C.Op(record.op).name.lower(), _C.Phase(record.phase).name
    mine = f"rank {rank}, call {record.call} ({op}, frame {record.frame}, workspace {_workspace(record.workspace)})"
    seen = "\n".join(f"  {line}" for line in progress)
    if record.status == int(_C.Status.MISMATCH):
        return LeaseError(
            f"{mine} met rank {record.peer} at the same call with {describe_progress(record.peer_progress)}. All ranks "
            f"must issue the same ops on the same frames and workspaces in the same order; last progress:\n{seen}"
        )
    if record.status == int(_C.Status.ABORTED):
        return PeerTimeoutError(
            f"rank {record.peer} abandoned the arena (an exception left its `with` block, or it called another arena's "
            f"teardown) while {mine} waited for {phase}; close this arena and look at rank {record.peer}'s error"
        )
    return PeerTimeoutError(
        f"{mine} waited {timeout_s:g} s for {phase} of rank {record.peer}: expected epoch {record.expected_epoch}, "
        f"seen {record.seen_epoch}. That rank died, hangs, or issued fewer ops; last progress:\n{seen}"
    )


def describe_progress(packed: int) -> str:
    """Spell a PROGRESS value out."""
    op, frame, workspace = packed >> 28, packed >> 14 & 0x3FFF, packed & 0x3FFF
    return f"{_C.Op(op).name.lower()}, frame {frame}, workspace {_workspace(workspace)}"


def _workspace(index: int) -> str:
    return "none" if index in (-1, 0x3FFF, 0xFFFFFFFF) else str(index)


def _geometry(plan: Plan, rank: int) -> _C.Geometry:
    config, geometry = plan.config, _C.Geometry()
    geometry.rank, geometry.num_ranks = rank, config.num_ranks
    geometry.num_experts, geometry.num_local_experts = config.num_experts, config.num_experts // config.num_ranks
    geometry.num_topk, geometry.hidden = config.num_topk, config.hidden
    geometry.expert_alignment, geometry.max_tokens_per_rank = config.expert_alignment, config.max_tokens_per_rank
    geometry.token_dtype, geometry.max_num_sms = _NATIVE_DTYPE[config.token_dtype], config.max_num_sms or 0
    geometry.capacity_rows = plan.capacity_rows
    geometry.token_row_bytes = config.hidden * TOKEN_DTYPES[config.token_dtype].itemsize
    geometry.route_chunk_tokens = plan.route_chunk_tokens
    geometry.timeout_us = int(config.timeout_s * 1_000_000)
    geometry.recv = _row_format(config.dispatch_payload, config)
    geometry.grad = _row_format(config.combine_grad_payload, config)
    geometry.stash = _stash_format(plan)
    geometry.dedups, geometry.adds_by_rank = int(plan.dedups), int(plan.adds_by_rank)
    geometry.wire = _wire_format(plan, "wire_rows", plan.row_bytes)
    geometry.grad_wire = _wire_format(plan, "grad_wire_rows", plan.grad_row_bytes)
    return geometry


def _wire_format(plan: Plan, name: str, scales_offset: int) -> _C.WireFormat:
    """Fill in the places in a row of a region of rows by wire; a plan without it has none."""
    form = _C.WireFormat()
    form.scales_offset = scales_offset
    form.row_bytes = plan.region(name).shape[1] if name in plan.lifetimes else 0
    return form


def _stash_format(plan: Plan) -> _C.StashFormat:
    """Fill in the places of a page's parts; the engine reads none that the payload has not."""
    form = _C.StashFormat()
    _, *ends = plan.stash_page_offsets  # of data, then of those scales that there are
    form.num_pages, form.page_rows, form.page_bytes = plan.num_stash_pages, STASH_PAGE_ROWS, ends[-1]
    form.scales_offset, form.row_scales_offset = ends[0], ends[min(1, len(ends) - 1)]
    return form


def _row_format(payload: Payload, config: EpConfig) -> _C.RowFormat:
    form = _C.RowFormat()
    form.format = int(_C.Format[payload.format.upper()])
    form.is_blocked = int(payload.scale_layout == "blocked")
    form.row_bytes = payload.row_bytes_for(config.hidden, config.token_dtype)
    form.scale_row_bytes = payload.scale_row_bytes_for(config.hidden)
    form.wire_row_bytes = payload.wire_scale_row_bytes_for(config.hidden)
    form.scale_bytes = payload.scale_bytes_for(config.hidden)
    return form


def _offsets(kind: type[Any], regions: Sequence[Region]) -> Any:
    """Fill the struct's fields from the regions of the same names; a field without a region keeps -1."""
    offsets = kind()
    for region in regions:
        if hasattr(offsets, region.name):
            setattr(offsets, region.name, region.offset)
    return offsets


def _sets(plan: Plan) -> tuple[Any, list[Any], list[Any], list[Any]]:
    schedule = plan.schedule
    num_backward = 0 if plan.config.inference_only else schedule.num_workspaces
    return (
        _offsets(_C.ArenaOffsets, [*plan.regions_of("arena"), *plan.regions_of("stash")]),
        [_offsets(_C.FrameOffsets, plan.regions_of("frame", f)) for f in range(schedule.num_frames)],
        [_offsets(_C.ForwardOffsets, plan.regions_of("forward", w)) for w in range(schedule.num_workspaces)],
        [_offsets(_C.BackwardOffsets, plan.regions_of("backward", v)) for v in range(num_backward)],
    )


def route_call(
    begin: tuple[int, int, int, int, int], topk_idx: torch.Tensor, live_tokens: torch.Tensor | None
) -> _C.RouteCall:  # fmt: skip
    """Describe a route; with a refusal in `begin`, one without ids."""
    _, _, refusal, _, _ = begin
    if refusal:
        return _C.RouteCall(*begin, 0, 0, 0, 0)
    ids = topk_idx.data_ptr(), topk_idx.stride()[0], topk_idx.element_size(), topk_idx.shape[0]
    call = _C.RouteCall(*begin, *ids)
    if live_tokens is not None:
        call.live_tokens, call.live_tokens_bytes = live_tokens.data_ptr(), live_tokens.element_size()
    return call


def _token_rows(place: Place, rows: torch.Tensor) -> tuple[int, int, int]:
    """Return address, row stride in bytes and number of rows that are pushed; nothing of a rank that refuses."""
    if place.refusal:
        return 0, 0, 0
    return rows.data_ptr(), _row_stride_bytes(rows), rows.shape[0]


def _row_stride_bytes(rows: torch.Tensor) -> int:
    return rows.stride()[0] * rows.element_size()


def _add_scales(call: _C.DispatchCall, rows: Encoded) -> None:
    if rows.scales is not None:
        call.scales, call.scales_row_stride_bytes = rows.scales.data_ptr(), _row_stride_bytes(rows.scales)
    if rows.row_scales is not None:
        call.row_scales = rows.row_scales.data_ptr()


def _staged(begin: tuple[int, int, int, int, int], rows: Rows, weights: Rows, num_tokens: int) -> _C.CombineCall:
    call = _C.CombineCall(*begin, rows.source, weights.source, num_tokens)
    if rows.tensor is not None:
        call.rows, call.row_stride_bytes = rows.tensor.data_ptr(), rows.tensor.stride()[0] * rows.tensor.element_size()
    if weights.tensor is not None:
        call.weights = weights.tensor.data_ptr()
    return call


def _token_out(call: _C.CombineCall, out: torch.Tensor | None) -> None:
    if out is not None:
        call.out, call.out_row_stride_bytes = out.data_ptr(), out.stride()[0] * out.element_size()
