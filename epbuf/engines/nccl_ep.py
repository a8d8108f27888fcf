"""NCCL EP behind our five calls: its high-throughput, expert-major kernels move rows between our regions.

The library has a group on a communicator of its own, and a handle for each frame, whose memory is a region of the plan.
Rows are staged in buffers that it allocates itself (`Plan.engine_bytes`), so it reads and writes ordinary device memory
and never changes what combine reads. What its semantics leave open of the contract is done here, in operations of torch
that a graph records: counts of all ranks, zones, overflow, ids that mean no expert, tokens that nobody gets.

Differences that remain are in epbuf/engines/README.md.

Source: nccl-extensions 0.1.0 (nccl.ep) and nccl4py 0.6.0 (nccl.core).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from epbuf import _C
from epbuf.control import ControlWords
from epbuf.engine import Encoded, NativeEngine, Place, Rows, StreamOrder
from epbuf.errors import ConfigError, NativeError
from epbuf.plan import COUNT_HEADER_CELLS, Plan, Region
from epbuf.windows import Window
from epbuf.windows.group import Group

EXTRA = "nccl-ep"
MODULES = ("nccl.core", "nccl.ep")

_MIN_TIMEOUT_S = 300.0  # a peer that compiles a kernel is not a peer that died, and the library's time-out is fatal
_LIBRARY_ZEROES_EMPTY_TOKENS = False  # whether combine writes rows of tokens without an expert; tests/gpu look
_EXPERTS_PER_DOMAIN = 4  # the library moves weights of the experts of an NVLink domain in 16 bytes

# Columns of a rank's row of counts: ids that mean no expert, E counts, ids at or past E, and then, from the end:
_NUM_BAD, _REFUSAL, _BAD_TOKEN, _BAD_TOPK, _BAD_VALUE = -7, -6, -5, -4, -3
assert _NUM_BAD + COUNT_HEADER_CELLS == 1, "an id of E is counted in the column behind the last expert's"

_OK, _REFUSED = int(_C.Status.OK), int(_C.Status.REFUSED)


def missing() -> str:
    """Say what the extra has that is not installed, or cannot be imported; nothing if all is there."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation raises what it likes
            return (
                f'engine="nccl_ep" needs {name}, which cannot be imported ({type(error).__name__}: {error}); install '
                f"the extra: pip install 'epbuf[{EXTRA}]'"
            )
    return ""


