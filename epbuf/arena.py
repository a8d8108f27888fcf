"""One window for one plan: open, one tensor per region, check, close."""

from __future__ import annotations

import time
import warnings
import weakref
from types import TracebackType
from typing import Any, NoReturn

import torch

from epbuf import _C
from epbuf.debug import Debug, HandOut
from epbuf.engine import TOKEN_DTYPES, Encoded, Engine, describe_progress, failure, open_engine, peer_error
from epbuf.errors import (
    CaptureError,
    ConfigError,
    EpbufError,
    LeaseError,
    NativeError,
    PeerTimeoutError,
    PlanMismatchError,
)
from epbuf.lease import Graph, Lease, LeaseBook, caller, refuse_while_recording
from epbuf.plan import Plan, RecvPolicy, Region, describe_difference
from epbuf.windows import Window, nccl
from epbuf.windows.group import AnyGroup, Group, TorchGroup, VirtualRank, as_group
from epbuf.windows.host import HostWindow
from epbuf.windows.local import LocalWindow
from epbuf.windows.torch_symm import TorchSymmWindow

_WINDOWS_BY_DEVICE = {"cpu": ("host", "local"), "cuda": ("nccl", "torch_symm", "local")}

_GRAPH_DEATH_S = 1.0
_BACKWARD_TAIL_S = 0.25  # a thread of autograd that has ended a backward lets go of its last node within this


