"""Memory of one plan: its window and regions, the engine that moves rows in it, and the book of its leases.

An arena has one generation at a time, and after `grow` older ones that something still uses. Ops, leases, tickets and
autograd know the generation that they began in.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from epbuf import _C, marks
from epbuf.control import demand_peaks
from epbuf.debug import Debug, HandOut
from epbuf.engine import TOKEN_DTYPES, Encoded, Engine, describe_progress, failure, peer_error
from epbuf.engines import open_engine
from epbuf.engines.external import ExternalEngine
from epbuf.errors import ConfigError, EpbufError, LeaseError, NativeError, PeerTimeoutError
from epbuf.lease import Graph, Lease, LeaseBook, Use, caller
from epbuf.plan import STASH_PAGE_ROWS, Lifetime, Plan, RecvPolicy, Region
from epbuf.windows import Window, nccl
from epbuf.windows.adopted import AdoptedWindow
from epbuf.windows.group import Group
from epbuf.windows.host import HostWindow
from epbuf.windows.local import LocalWindow
from epbuf.windows.own import OwnWindow
from epbuf.windows.torch_symm import TorchSymmWindow

EVENTS = ("num_refusals", "num_overflows", "num_stash_overflows", "num_bad_ids", "num_early_reuses", "staged_bytes")
"""What is counted, and goes on being counted when a generation is gone."""

RECEIVED = ("recv_tokens", "recv_scales", "recv_row_scales")
"""Regions of received rows: data, block scales, row scales."""

_Tensors = dict[tuple[str, Lifetime], dict[int, torch.Tensor]]  # of regions, by name and set

_GRAPH_DEATH_S = 1.0
_BACKWARD_TAIL_S = 0.25  # a thread of autograd that has ended a backward lets go of its last node within this


class Generation:
    """The memory of an arena at one plan.

    Attributes:
        plan: what was opened.
        number: 0 for what `Arena.open` made; growth adds one.
        where: line of the user's code that opened the arena or grew it.
        grower: what an eager dispatch calls that needs more rows than C, and how many; it leaves the lease in memory
            that has them. None: rows are dropped and flagged.
        rank: this rank within the group.
        device: where the window lies.
        order: [1] int32, an ordinary tensor that every op mutates so that compiled code keeps program order.
        anchor: [1] float32 that requires grad, so that dispatch records a node whatever its inputs need.
        token_dtype, hidden, num_topk, max_tokens_per_rank, capacity_rows: of the plan, at hand for every op's checks.
        row_strides: (H, 1), of rows without gaps.
        stash_rows: rows that the pages of the stash hold; 0 without.
        recv_payload, grad_payload: formats of dispatch and of combine's backward.
        num_scales, recv_scale_dtype: block scales of a dispatched row, without padding; None when it has none.
        policies: recv_policy of each frame.
        recv_in_frame: for each frame, whether recv_tokens lies in it, not in the forward workspace.
        routing_views, views: made once and kept as long as the arena; by frame, and of other regions by address.
        debug: poison and canaries, in debug mode; else None.
        is_external: whether rows are moved by kernels that are not ours.
        registration: what `window_offset` gives for the window: the window, or what came with an adopted tensor.
        encodes: whether dispatch turns rows of the token dtype into a quantised payload.
        may_refuse_result: whether an eager dispatch may raise once its round is complete.
    """

    def __init__(self, plan: Plan, group: Group, window: Window, engine: Engine, device: torch.device) -> None:
        self.plan = plan
        self._lifetimes = plan.lifetimes
        self.number = 0
        self.where = caller() or "unknown"
        self.grower: Callable[[Lease, int], None] | None = None
        self.rank = group.rank
        self.device = device
        self.window = window
        self.engine = engine
        self.is_external = isinstance(engine, ExternalEngine)
        self.registration: object = window
        self.encodes = engine.encodes
        self._copy_facts(plan)
        self.debug: Debug | None = None
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
        of_frames = (self._regions[name, "frame"] for name in ("offs", "counts", "overflow"))
        self._routed = tuple(zip(*(tensors.values() for tensors in of_frames), strict=True))
        self.routing_views: dict[int, tuple[torch.Tensor, ...]] = {}
        self.views: dict[int, torch.Tensor] = {}
        self._high_versions = [0] * plan.schedule.num_workspaces
        self._received = {
            lifetime: _encoded(self._regions, lifetime, "recv_tokens", "recv_") for lifetime in ("frame", "forward")
        }
        self._moved_grads = _encoded(self._regions, "backward", "grad_expert_out", "grad_expert_out_")
        self._nans = torch.full(
            (plan.schedule.num_frames, 1 + plan.schedule.num_workspaces), torch.nan, dtype=self.token_dtype,
            device=device,
        )  # fmt: skip
        self._num_carried: dict[tuple[int, int], int] = {}
        self._base = window.peers[group.rank]
        self._end = self._base + plan.total_bytes
        self._addresses = {
            name: {region.index: self._base + region.offset for region in self.regions_named(name)}
            for name in self._lifetimes
        }
        self._closed = False

    def _copy_facts(self, plan: Plan) -> None:
        config = plan.config
        self.token_dtype = TOKEN_DTYPES[config.token_dtype]
        self.hidden, self.num_topk = config.hidden, config.num_topk
        self.max_tokens_per_rank, self.capacity_rows = config.max_tokens_per_rank, plan.capacity_rows
        self.row_strides = (config.hidden, 1)
        self.policies = plan.frame_policies
        kept = {r.index for r in plan.regions if r.name == "recv_tokens" and r.lifetime == "frame"}
        self.recv_in_frame = tuple(frame in kept for frame in range(plan.schedule.num_frames))
        self.recv_payload, self.grad_payload = config.dispatch_payload, config.combine_grad_payload
        self.num_scales = plan.num_scales
        dtypes = {region.name: getattr(torch, region.dtype) for region in plan.regions}
        self.recv_scale_dtype: torch.dtype | None = dtypes.get("recv_scales")
        self.stash_rows = plan.num_stash_pages * STASH_PAGE_ROWS
        self.may_refuse_result = config.validate_ids or config.overflow_policy == "error"

    @classmethod
    def allocate(
        cls, plan: Plan, group: Group, kind: str, engine: str, device: torch.device, *, debug: bool = False
    ) -> Generation:  # fmt: skip
        """Allocate, register and map a window. Collective; synchronises.

        Raises:
            NativeError: some rank could not allocate; raised on every rank.
        """
        with torch.inference_mode(False), torch.no_grad():
            return cls.over(plan, group, _WINDOWS[kind](plan.total_bytes, group, device), engine, device, debug=debug)

    @classmethod
    def adopt(
        cls, plan: Plan, group: Group, tensor: torch.Tensor, registration: object, *, debug: bool = False
    ) -> Generation:  # fmt: skip
        """Take a caller's memory, which `check_adoptable` accepts, for kernels of the caller's. Collective."""
        with torch.inference_mode(False), torch.no_grad():
            window = AdoptedWindow(tensor, plan.total_bytes, group.rank, group.size)
            memory = cls.over(plan, group, window, "external", tensor.device, debug=debug)
        memory.registration = tensor if registration is None else registration
        return memory

    @classmethod
    def over(
        cls, plan: Plan, group: Group, window: Window, engine: str, device: torch.device, *, debug: bool
    ) -> Generation:  # fmt: skip
        """Make the memory of a plan in a window. Collective."""
        mover = open_engine(engine, plan, group, window, device)
        memory = cls(plan, group, window, mover, device)
        if debug:
            unrouted_end = plan.capacity_rows if memory.is_external else 0
            memory.debug = Debug(plan, window, memory.region, unrouted_end=unrouted_end)
        if memory.stash_rows:
            memory.region("stash_free").copy_(torch.arange(plan.num_stash_pages, device=device))
        group.barrier()
        return memory

    def region(self, name: str, index: int = 0, lifetime: Lifetime | None = None) -> torch.Tensor:
        """Return the one tensor of a region of this rank; `lifetime` as in `Plan.region`."""
        if self._closed:
            self.require_open(name)
        return self._regions[name, lifetime or self._lifetimes[name]][index]

    def routed(self, frame: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return offs, counts and overflow of a frame: what route writes."""
        if self._closed:
            self.require_open("offs")
        return self._routed[frame]

    def frames_of(self, policy: RecvPolicy) -> frozenset[int] | None:
        """Return the frames of a recv_policy; None: all of them."""
        frames = frozenset(frame for frame, word in enumerate(self.policies) if word == policy)
        return None if len(frames) == len(self.policies) else frames

    def received(self, frame: int, workspace: int) -> Encoded:
        """Return the regions that a dispatch fills: those of its frame or else of its forward workspace.

        Scales of one byte as uint8.
        """
        if self._closed:
            self.require_open("recv_tokens")
        return self._received["frame"][frame] if self.recv_in_frame[frame] else self._received["forward"][workspace]

    def received_regions(self, frame: int) -> list[Region]:
        """Return the regions that dispatches of a frame may fill: its own, or those of all forward workspaces."""
        lifetime: Lifetime = "frame" if self.recv_in_frame[frame] else "forward"
        sets = [frame] if lifetime == "frame" else range(self.plan.schedule.num_workspaces)
        return [r for index in sets for r in self.plan.regions_of(lifetime, index) if r.name in RECEIVED]

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
        return self.region("expert_out").new_empty((num_tokens, self.hidden))

    def lifetime(self, name: str, frame: int) -> Lifetime:
        """Return the lifetime word of a region as a lease of `frame` has it; KeyError if it has none of that name."""
        lifetime = self._lifetimes[name]
        if name in RECEIVED:
            return "frame" if self.recv_in_frame[frame] else "forward"
        if lifetime == "frame" and frame not in self._regions[name, lifetime]:
            raise KeyError(name)
        return lifetime

    def regions_named(self, name: str) -> list[Region]:
        """Return the regions of one name, by index; of the first set that has it."""
        lifetime = self._lifetimes[name]
        return sorted(
            (r for r in self.plan.regions if (r.name, r.lifetime) == (name, lifetime)), key=lambda region: region.index
        )

    def address(self, name: str, index: int = 0) -> int:
        """Return where the plan puts a region in this process."""
        return self._addresses[name][index]

    def address_of(self, region: Region) -> int:
        """Return where a region of the plan lies in this process."""
        return self._base + region.offset

    def covers(self, address: int) -> bool:
        """Tell whether an address lies in this rank's window."""
        return self._base <= address < self._end

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Tell whether some bytes are also this rank's window's."""
        return address < self._end and self._base < address + nbytes

    def window_offset(self, name: str, index: int, lifetime: Lifetime) -> tuple[object, int]:
        """Return (window, bytes from its start)."""
        self.require_open(name)
        return self.registration, self.plan.region(name, index, lifetime).offset

    def packed(self, name: str, index: int, lifetime: Lifetime) -> torch.Tensor:
        """Return a data region and the scales behind it as one uint8 view."""
        data, scales = self.plan.region(name, index, lifetime), _scales_of(self.plan, name, index, lifetime)
        if scales is not None and scales.offset != data.offset + data.nbytes:
            raise ConfigError(
                f"{name} ends at byte {data.offset + data.nbytes} and its scales begin at {scales.offset}: C * row "
                "must be a multiple of 256 bytes for a packed view; choose a capacity that makes it so"
            )
        nbytes = data.nbytes + (scales.nbytes if scales is not None else 0)
        self.require_open(name)
        return self.window.bytes_at(data.offset, nbytes)

    def begin_use(self, lease: Lease, use: Use) -> None:
        """Begin a use of a lease's frame, and of a workspace, by kernels that are not ours; as `Lease.begin` says."""
        marks.begin_use(self, lease, use)

    def end_use(self, lease: Lease, use: Use, total_recv_tokens: torch.Tensor | None) -> None:
        """End a use that `begin_use` began; as `Lease.end` says."""
        marks.end_use(self, lease, use, total_recv_tokens)

    def index_at(self, name: str, tensor: torch.Tensor) -> int:
        """Return which of the regions of a name a tensor is.

        Raises:
            NativeError: none: a compiler handed the op a copy.
        """
        address = tensor.data_ptr()
        for index, found in self._addresses[name].items():
            if found == address:
                return index
        raise _copied(name, tensor)

    def expect(self, name: str, index: int, tensor: torch.Tensor) -> None:
        """Check that a tensor is a region, at the address that the plan gives it.

        Raises:
            NativeError: a compiler handed the op a copy.
        """
        if self._addresses[name][index] != tensor.data_ptr():
            raise _copied(name, tensor)

    def expect_same(self, names: tuple[str, str, str], given: Encoded, wanted: Encoded) -> None:
        """Check that tensors are the regions of rows in a payload, each of those that exist.

        Raises:
            NativeError: a compiler handed the op a copy.
        """
        for name, tensor, region in zip(names, given.parts, wanted.parts, strict=True):
            assert (tensor is None) == (region is None), f"{name}: the plan has it or not"
            if tensor is not None and region is not None and tensor.data_ptr() != region.data_ptr():
                raise _copied(name, tensor)

    def hand_out(self, lease: Lease, debug: Debug) -> None:
        """Poison the frame of a new lease, and look at what nobody may have written; a lease that fails ends.

        Raises:
            NativeError: bytes that belong to nobody were written.
        """
        try:
            self.engine.follow(lease.frame)
            debug.hand_out(HandOut(lease.serial, lease.frame, lease.where), reads=not self.engine.capture_key())
        except BaseException:
            lease.release()
            raise

    def require_open(self, what: str) -> None:
        """Raise LeaseError when the arena is closed, or adopted memory is no longer where it was."""
        if self._closed:
            raise LeaseError(f"{what} was asked of an arena that is closed; open another with Arena.open(plan, group)")
        if self._has_moved:
            raise LeaseError(
                f"{what} was asked of an arena whose adopted memory is gone: its storage was resized or moved since "
                f"{self.where}, so that kernels would write where nothing of ours lies any more; leave it as it is "
                "until close(), and adopt the new memory in another arena"
            )

    @property
    def _has_moved(self) -> bool:
        return isinstance(self.window, AdoptedWindow) and not self.window.is_in_place

    def check(self) -> None:
        """Raise what went wrong on the device and was not raised yet. Reads the device.

        Raises:
            PeerTimeoutError, LeaseError: the memory is poisoned, and by whom.
            NativeError: in debug mode, a replay found bytes written that belong to nobody.
        """
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
        """Note that this rank raises a refusal that it counts, so that `raise_pending` does not raise it again.

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
        if self._has_moved:
            return False  # there is nothing to read; close() must not be refused
        self.require_open("poisoned")
        return bool(self.engine.control().poisoned or self._ranks_that_gave_up())

    def demand_peaks(self) -> list[int]:
        """Return, for each frame, the largest demand that a dispatch so far put on any rank, in rows. One device read.

        Shapes: [num_frames].
        """
        return [int(rows) for rows in demand_peaks(self.region("frame_counters")).tolist()]

    def stash_peak_rows(self) -> int:
        """Return how many rows the pages would hold that were wanted at once, at the most; 0 without. A device read."""
        return int(self.region("stash_counters")[3]) * STASH_PAGE_ROWS if self.stash_rows else 0

    def describe_shortage(self) -> str:
        """Say which of capacity and stash some dispatch so far has exceeded, and by how much. Reads the device."""
        peak, control = max(self.demand_peaks()), self.engine.control()
        found = []
        if peak > self.capacity_rows:
            found.append(f"up to {peak} rows on a rank and recv_capacity_per_rank is {self.capacity_rows}")
        if control.num_stash_overflows:
            found.append(
                f"more rows in the stash of rank {control.stash_rank} than its stash_rows={self.stash_rows} (up to "
                f"{self.stash_peak_rows()} on this rank)"
            )
        return ", and ".join(found)

    def report(self) -> dict[str, Any]:
        """Return what this memory is and who uses it, as plain data. Reads the device."""
        control, graphs = self.engine.control(), self.book.live_graphs()
        peaks = self.demand_peaks()
        return {
            "generation": self.number,
            "where": self.where,
            "capacity_rows": self.capacity_rows,
            "window_bytes": self.plan.total_bytes,
            "num_frames": len(peaks),
            "num_frames_high_water": self.book.num_frames_high_water,
            "demand_peak_rows": max(peaks),
            "stash_rows": self.stash_rows,
            "stash_peak_rows": self.stash_peak_rows(),
            "frames": [{**frame, "demand_peak_rows": peaks[frame["frame"]]} for frame in self.book.frames()],
            "claims": [{"frame": f, "kind": k, "where": w} for f, k, w in self.book.claims()],
            "graphs": [{"where": g.where, "frames": sorted(g.frames)} for g in graphs],
            "bytes_by_class": self.plan.bytes_by_lifetime(),
            **{name: int(getattr(control, name)) for name in EVENTS},
        }

    @property
    def is_closed(self) -> bool:
        """Whether the window was given back, or given up."""
        return self._closed

    @property
    def is_unused(self) -> bool:
        """Whether no graph and no claim needs this memory any more."""
        return not self.book.live_graphs() and not any(self.book.claims())

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

    def abandon(self) -> None:
        """Tell the peers that this rank gives up. The window stays mapped; no barrier."""
        self.engine.abort()
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

    def graphs_after_drain(self) -> list[Graph]:
        """Return the graphs that live; CUDA tells of a graph's death a moment after it, from a thread of its own."""
        graphs = self.book.live_graphs()
        deadline = time.monotonic() + _GRAPH_DEATH_S
        while graphs and not self.engine.synchronous and time.monotonic() < deadline:
            torch.cuda.synchronize(self.device)
            time.sleep(0.01)
            graphs = self.book.live_graphs()
        return graphs

    def let_go(self, is_healthy: bool) -> None:
        """Give the window back, on an unhealthy group only as far as that needs no peer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        _C.handle_drop(self.handle)
        self.engine.close(is_healthy=is_healthy)
        self._regions, self._routed, self._received, self._moved_grads = {}, (), {}, {}
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
        'compiled code, do not return them from it, and use backend="inductor" or eager for this function; let a '
        "checkpoint inside it save epbuf.ops.ROUTE, DISPATCH and COMBINE"
    )
    error.refusal = int(_C.Refusal.COPIED_REGION)
    return error


def arena_of(handle: int) -> Generation:
    """Return the open memory behind a handle.

    Raises:
        LeaseError: it was closed.
    """
    try:
        found: Generation | None = _C.handle_get(handle)()
    except KeyError:
        found = None
    if found is None:
        raise LeaseError("a lease or ticket of an arena that is closed was used; open an arena and acquire again")
    return found


_WINDOWS: dict[str, Any] = {
    "host": HostWindow,
    "local": LocalWindow,
    "torch_symm": TorchSymmWindow,
    "nccl": nccl.NcclWindow,
    "own": OwnWindow,
}


def _make_regions(plan: Plan, window: Window) -> _Tensors:
    """Make one tensor per region; of two declared aliases the smaller is a view of the larger."""
    made: dict[Region, torch.Tensor] = {}
    tensors: _Tensors = {}
    for region in plan.regions:
        owner = _owner(region, plan)
        if owner not in made:
            made[owner] = _make_tensor(owner, window)
        tensor = made[owner] if owner is region else _alias(made[owner], owner, region)
        tensors.setdefault((region.name, region.lifetime), {})[region.index] = tensor
    return tensors


def _owner(region: Region, plan: Plan) -> Region:
    """Return the region whose tensor a region is a view of: itself, or its larger alias (the first of equal ones)."""
    for pair in plan.config.alias:
        if region.name in pair:
            first, second = (plan.region(name, region.index, region.lifetime) for name in pair)
            return first if first.nbytes >= second.nbytes else second
    return region


def _encoded(regions: _Tensors, lifetime: Lifetime, data: str, prefix: str) -> dict[int, Encoded]:
    """Return the regions of rows in one payload, by index; a payload without scales has none of theirs.

    Scales of one byte are bytes here: inductor drops ops that take float8_e8m0fnu
    (torch/_inductor/lowering.py of torch 2.13, unsupported_input_tensor).
    """
    scales, row_scales = regions.get((f"{prefix}scales", lifetime)), regions.get((f"{prefix}row_scales", lifetime))
    return {
        i: Encoded(tensor, as_bytes(scales[i]) if scales else None, row_scales[i] if row_scales else None)
        for i, tensor in regions.get((data, lifetime), {}).items()
    }


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


def _scales_of(plan: Plan, name: str, index: int, lifetime: Lifetime) -> Region | None:
    scales = {"recv_tokens": "recv_scales", "grad_expert_out": "grad_expert_out_scales"}.get(name)
    return next((region for region in plan.regions_of(lifetime, index) if region.name == scales), None)