class NcclEpEngine(NativeEngine):
    """The calls that move rows are the library's; local ones (decoding, weight gradients) are those of `NativeEngine`.

    An eager route reads the host once: what a rank refuses is then known to all before a row moves. In a capture
    nothing is read, and what a replay finds is raised by the next call or check(), as on our own engine.
    """

    encodes = False

    def __init__(self, plan: Plan, group: Group, window: Window, device: torch.device) -> None:
        """Open the library's group and handles and run every kernel once. Collective; synchronises.

        Raises:
            ConfigError: experts of an NVLink domain that the library cannot move.
            NativeError: a handle needs more memory than the plan has.
        """
        super().__init__(plan, group.rank, window, device)
        if self._streams is not None:
            # The library's buffers are those of one op at a time.
            self._streams = StreamOrder(device, is_one_order=True)
        self._plan, self._config, self._rank, self._device = plan, plan.config, group.rank, device
        self._window = window
        self._pending_refusal = 0
        self._words = ControlWords(self._region("control"))
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._make_tensors()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._lib = Library(plan, group, device)
            frames = range(plan.schedule.num_frames)
            self._handles = [self._lib.new_handle(self._region("nccl_ep_handle", frame)) for frame in frames]
            self._warm_up(group)

    def _region(self, name: str, index: int = 0) -> torch.Tensor:
        region: Region = self._plan.region(name, index)
        memory = self._window.bytes_at(region.offset, region.nbytes)
        return memory.view(getattr(torch, region.dtype)).view(region.shape)

    def _regions(self, name: str) -> list[torch.Tensor]:
        indices = sorted(r.index for r in self._plan.regions if r.name == name)
        return [self._region(name, index) for index in indices]

    def _make_tensors(self) -> None:
        """Make what routes compute with, once: addresses that a graph keeps."""
        config, device = self._config, self._device
        num_topk, tokens = config.num_topk, config.max_tokens_per_rank
        self._rows = self._regions("count_cells")
        self._ids = self._regions("nccl_ep_topk_idx")
        self._offs, self._counts, self._overflow = map(self._regions, ("offs", "counts", "overflow"))
        self._recv, self._recv_weights = self._received(), self._regions("recv_topk_weights")
        self._expert_out = self._regions("expert_out")
        self._grads = [] if config.inference_only else self._regions("grad_expert_out")
        self._grad_rows = [] if config.inference_only else self._regions("grad_recv_tokens")
        self._grad_weights = [] if config.inference_only else self._regions("grad_recv_topk_weights")
        counters = self._region("frame_counters")
        self._open, self._peaks = counters[:, 1], counters.view(torch.int64)[:, 1]  # `FrameCounters` of csrc/layout.h
        self._ones = self._region("nccl_ep_ones").fill_(1)
        self._no_token, self._no_weights = self._region("nccl_ep_no_token"), self._region("nccl_ep_no_weights")
        self._token = torch.arange(tokens, device=device)[:, None]
        self._earlier = torch.ones(num_topk, num_topk, dtype=torch.bool, device=device).tril(-1)
        self._unit = torch.ones(tokens * num_topk, dtype=torch.int64, device=device)

    def _received(self) -> list[Encoded]:
        """Return the regions that dispatches fill, by frame, or by forward workspace where they lie there."""
        data = self._regions("recv_tokens")
        has_scales = "recv_scales" in self._plan.lifetimes
        scales = self._regions("recv_scales") if has_scales else [None] * len(data)
        return [
            Encoded(rows, None if of is None else of.view(torch.uint8).view(rows.shape[0], -1))
            for rows, of in zip(data, scales, strict=True)
        ]

    def route(self, place: Place, topk_idx: torch.Tensor, live_tokens: torch.Tensor | None) -> _C.Outcome:
        with self._behind(place, "forward"):
            row, reads = self._rows[place.frame], not self.capture_key()
            refusal = place.refusal
            if reads:  # a graph would tell the peers again at every replay
                refusal, self._pending_refusal = refusal or self._pending_refusal, 0
            ids = self._ids[place.frame][: 0 if place.refusal else topk_idx.shape[0]]
            self._count(row[self._rank], ids, topk_idx, live_tokens)
            if refusal:
                row[self._rank, _REFUSAL].fill_(refusal)
            self._lib.gather(row, self._rank)
            if reads:
                outcome = self._outcome(row.cpu())
                if outcome.status != _OK:
                    self._count_refusal(row)
                    return outcome
            else:
                outcome = _outcome()
            with self._beside():
                self._summarise(place.frame, row)
            self._handles[place.frame].update(self._or_no_ids(ids))
            self._rejoin()
            return outcome

    def dispatch(
        self, place: Place, x: torch.Tensor | Encoded, topk_weights: torch.Tensor | None
    ) -> _C.Outcome:  # fmt: skip
        with self._behind(place, "forward"):
            rows = x if isinstance(x, Encoded) else Encoded(x)
            filled, handle = self._filled(place), self._handles[place.frame]
            weights = self._ones[: handle.num_rows]
            if place.refusal or not rows.data.shape[0]:
                rows = self._no_rows(filled, handle.num_rows)
            elif topk_weights is not None:
                weights = topk_weights.contiguous()
            handle.dispatch(
                Encoded(rows.data.contiguous(), self._padded(rows.scales, filled)), weights, filled,
                self._recv_weights[place.frame],
            )  # fmt: skip
            self._open[place.frame].fill_(1)
            self._pending_refusal = self._pending_refusal or place.refusal
            return _outcome()

    def combine(self, place: Place, rows: Rows, weights: torch.Tensor | None, out: torch.Tensor) -> _C.Outcome:
        with self._behind(place, "forward"):
            staging = self._expert_out[place.workspace]
            source = staging if rows.tensor is None else rows.tensor
            if weights is not None and rows.tensor is not None:
                source = self._weighted(staging[: rows.tensor.shape[0]], rows.tensor, weights, place.frame)
            self._pull(place, source.contiguous(), out)
            self._pending_refusal = self._pending_refusal or place.refusal
            return _outcome()

    def combine_backward(self, place: Place, grad: torch.Tensor, expects_open: bool) -> _C.Outcome:
        with self._behind(place, "backward"):
            if expects_open:
                self._words.word("num_early_reuses").add_(self._open[place.frame] == 0)
                self._words.mirror()
            region, handle = Encoded(self._grads[place.workspace]), self._handles[place.frame]
            is_none = place.refusal or not grad.shape[0]
            rows = self._no_rows(region, handle.num_rows) if is_none else Encoded(grad.contiguous())
            handle.dispatch(rows, None, region, None)
            self._pending_refusal = self._pending_refusal or place.refusal
            return _outcome()

    def dispatch_backward(
        self, place: Place, grads: tuple[Rows, Rows], out: torch.Tensor | None, out_weights: torch.Tensor | None,
        *, num_tokens: int, begins_use: bool, clears_open: bool,
    ) -> _C.Outcome:  # fmt: skip
        with self._behind(place, "backward"):
            regions = self._grad_rows[place.workspace], self._grad_weights[place.workspace]
            rows, weights = (_source(given, region) for given, region in zip(grads, regions, strict=True))
            dx = rows.new_empty((num_tokens, rows.shape[1])) if out is None else out
            dw = (
                torch.empty((num_tokens, self._config.num_topk), device=self._device)
                if out_weights is None
                else out_weights
            )
            self._pull(place, rows, dx, weights, dw)
            if out_weights is not None:
                out_weights.masked_fill_(self._ids[place.frame][:num_tokens] < 0, 0)
            if clears_open:
                self._open[place.frame].zero_()
            self._pending_refusal = self._pending_refusal or place.refusal
            return _outcome()

    def control(self) -> _C.Control:
        return self._words.read()

    def status(self) -> _C.Control:
        return self._words.mirrored()

    def progress(self) -> list[tuple[int, int, int, int]]:
        return []

    def abort(self) -> None:
        """Do nothing: no peer can be told. One that waits for this rank ends with the library's own time-out."""

    def close(self, *, is_healthy: bool = True) -> None:
        """Destroy handles, group and communicator; of an unhealthy group keep them, as to destroy needs the peers."""
        super().close()
        if is_healthy:
            if self._side is not None:
                torch.cuda.synchronize(self._device)
            for handle in self._handles:
                handle.destroy()
            self._lib.destroy()

    @contextmanager
    def _behind(self, place: Place, direction: str) -> Iterator[None]:
        """Order a call behind those that shared its frame or workspace, outside autograd."""
        if self._streams is not None:
            self._streams.enter(place, direction)
        with torch.no_grad():
            yield

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Issue on a stream beside the current one, behind what that was given so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def _rejoin(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)

    def _count(
        self, row: torch.Tensor, ids: torch.Tensor, topk_idx: torch.Tensor, live_tokens: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Count the rows that this rank sends to each expert, and write its ids as the library takes them.

        An id at or past E, of a token that is not live, or that its token has before becomes -1. Repeated experts make
        the rank refuse: the library would send one row for both.

        Shapes: row [E + 8] int64, ids [T, K] int64, topk_idx [T, K] int32 or int64.
        """
        row.zero_()
        if not ids.shape[0]:
            return
        num_experts = self._config.num_experts
        ids.copy_(topk_idx).clamp_(-1, num_experts)
        if live_tokens is not None:
            ids.masked_fill_(self._token[: ids.shape[0]] >= live_tokens, -1)
        if self._config.validate_ids:
            self._note_bad_id(row, ids, topk_idx)
        again = (ids[:, :, None] == ids[:, None, :]) & self._earlier
        is_repeated = again.any(2) & (ids >= 0) & (ids < num_experts)
        row[_REFUSAL].copy_(is_repeated.any() * int(_C.Refusal.REPEATED_EXPERT))
        ids.masked_fill_(is_repeated, -1)
        row.scatter_add_(0, (ids + 1).view(-1), self._unit[: ids.numel()])
        ids.masked_fill_(ids == num_experts, -1)

    def _note_bad_id(self, row: torch.Tensor, ids: torch.Tensor, topk_idx: torch.Tensor) -> None:
        first = (ids == self._config.num_experts).view(-1).to(torch.int8).argmax()
        row[_BAD_TOKEN].copy_(first // ids.shape[1])
        row[_BAD_TOPK].copy_(first % ids.shape[1])
        row[_BAD_VALUE].copy_(topk_idx.reshape(-1)[first])

    def _summarise(self, frame: int, rows: torch.Tensor) -> None:
        """Compute zones, counts, overflow and what is counted, from the counts of all ranks.

        Shapes: rows [R, E + 8] int64.
        """
        config, capacity = self._config, self._plan.capacity_rows
        num_local, alignment = config.num_local_experts, config.expert_alignment
        valid = rows[:, 1 : config.num_experts + 1].sum(0).view(config.num_ranks, num_local)
        ends = ((valid + (alignment - 1)) // alignment * alignment).cumsum(1)
        mine, kept = ends[self._rank], ends[self._rank].clamp(max=capacity)
        padded = kept.diff(prepend=self._unit.new_zeros(1))
        starts = torch.nn.functional.pad(mine, (1, 0))[:-1]
        self._offs[frame].copy_(kept)
        counts = self._counts[frame]
        counts[:num_local] = padded
        counts[num_local : 2 * num_local] = valid[self._rank].minimum((capacity - starts).clamp(min=0))
        counts[2 * num_local :] = mine[-1:]
        demand, rank = ends[:, -1].max(0, keepdim=True)
        is_over = demand > capacity
        self._overflow[frame].copy_(is_over)
        peak = self._peaks[frame : frame + 1]
        torch.maximum(peak, demand, out=peak)
        self._note(rows, demand, rank, is_over)

    def _note(self, rows: torch.Tensor, demand: torch.Tensor, rank: torch.Tensor, is_over: torch.Tensor) -> None:
        """Count events in the words that the host reads."""
        word = self._words.word
        word("num_overflows").add_(is_over)
        _keep(word("max_demand_rows"), is_over, demand)
        _keep(word("max_demand_rank"), is_over, rank)
        num_bad = rows[:, _NUM_BAD]
        word("num_bad_ids").add_(num_bad.sum())
        if self._config.validate_ids:
            has_bad, worst = _first(num_bad > 0)
            _keep(word("bad_rank"), has_bad, worst)
            for name, column in (("bad_token", _BAD_TOKEN), ("bad_topk", _BAD_TOPK), ("bad_value", _BAD_VALUE)):
                _keep(word(name), has_bad, rows[worst, column])
        self._count_refusal(rows)

    def _count_refusal(self, rows: torch.Tensor) -> None:
        word, refusals = self._words.word, rows[:, _REFUSAL]
        refuses, rank = _first(refusals > 0)
        word("num_refusals").add_(refuses)
        _keep(word("refusing_rank"), refuses, rank)
        _keep(word("refusal"), refuses, refusals[rank])
        word("refused_op").masked_fill_(refuses, int(_C.Op.ROUTE))
        self._words.mirror()

    def _outcome(self, rows: torch.Tensor) -> _C.Outcome:
        """Say on the host what the gathered counts mean.

        Shapes: rows [R, E + 8] int64 cpu.
        """
        config, outcome = self._config, _outcome()
        refusing = rows[:, _REFUSAL].nonzero().flatten().tolist()
        if refusing:
            outcome.status, outcome.refusing_rank = _REFUSED, refusing[0]
            outcome.refusal = int(rows[refusing[0], _REFUSAL])
            return outcome
        counts = rows[:, 1 : config.num_experts + 1].sum(0).view(config.num_ranks, -1)
        demand = (-(-counts // config.expert_alignment) * config.expert_alignment).sum(1)
        outcome.max_demand_rows, outcome.max_demand_rank = int(demand.max()), int(demand.argmax())
        outcome.overflow = int(outcome.max_demand_rows > self._plan.capacity_rows)
        outcome.num_bad_ids = int(rows[:, _NUM_BAD].sum())
        if outcome.num_bad_ids and config.validate_ids:
            bad = int((rows[:, _NUM_BAD] > 0).nonzero()[0])
            outcome.bad_rank, outcome.bad_token = bad, int(rows[bad, _BAD_TOKEN])
            outcome.bad_topk, outcome.bad_value = int(rows[bad, _BAD_TOPK]), int(rows[bad, _BAD_VALUE])
        return outcome

    def _or_no_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids [T, K]; for no tokens those of one that has no expert."""
        return ids if ids.shape[0] else self._no_weights[1:].to(torch.int64).fill_(-1)

    def _filled(self, place: Place) -> Encoded:
        return self._recv[place.frame if self._plan.lifetimes["recv_tokens"] == "frame" else max(place.workspace, 0)]

    def _no_rows(self, like: Encoded, num_rows: int) -> Encoded:
        """Return rows of zeros in the format of some regions, for a rank that has no tokens, or refuses."""
        nbytes = like.data.shape[1] * like.data.element_size()
        scale_bytes = 0 if like.scales is None else like.scales.shape[1]
        data, scales = self._no_token[:1, :nbytes], self._no_token[1:, :scale_bytes]
        if num_rows > 1:
            data, scales = (
                torch.zeros(num_rows, n, dtype=torch.uint8, device=self._device) for n in (nbytes, scale_bytes)
            )
        return Encoded(data.view(like.data.dtype), None if like.scales is None else scales)

    def _padded(self, scales: torch.Tensor | None, filled: Encoded) -> torch.Tensor | None:
        """Return scales as bytes in rows as long as the regions', which are multiples of 16 bytes."""
        if scales is None or filled.scales is None:
            return None
        flat = scales.contiguous().view(torch.uint8).view(scales.shape[0], -1)
        missing = filled.scales.shape[1] - flat.shape[1]
        return torch.nn.functional.pad(flat, (0, missing)) if missing else flat

    def _weighted(
        self, staging: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, frame: int
    ) -> torch.Tensor:  # fmt: skip
        """Multiply rows by their weights in float32, rounded once, into our region."""
        torch.mul(rows, weights[:, None], out=staging)
        row_bytes = staging.shape[1] * staging.element_size()
        self._words.word("staged_bytes").add_(self._offs[frame][-1:].to(torch.int64) * row_bytes)
        return staging

    def _pull(
        self, place: Place, rows: torch.Tensor, out: torch.Tensor, weights: torch.Tensor | None = None,
        out_weights: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Bring rows back into `out`: zeros for a token whose experts are none."""
        handle = self._handles[place.frame]
        if not out.shape[0]:
            sink = rows.new_empty((handle.num_rows, rows.shape[1]))
            unused = torch.empty((handle.num_rows, self._config.num_topk), device=self._device)
            handle.combine(rows, sink, weights, None if weights is None else unused)
            return
        dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        if not _LIBRARY_ZEROES_EMPTY_TOKENS:
            dense.zero_()
        handle.combine(rows, dense, weights, out_weights)
        if dense is not out:
            out.copy_(dense)

    def _warm_up(self, group: Group) -> None:
        """Run every kernel once, with no token: the library compiles each at its first launch, which no capture may."""
        place = Place(0, 0)
        token = self._recv[0]
        no_ids = self._ids[0][:0]
        steps: list[Callable[[], object]] = [
            lambda: self._handles[0].update(self._or_no_ids(no_ids)),
            lambda: self._handles[0].dispatch(
                self._no_rows(token, 1), self._no_weights[:1], token, self._recv_weights[0]
            ),
            lambda: self._pull(place, self._expert_out[0], self._expert_out[0][:0]),
        ]
        if self._grads:
            into = Encoded(self._grads[0])
            pulled = self._grad_rows[0]
            steps += [
                lambda: self._handles[0].dispatch(self._no_rows(into, 1), None, into, None),
                lambda: self._pull(place, pulled, pulled[:0], self._grad_weights[0], None),
            ]
        with torch.no_grad():
            self._lib.gather(self._rows[0], self._rank)
            for step in steps:
                step()
                if self._side is not None:
                    torch.cuda.synchronize(self._device)
                group.barrier()  # nobody waits on the device for a rank that is still compiling


class Library:
    """The library's group on a communicator of its own, and its words as we use them."""

    def __init__(self, plan: Plan, group: Group, device: torch.device) -> None:
        core, ep = (importlib.import_module(name) for name in MODULES)
        self.ep, self._device, config = ep, device, plan.config
        made = bytes(core.get_unique_id().as_bytes) if group.rank == 0 else b""
        identity = core.UniqueId.from_bytes(group.all_gather(made)[0])
        self._comm = core.Communicator.init(nranks=group.size, rank=group.rank, unique_id=identity)
        _check_domains(config.num_experts, _num_domains(self._comm))
        self._group = ep.Group.create(
            self._comm,
            ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT, num_experts=config.num_experts, num_topk=config.num_topk,
                max_dispatch_tokens_per_rank=config.max_tokens_per_rank,
                max_recv_tokens_per_rank=plan.capacity_rows, max_token_bytes=plan.nccl_ep_token_bytes,
                max_num_sms=config.max_num_sms or 0, zero_copy=ep.ZeroCopyMode.OFF,
                overflow_policy=ep.OverflowPolicy.DROP,
                timeout_ns=int(max(config.timeout_s, _MIN_TIMEOUT_S) * 1e9),
            ),
        )  # fmt: skip
        self._handle_config = ep.HandleConfig(dispatch_output_per_expert_alignment=config.expert_alignment)
        self._num_topk = config.num_topk

    @property
    def stream(self) -> Any:
        """The current stream."""
        return torch.cuda.current_stream(self._device)

    def gather(self, rows: torch.Tensor, rank: int) -> None:
        """Exchange each rank's row of [R, n] with all."""
        self._comm.allgather(rows[rank], rows, stream=self.stream)

    def new_handle(self, memory: torch.Tensor) -> Handle:
        """Make a handle in memory of ours.

        Raises:
            NativeError: it needs more.
        """
        bindings = importlib.import_module("nccl._extensions.bindings.nccl_ep")
        layout, config = int(self.ep.Layout.EXPERT_MAJOR), self._handle_config._lowpp.ptr
        needed = int(bindings.handle_mem_size(self._group.ptr, layout, config, self._num_topk))
        if needed > memory.nbytes:
            raise NativeError(
                f"a handle of this NCCL EP needs {needed:,} bytes and region nccl_ep_handle of the plan has "
                f"{memory.nbytes:,}, which is for nccl-extensions 0.1.0; install that version"
            )
        described = self.ep.Tensor(memory)
        pointer = bindings.init_handle(self._group.ptr, layout, config, self._num_topk, described.ptr)
        return Handle(self, self.ep.Handle(pointer))

    def destroy(self) -> None:
        self._group.destroy()
        self._comm.destroy()


class Handle:
    """One frame's routing in the library. Descriptors are made for each call; the library copies them.

    Attributes:
        num_rows: tokens that the latest `update` was given, which every call until the next one must have.
    """

    def __init__(self, library: Library, handle: Any) -> None:
        self._library, self._handle, ep = library, handle, library.ep
        self.num_rows = 0
        self._backward_dispatch = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)
        self._backward_combine = ep.CombineConfig(pass_direction=ep.PassDir.BWD)
        self._with_scales = ep.DispatchConfig(quantization_recipe=ep.DispatchQuantizationRecipe.FWD)

    def update(self, ids: torch.Tensor) -> None:
        """Route by new ids.

        Shapes: ids [T, K] int64.
        """
        self.num_rows = ids.shape[0]
        self._handle.update(self._library.ep.Tensor(ids), stream=self._library.stream)

    def dispatch(
        self, rows: Encoded, weights: torch.Tensor | None, into: Encoded, recv_weights: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Move rows; with weights forward, without them gradients."""
        ep, described = self._library.ep, self._described
        config = self._backward_dispatch if weights is None else None
        if rows.scales is not None:
            config = self._with_scales
        self._handle.dispatch(
            ep.DispatchInputs(
                tokens=described(_as_wire(rows)), topk_weights=described(weights), scales=described(rows.scales)
            ),
            ep.DispatchOutputs(
                tokens=described(_as_wire(into)), topk_weights=described(recv_weights), scales=described(into.scales)
            ),
            config=config, stream=self._library.stream,
        )  # fmt: skip

    def combine(
        self, rows: torch.Tensor, out: torch.Tensor, weights: torch.Tensor | None, out_weights: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Bring rows back; with weights those are gradients, of rows and of weights."""
        ep, described = self._library.ep, self._described
        self._handle.combine(
            ep.CombineInputs(tokens=described(rows), topk_weights=described(weights)),
            ep.CombineOutputs(tokens=described(out), topk_weights=described(out_weights)),
            config=self._backward_combine if weights is not None else None, stream=self._library.stream,
        )  # fmt: skip

    def destroy(self) -> None:
        self._handle.destroy()

    def _described(self, tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else self._library.ep.Tensor(tensor)


def _as_wire(rows: Encoded) -> torch.Tensor:
    """Return data in a dtype that the library carries: raw bytes pass for some float of their size, and stay bytes."""
    if rows.data.dtype != torch.uint8:
        return rows.data
    return rows.data.view(torch.bfloat16 if rows.scales is None else torch.float8_e4m3fn)


def _num_domains(communicator: Any) -> int:
    """Return how many NVLink domains the ranks are in; 1 where NCCL does not say, as for ranks that share a GPU."""
    try:
        return int(communicator.n_lsa_teams)
    except Exception:  # its type is the library's
        return 1


def _check_domains(num_experts: int, num_domains: int) -> None:
    per_domain = num_experts // max(num_domains, 1)
    if per_domain % _EXPERTS_PER_DOMAIN:
        raise ConfigError(
            f'engine="nccl_ep" found {num_domains} NVLink domains with {per_domain} of num_experts={num_experts} each '
            f"and takes a multiple of {_EXPERTS_PER_DOMAIN}; pad the experts, or use larger domains"
        )


def _outcome() -> _C.Outcome:
    outcome = _C.Outcome()
    outcome.status, outcome.refusing_rank, outcome.bad_rank, outcome.stash_rank = _OK, -1, -1, -1
    return outcome


def _source(given: Rows, region: torch.Tensor) -> torch.Tensor:
    """Return the rows that a backward reads: a tensor, our region, or zeros, which are written there."""
    if given.tensor is not None:
        return given.tensor
    return region if given.in_window else region.zero_()


def _first(ranks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether any rank has something, and the lowest that has.

    Shapes: ranks [R] bool; result [1] bool, [1] int64.
    """
    found, rank = ranks.to(torch.int64).max(0, keepdim=True)
    return found > 0, rank


def _keep(word: torch.Tensor, condition: torch.Tensor, value: torch.Tensor) -> None:
    """Set a word where a condition holds, in stream order.

    Shapes: word, condition and value [1].
    """
    torch.where(condition, value.to(word.dtype), word, out=word)