class Arena:
    """Owner of the window of one plan.

    Attributes:
        plan: what was opened.
        rank: this rank within the group.
        device: where the window lies.
        order: [1] int32, an ordinary tensor that every op mutates so that compiled code keeps program order.
        anchor: [1] float32 that requires grad, so that dispatch records a node whatever its inputs need.
        window_allocations: allocations and registrations of window memory so far; 1 after `open`, for ever.
        token_dtype, hidden, num_topk, max_tokens_per_rank, capacity_rows: of the plan, at hand for every op's checks.
        row_strides: (H, 1), of rows without gaps.
        recv_payload, grad_payload: formats of dispatch and of combine's backward.
        num_scales, recv_scale_dtype: block scales of a dispatched row, without padding; None when it has none.
        recv_in_frame: whether recv_tokens lies in the frame, not in the forward workspace.
        recomputes: whether combine's backward dispatches once more, to bring received rows back.
        routing_views, views: made once and kept as long as the arena; by frame, and of other regions by address.
        debug: poison and canaries, in debug mode; else None.
        may_refuse_result: whether an eager dispatch may raise once its round is complete.
    """

    def __init__(self, plan: Plan, group: Group, window: Window, engine: Engine, device: torch.device) -> None:
        self.plan = plan
        self.rank = group.rank
        self.device = device
        self.window = window
        self.engine = engine
        self._copy_facts(plan)
        self.window_reason = ""
        self.debug: Debug | None = None
        self.window_allocations = 1
        self.order = torch.zeros(1, dtype=torch.int32, device=device)
        self.anchor = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)
        self.handle = _C.handle_put(weakref.ref(self))
        sizes = plan.schedule.num_frames, plan.schedule.num_workspaces
        if engine.synchronous:
            self.book = LeaseBook(self.handle, *sizes)
        else:
            self.book = LeaseBook(self.handle, *sizes, engine, patience_s=_BACKWARD_TAIL_S)
        self._num_raised_refusals = 0
        self._group = group
        self._regions = _make_regions(plan, window)
        self._routed = tuple(
            (self._regions["offs"][f], self._regions["counts"][f], self._regions["overflow"][f])
            for f in range(plan.schedule.num_frames)
        )
        self.routing_views: dict[int, tuple[torch.Tensor, ...]] = {}
        self.views: dict[int, torch.Tensor] = {}
        self._high_versions = [0] * plan.schedule.num_workspaces
        self._received = _encoded(self._regions, "recv_tokens", "recv_")
        self._moved_grads = _encoded(self._regions, "grad_expert_out", "grad_expert_out_")
        self._nans = torch.full(
            (plan.schedule.num_frames, 1 + plan.schedule.num_workspaces), torch.nan, dtype=self.token_dtype,
            device=device,
        )  # fmt: skip
        self._num_carried: dict[tuple[int, int], int] = {}
        self._lifetimes = {region.name: region.lifetime for region in plan.regions}
        self._base = window.peers[group.rank]
        self._end = self._base + plan.total_bytes
        self._addresses = {
            name: tuple(self._base + region.offset for region in self.regions_named(name)) for name in self._lifetimes
        }
        self._closed = False

    def _copy_facts(self, plan: Plan) -> None:
        config = plan.config
        self.token_dtype = TOKEN_DTYPES[config.token_dtype]
        self.hidden, self.num_topk = config.hidden, config.num_topk
        self.max_tokens_per_rank, self.capacity_rows = config.max_tokens_per_rank, plan.capacity_rows
        self.row_strides = (config.hidden, 1)
        self.recomputes = plan.recv_policy == "recompute"
        self.recv_in_frame = any(r.name == "recv_tokens" and r.lifetime == "frame" for r in plan.regions)
        self.recv_payload, self.grad_payload = config.dispatch_payload, config.combine_grad_payload
        self.num_scales = plan.num_scales
        dtypes = {region.name: getattr(torch, region.dtype) for region in plan.regions}
        self.recv_scale_dtype: torch.dtype | None = dtypes.get("recv_scales")
        self.may_refuse_result = config.validate_ids or config.overflow_policy == "error"

    @classmethod
    def open(
        cls, plan: Plan, group: AnyGroup = None, *, device: torch.device | str | None = None, window: str = "auto",
        engine: str = "native", debug: bool = False,
    ) -> Arena:  # fmt: skip
        """Allocate, register and map the window of a plan. The only place that does.

        Collective: every rank of `group` calls it with the same plan. Synchronises.

        With `debug` every acquire() poisons the frame and looks for writes past the last zone and between regions. It
        then reads the device, unless it is captured: what a replay finds is raised by check(). Without, nothing is
        launched for it. Ranks need not agree.

        Raises:
            CaptureError: a graph is being captured.
            ConfigError: the group has another size than the plan, or device, window or engine do not fit.
            PlanMismatchError: another rank brought another plan; raised on every rank.
            NativeError: some rank could not allocate; raised on every rank.
        """
        _refuse_open_in_capture()
        _check_plan(plan)
        _refuse_inference_mode()
        with torch.no_grad():
            ranks = as_group(group)
            place = _device_of(device, ranks)
            kind, reason = _window_kind(window, place, group)
            _agree(plan, ranks)
            memory = _WINDOWS[kind](plan.total_bytes, ranks, place)
            mover = open_engine(engine, plan, ranks.rank, memory, place)
            arena = cls(plan, ranks, memory, mover, place)
            arena.window_reason = reason
            arena.debug = Debug(plan, memory, arena._regions) if debug else None
            ranks.barrier()
        return arena

    def acquire(self, frame: int | None = None, *, recv_policy: RecvPolicy | None = None) -> Lease:
        """Take a frame: the lowest free one, or the one that `plan.schedule.frame(...)` names.

        Every rank must take the same frame for the same dispatch. `recv_policy` may name the plan's.

        Raises:
            LeaseError: the frame, or every frame, is in use; the arena is closed.
            ConfigError: the plan was built with another recv_policy.
            NativeError: in debug mode, bytes of the frame that belong to nobody were written.
        """
        self.require_open("acquire()")
        if recv_policy not in (None, self.plan.recv_policy):
            raise ConfigError(
                f"acquire(recv_policy={recv_policy!r}): the plan was built with {self.plan.recv_policy!r}, which sizes "
                "its regions; give Plan.build the policy that the layers use"
            )
        if frame is not None and type(frame) is not int:
            raise LeaseError(
                f"acquire(frame=...) takes an int, found {type(frame).__name__}; schedule.frame(layer, microbatch) "
                "gives one"
            )
        lease = Lease(self, self.book, frame)
        if self.debug is not None:
            self._hand_out(lease, self.debug)
        return lease

    def _hand_out(self, lease: Lease, debug: Debug) -> None:
        try:
            self.engine.follow(lease.frame)
            debug.hand_out(HandOut(lease.serial, lease.frame, lease.where), reads=not self.engine.capture_key())
        except BaseException:
            lease.release()
            raise

    def region(self, name: str, index: int = 0) -> torch.Tensor:
        """Return the one tensor of a region of this rank."""
        if self._closed:
            self.require_open(name)
        return self._regions[name][index]

    def routed(self, frame: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return offs, counts and overflow of a frame: what route writes."""
        if self._closed:
            self.require_open("offs")
        return self._routed[frame]

    def received(self, index: int) -> Encoded:
        """Return the regions that dispatch fills, of a frame or, with save_recv=False, of a forward workspace.

        Scales of one byte as uint8.
        """
        if self._closed:
            self.require_open("recv_tokens")
        return self._received[index]

    def moved_grads(self, workspace: int) -> Encoded:
        """Return the regions that combine's backward fills; scales of one byte as uint8."""
        if self._closed:
            self.require_open("grad_expert_out")
        return self._moved_grads[workspace]

    def new_versions(self, workspace: int, regions: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
        """Give regions that a dispatch has filled versions above all that they had, and return them.

        A dispatch that repeats sets them back, so the counters alone would give a number twice.
        """
        version = max(self._high_versions[workspace], *(region._version for region in regions)) + 1
        self._high_versions[workspace] = version
        torch._C._autograd._unsafe_set_version_counter(regions, (version,) * len(regions))
        return (version,) * len(regions)

    def carrier(self, frame: int) -> torch.Tensor:
        """Return what autograd runs through instead of encoded rows that a frame received.

        Shapes: [C, H] token dtype, strides (0, 0) over one NaN.
        """
        return self._nans[frame, 0].expand(self.capacity_rows, self.hidden).detach()

    def grad_carrier(self, frame: int, workspace: int, num_rows: int) -> torch.Tensor:
        """Return what stands for encoded gradients of rows, and is found again by the address of its NaN.

        Shapes: [num_rows, H] token dtype, strides (0, 0).
        """
        if not torch.compiler.is_compiling():
            self._num_carried[frame, workspace] = num_rows
        return self._nans[frame, 1 + workspace].expand(num_rows, self.hidden).detach()

    def find_carried(self, grad: torch.Tensor) -> tuple[int, int] | None:
        """Return (frame, workspace) of the gradients behind a whole carrier; None for any other tensor."""
        if grad.dtype != self.token_dtype or grad.device != self.device or grad.ndim != 2:
            return None
        if grad.stride() != (0, 0) or grad.shape[1] != self.hidden:
            return None
        num_bytes = grad.data_ptr() - self._nans.data_ptr()
        if not 0 <= num_bytes < self._nans.nbytes:
            return None
        frame, column = divmod(num_bytes // self._nans.element_size(), self._nans.shape[1])
        place = frame, column - 1
        return place if self._num_carried.get(place) == grad.shape[0] else None  # some of its rows have its address

    def new_token_rows(self, num_tokens: int) -> torch.Tensor:
        """Make an ordinary tensor for one row per token.

        Shapes: [num_tokens, H] token dtype, uninitialised.
        """
        return self._regions["expert_out"][0].new_empty((num_tokens, self.hidden))

    def has_region(self, name: str) -> bool:
        """Tell whether the plan has a region of that name."""
        return name in self._lifetimes

    def lifetime(self, name: str) -> str:
        """Return the lifetime word of a region; KeyError if the plan has none of that name."""
        return self._lifetimes[name]

    def regions_named(self, name: str) -> list[Region]:
        """Return the regions of one name, by index."""
        return sorted((r for r in self.plan.regions if r.name == name), key=lambda region: region.index)

    def address(self, name: str, index: int = 0) -> int:
        """Return where the plan puts a region in this process."""
        return self._addresses[name][index]

    def covers(self, address: int) -> bool:
        """Tell whether an address lies in this rank's window."""
        return self._base <= address < self._end

    def window_offset(self, name: str, index: int) -> tuple[object, int]:
        """Return (window, bytes from its start)."""
        self.require_open(name)
        return self.window, self.plan.region(name, index).offset

    def packed(self, name: str, index: int) -> torch.Tensor:
        """Return a data region and the scales behind it as one uint8 view."""
        data, scales = self.plan.region(name, index), _scales_of(self.plan, name, index)
        if scales is not None and scales.offset != data.offset + data.nbytes:
            raise ConfigError(
                f"{name} ends at byte {data.offset + data.nbytes} and its scales begin at {scales.offset}: C * row "
                "must be a multiple of 256 bytes for a packed view; choose a capacity that makes it so"
            )
        nbytes = data.nbytes + (scales.nbytes if scales is not None else 0)
        self.require_open(name)
        return self.window.bytes_at(data.offset, nbytes)

    def index_at(self, name: str, tensor: torch.Tensor) -> int:
        """Return which of the regions of a name a tensor is.

        Raises:
            NativeError: none: a compiler handed the op a copy.
        """
        try:
            return self._addresses[name].index(tensor.data_ptr())
        except ValueError:
            raise _copied(name, tensor) from None

    def expect(self, name: str, index: int, tensor: torch.Tensor) -> None:
        """Check that a tensor is a region, at the address that the plan gives it.

        Raises:
            NativeError: a compiler handed the op a copy.
        """
        if self._addresses[name][index] != tensor.data_ptr():
            raise _copied(name, tensor)

    def require_open(self, what: str) -> None:
        """Raise LeaseError when the arena is closed."""
        if self._closed:
            raise LeaseError(f"{what} was asked of an arena that is closed; open another with Arena.open(plan, group)")

    def check(self) -> None:
        """Raise what went wrong on the device and was not raised yet. Reads the device.

        Raises:
            CaptureError: called while capturing.
            PeerTimeoutError, LeaseError: the arena is poisoned, and by whom.
            NativeError: in debug mode, a replay found bytes written that belong to nobody.
        """
        refuse_while_recording(self.book, "check()", "call it after the capture, or after a replay")
        self.require_open("check()")
        self._judge(self.engine.control())
        if self.debug is not None:
            self.debug.raise_found()
        gone = self._ranks_that_gave_up()
        if gone:
            raise PeerTimeoutError(
                f"rank(s) {gone} gave this arena up, after a wait of theirs failed or an exception left their `with` "
                "block; look at their errors and close this arena"
            )

    def raise_pending(self) -> None:
        """Raise what earlier calls met and could not raise, without a synchronisation. Nothing on CPU."""
        if self.engine.synchronous:
            return
        control = self.engine.status()
        if (control.poisoned or control.num_refusals > self._num_raised_refusals) and not self.engine.capture_key():
            self._judge(control)

    def count_own_refusal(self) -> None:
        """Note that this rank raises its own refusal, so that `raise_pending` does not raise it again.

        A refusal that is being captured has not happened: its kernels count when a replay runs them.
        """
        if not self.engine.capture_key():
            self._num_raised_refusals += 1

    def failure(self) -> EpbufError:
        """Describe what poisoned this arena."""
        control = self.engine.control()
        return failure(control.error, self.rank, self.plan.config.timeout_s, self._progress())

    @property
    def poisoned(self) -> bool:
        """Tell whether a wait failed, here or on a peer. Reads the device; LeaseError once the arena is closed."""
        self.require_open("poisoned")
        return bool(self.engine.control().poisoned or self._ranks_that_gave_up())

    def barrier(self) -> None:
        """Wait on the host for every rank of the group. Collective."""
        self._group.barrier()

    def demand_peak_rows(self) -> int:
        """Return the largest demand that a dispatch so far put on any rank, in rows. Reads the device."""
        return int(self.region("frame_counters").view(torch.int64)[:, 1].max().item())

    def report(self) -> dict[str, Any]:
        """Return what the arena holds and what it has done, as plain data. Reads the device.

        Raises:
            CaptureError: called while capturing.
        """
        refuse_while_recording(self.book, "report()", "call it after the capture")
        self.require_open("report()")
        control = self.engine.control()
        names = ("num_refusals", "num_overflows", "num_bad_ids", "num_early_reuses", "staged_bytes")
        return {
            "rank": self.rank,
            "window": self.window.kind,
            "window_reason": self.window_reason,
            "window_bytes": self.plan.total_bytes,
            "window_allocations": self.window_allocations,
            "num_frames": self.plan.schedule.num_frames,
            "num_frames_high_water": self.book.num_frames_high_water,
            "claims": [{"frame": f, "kind": k, "where": w} for f, k, w in self.book.claims()],
            "graphs": [{"where": g.where, "frames": sorted(g.frames)} for g in self.book.live_graphs()],
            "demand_peak_rows": self.demand_peak_rows(),
            **{name: int(getattr(control, name)) for name in names},
        }

    def close(self) -> None:
        """Give the window back. Idempotent.

        Collective, except on a poisoned arena, where it is local. Views handed out before are dead afterwards.

        Raises:
            CaptureError: called while capturing.
            LeaseError: graphs that hold the memory are alive; they are listed.
        """
        if self._closed:
            return
        refuse_while_recording(self.book, "close()", "close the arena after the capture, when its graphs are gone")
        graphs = self._graphs_after_drain()
        if graphs:
            places = "\n".join(f"  captured at {g.where}, frames {sorted(g.frames)}" for g in graphs)
            raise LeaseError(f"close() while {len(graphs)} graph(s) hold this memory:\n{places}\nDrop them first")
        is_healthy = not self.poisoned
        try:
            if is_healthy:
                self._group.barrier(self.plan.config.timeout_s)
            else:
                self.engine.abort()  # peers that were not told yet must not wait for this rank in their close()
        except Exception as error:
            is_healthy = False
            raise PeerTimeoutError(
                f"rank {self.rank} closed its arena and a peer did not come: it died or left its group ({error}). "
                "The arena is closed on this rank"
            ) from error
        finally:
            self._let_go(is_healthy)

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._abandon(error)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            if not self.engine.synchronous:
                _leak(self.window, self.engine)  # graphs and peers may still use the memory
            warnings.warn(
                f"an arena of {self.plan.total_bytes} bytes was dropped without close(); its window stays mapped while "
                "views or peers use it",
                ResourceWarning,
                stacklevel=2,
            )

    def _abandon(self, error: BaseException) -> None:
        self.engine.abort()
        warnings.warn(
            f"rank {self.rank} leaves its arena by {type(error).__name__}: peers are told, the window is not unmapped "
            "and there is no barrier",
            ResourceWarning,
            stacklevel=3,
        )
        self._closed = True
        _C.handle_drop(self.handle)

    def trouble(self, control: _C.Control) -> EpbufError | None:
        """Return what a rank's words say that was not raised yet; the caller raises it."""
        if control.poisoned:
            return self.failure()
        if self.engine.synchronous or control.num_refusals <= self._num_raised_refusals:
            return None
        self._num_raised_refusals = int(control.num_refusals)
        op = _C.Op(control.refused_op)
        name = "dispatch" if op == _C.Op.ROUTE else op.name.lower().replace("_", " ")
        return peer_error(name, control.refusing_rank, control.refusal)

    def _judge(self, control: _C.Control) -> None:
        error = self.trouble(control)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame

    def _ranks_that_gave_up(self) -> list[int]:
        """Return the ranks whose ABORT cell here is set. Reads the device."""
        return [int(rank) for rank in self.region("abort_cells").nonzero().flatten().tolist()]

    def _graphs_after_drain(self) -> list[Graph]:
        """Return the graphs that live; CUDA tells of a graph's death a moment after it, from a thread of its own."""
        graphs = self.book.live_graphs()
        deadline = time.monotonic() + _GRAPH_DEATH_S
        while graphs and not self.engine.synchronous and time.monotonic() < deadline:
            torch.cuda.synchronize(self.device)
            time.sleep(0.01)
            graphs = self.book.live_graphs()
        return graphs

    def _let_go(self, is_healthy: bool) -> None:
        self._closed = True
        _C.handle_drop(self.handle)
        self.engine.close()
        self._regions, self._routed, self._received, self._moved_grads = {}, (), [], []
        self.routing_views, self.views, self.debug = {}, {}, None
        if is_healthy or self.engine.synchronous:
            self.window.close()
        else:
            _leak(self.window)  # to deregister needs the peers, and one of them is gone

    def _progress(self) -> list[str]:
        lines = []
        for peer, (call, op, frame, workspace) in enumerate(self.engine.progress()):
            packed = op << 28 | frame << 14 | workspace
            lines.append(f"rank {peer}: call {call}, {describe_progress(packed) if call else 'none yet'}")
        return lines


def _leak(*memory: object) -> None:
    """Keep memory until the process ends, as an entry of the handle table that leads to no arena."""
    kept = list(memory)

    def no_arena() -> None:
        kept.reverse()  # a closure over the memory is what keeps it

    _C.handle_put(no_arena)


def _copied(name: str, tensor: torch.Tensor) -> NativeError:
    error = NativeError(
        f"region {name} arrived as a copy at {tensor.data_ptr():#x}, not as the window's own memory: a compiler "
        "functionalised the op and needs the region's older value. Do not read regions of a lease before dispatch in "
        'compiled code, do not return them from it, and use backend="inductor" or eager for this function'
    )
    error.refusal = int(_C.Refusal.COPIED_REGION)
    return error


def arena_of(handle: int) -> Arena:
    """Return the open arena behind a handle.

    Raises:
        LeaseError: it was closed.
    """
    try:
        found: Arena | None = _C.handle_get(handle)()
    except KeyError:
        found = None
    if found is None:
        raise LeaseError("a lease or ticket of an arena that is closed was used; open an arena and acquire again")
    return found


def _refuse_open_in_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"Arena.open at {caller()} allocates and registers memory, which cannot be captured: open the arena before "
            "the capture and use its leases inside"
        )
    for reference in _C.handle_objects():
        arena = reference()
        recording = arena.book.recording if arena is not None else None
        if recording is not None and recording.is_mine():
            raise CaptureError(
                f"Arena.open at {caller()} allocates and registers memory, which cannot be captured (capture began at "
                f"{recording.where}): open the arena before the capture and use its leases inside"
            )


def _refuse_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            f"Arena.open at {caller()} is inside torch.inference_mode: tensors made there can never be saved for "
            "backward. Open the arena outside; its leases, dispatch and combine work inside"
        )


def _check_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise ConfigError(f"Arena.open takes a Plan, found {type(plan).__name__}; make one with Plan.build(config)")


def _device_of(device: torch.device | str | None, group: Group) -> torch.device:
    """Return the device asked for; without one, the current CUDA device when the group has a CUDA backend."""
    if device is None:
        on_cuda = isinstance(group, TorchGroup) and group.has_cuda()
        return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is no torch device: {error}") from None
    if chosen.type not in _WINDOWS_BY_DEVICE:
        raise ConfigError(f'device="{chosen}" has no engine here; found engines for {sorted(_WINDOWS_BY_DEVICE)}')
    if chosen.type == "cuda" and not (_C.CUDA_BUILT and torch.cuda.is_available()):
        missing = "no CUDA device is visible" if _C.CUDA_BUILT else "epbuf was built without CUDA (nvcc was not found)"
        raise ConfigError(f'device="{chosen}" was asked for and {missing}; use device="cpu"')
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


_WINDOWS: dict[str, Any] = {
    "host": HostWindow,
    "local": LocalWindow,
    "torch_symm": TorchSymmWindow,
    "nccl": nccl.NcclWindow,
}


def _window_kind(word: str, device: torch.device, group: AnyGroup) -> tuple[str, str]:
    """Choose the kind of window: the word, or the default of the device and group. Return it and why.

    Raises:
        ConfigError: the word does not exist, or not for this device and group.
    """
    one_process = group is None or isinstance(group, VirtualRank)
    if word == "auto":
        return _default_window(device, one_process)
    kinds = _WINDOWS_BY_DEVICE[device.type]
    if word not in kinds:
        raise ConfigError(f'window="{word}" does not exist on {device.type}; found {", ".join(kinds)}, or "auto"')
    if word == "local" and not one_process:
        raise ConfigError('window="local" is for ranks of one process; pass virtual ranks or no group, or take "auto"')
    if word in ("host", "torch_symm") and isinstance(group, VirtualRank):
        raise ConfigError(f'window="{word}" is for processes; virtual ranks of one process take "local"')
    return word, "asked for"


def _default_window(device: torch.device, one_process: bool) -> tuple[str, str]:
    if one_process:
        return "local", "the ranks live in one process"
    if device.type == "cpu":
        return "host", "CPU ranks of one host"
    library, trouble = nccl.try_library()
    if not trouble:
        return "nccl", f"found {library}"
    return "torch_symm", trouble


def _agree(plan: Plan, group: Group) -> None:
    if group.size != plan.config.num_ranks:
        raise ConfigError(
            f"the plan is for num_ranks={plan.config.num_ranks} and the group has {group.size}; "
            "build the plan for the group, or pass the right group"
        )
    plans = group.all_gather((plan.fingerprint, plan.to_json()))
    different = next((r for r, (print_, _) in enumerate(plans) if print_ != plans[0][0]), None)
    if different is not None:
        _raise_mismatch(plans[0][1], plans[different][1], different)


def _raise_mismatch(first: str, other: str, rank: int) -> NoReturn:
    raise PlanMismatchError(
        f"ranks of one group must open the same plan; rank 0 and rank {rank} differ in\n"
        f"{describe_difference(first, other, names=('rank 0', f'rank {rank}'))}\n"
        "Build it from the same values on every rank"
    )


def _make_regions(plan: Plan, window: Window) -> dict[str, list[torch.Tensor]]:
    """Make one tensor per region; of two declared aliases the smaller is a view of the larger."""
    owners = {(region.name, region.index): _owner(region, plan) for region in plan.regions}
    made = {key: _make_tensor(owner, window) for key, owner in owners.items() if key == (owner.name, owner.index)}
    tensors: dict[str, list[torch.Tensor]] = {}
    for region in plan.regions:
        owner = owners[region.name, region.index]
        tensor = made[owner.name, owner.index]
        tensors.setdefault(region.name, []).append(tensor if owner is region else _alias(tensor, owner, region))
    return tensors


def _owner(region: Region, plan: Plan) -> Region:
    """Return the region whose tensor a region is a view of: itself, or its larger alias (the first of equal ones)."""
    for pair in plan.config.alias:
        if region.name in pair:
            first, second = (plan.region(name, region.index) for name in pair)
            return first if first.nbytes >= second.nbytes else second
    return region


def _encoded(regions: dict[str, list[torch.Tensor]], data: str, prefix: str) -> list[Encoded]:
    """Return the regions of rows in one payload, by index; a payload without scales has none of theirs.

    Scales of one byte are bytes here: inductor drops ops that take float8_e8m0fnu
    (torch/_inductor/lowering.py of torch 2.13, unsupported_input_tensor).
    """
    scales, row_scales = regions.get(f"{prefix}scales"), regions.get(f"{prefix}row_scales")
    return [
        Encoded(tensor, as_bytes(scales[i]) if scales else None, row_scales[i] if row_scales else None)
        for i, tensor in enumerate(regions.get(data, []))
    ]


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of a one-byte dtype, with which torch cannot compute, as bytes; any other rows as they are."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _make_tensor(region: Region, window: Window) -> torch.Tensor:
    memory = window.bytes_at(region.offset, region.nbytes)
    stride = torch.empty(region.shape, device="meta").stride()
    tensor = torch.empty(0, dtype=getattr(torch, region.dtype), device=memory.device)
    return tensor.set_(memory.untyped_storage(), 0, region.shape, stride)  # no view of `memory`: its own counter


def _alias(tensor: torch.Tensor, owner: Region, region: Region) -> torch.Tensor:
    """Return a region as a view of the tensor whose bytes it shares: one version counter for both."""
    start = region.offset - owner.offset
    flat = tensor.view(torch.uint8).view(-1)[start : start + region.nbytes]
    return flat.view(getattr(torch, region.dtype)).view(region.shape)


def _scales_of(plan: Plan, name: str, index: int) -> Region | None:
    scales = {"recv_tokens": "recv_scales", "grad_expert_out": "grad_expert_out_scales"}.get(name)
    known = scales is not None and any(r.name == scales and r.index == index for r in plan.regions)
    return plan.region(scales, index) if known and scales is not None else None
