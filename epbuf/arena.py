"""An arena: open, acquire, grow, check, report, close.

It is what the user holds. The memory of a plan is a `Generation`; after `grow` there is a newer one besides those that
are still in use.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from types import TracebackType
from typing import Any, cast

import torch
from rich.console import RenderableType

from epbuf import _C
from epbuf.agreement import Offer, agree, check_plan, check_size, offer
from epbuf.engines import check_engine, check_fit
from epbuf.errors import (
    CaptureError,
    ConfigError,
    LeaseError,
    PeerTimeoutError,
)
from epbuf.generation import EVENTS, Generation
from epbuf.growth import check_growth, grown_plan, save_capacity, with_capacity
from epbuf.lease import NO_CLAIM, Lease, caller, read_ticket, refuse_while_recording
from epbuf.plan import Plan, RecvPolicy
from epbuf.report import report_tables
from epbuf.windows import nccl
from epbuf.windows.adopted import check_adoptable
from epbuf.windows.group import AnyGroup, Group, TorchGroup, VirtualRank, as_group

_WINDOWS_BY_DEVICE = {"cpu": ("host", "local", "own"), "cuda": ("nccl", "torch_symm", "local", "own")}


class Arena:
    """Owner of the window of one plan, and after `grow` of the next one's.

    What is not described here is that of the current generation: `plan`, `rank`, `device`, `window`, `book`, ...

    Attributes:
        memory: the current generation.
        window_allocations: allocations and registrations of window memory so far: 1 after `open`, one more a growth.
        window_reason: why this kind of window was taken.
    """

    memory: Generation  # also for an instance that was never initialised: __getattr__ asks for it

    def __init__(self, memory: Generation, group: Group, engine: str, window_reason: str) -> None:
        self.memory = memory
        self.window_allocations = 1
        self.window_reason = window_reason
        self._group = group
        self._engine = engine
        self._older: list[Generation] = []
        self._past = dict.fromkeys(EVENTS, 0)  # of generations that are gone, like the peaks
        self._peak_rows = self._stash_peak_rows = 0
        self._num_growing = 0  # blocks of growing() that are open

    @classmethod
    def open(
        cls, plan: Plan, group: AnyGroup = None, *, device: torch.device | str | None = None, window: str = "auto",
        engine: str = "native", debug: bool = False,
    ) -> Arena:  # fmt: skip
        """Allocate, register and map the window of a plan. With `grow`, the only place that does.

        Collective: every rank of `group` calls it with the same plan. Synchronises.

        With `engine="nccl_ep"` rows are moved by NCCL EP under the same calls; the plan must have been built for it.
        What differs, and what of it was run, is in epbuf/engines/README.md. With `engine="external"` rows are moved by
        kernels of the caller's: `dispatch` and `combine` are refused, and `lease.begin` and `lease.end` mark what those
        kernels use. All else is as for our own.

        With `debug` every acquire() poisons the frame and looks for writes past the last zone and between regions. It
        then reads the device, unless it is captured: what a replay finds is raised by check(). Without, nothing is
        launched for it. Ranks need not agree.

        Raises:
            CaptureError: a graph is being captured.
            ConfigError: the group has another size than the plan; device, window or engine do not fit, or are not the
                same on all ranks; a package that the engine needs is missing. On every rank, which names the one.
            PlanMismatchError: another rank brought another plan; raised on every rank.
            NativeError: some rank could not allocate; raised on every rank.
        """
        _refuse_allocation("Arena.open", "open the arena before the capture and use its leases inside")
        _refuse_inference_mode("Arena.open")
        ranks = as_group(group)
        place, kind, reason = torch.device("cpu"), "", ""

        def check() -> Offer:
            nonlocal place, kind, reason
            check_plan(plan, "Arena.open")
            check_engine(engine)
            place = _device_of(device, ranks)
            check_fit(engine, plan, place)
            kind, reason = _window_kind(window, place, group, engine)
            check_size(plan, ranks)
            return offer(f'Arena.open(engine="{engine}", window="{kind}") on {place.type}', plan)

        agree(ranks, "Arena.open", check)
        return cls(Generation.allocate(plan, ranks, kind, engine, place, debug=debug), ranks, engine, reason)

    @classmethod
    def adopt(
        cls, plan: Plan, tensor: torch.Tensor, group: AnyGroup = None, *, registration: object = None,
        debug: bool = False,
    ) -> Arena:  # fmt: skip
        """Open an arena in memory that the caller has allocated, and registered as its kernels need, on this rank.

        As `open(engine="external")`; nothing is allocated, registered or freed here. The first `plan.total_bytes` of
        the tensor are zeroed. Views keep the tensor's storage alive, as its owner does; deregister it after `close()`.
        A storage that is resized, or moved to shared memory, before that is a LeaseError at the next call.

        Collective, like `open`. Synchronises.

        Args:
            tensor: [n] uint8, contiguous, on cpu or cuda, at a multiple of 256 bytes, n >= plan.total_bytes.
            registration: what stands for the registered memory in the caller's library; `lease.window_of(name)` gives
                it with the region's offset. None: the tensor itself.
            debug: as in `open`.

        Raises:
            CaptureError: a graph is being captured.
            ConfigError: the group has another size than the plan; the tensor does not fit; another arena, or rank of
                this process, lies in it. On every rank, which names the one.
            PlanMismatchError: another rank brought another plan; raised on every rank.
        """
        _refuse_allocation("Arena.adopt", "adopt the memory before the capture and use the arena's leases inside")
        _refuse_inference_mode("Arena.adopt")
        ranks = as_group(group)

        def check() -> Offer:
            check_size(check_plan(plan, "Arena.adopt"), ranks)
            check_fit("external", plan, torch.device("cpu"))
            span = _span_of(plan, tensor)
            _device_of(tensor.device, ranks)
            return offer(f"Arena.adopt on {tensor.device.type}", plan, span)

        agree(ranks, "Arena.adopt", check)
        memory = Generation.adopt(plan, ranks, tensor, registration, debug=debug)
        return cls(memory, ranks, "external", "the caller's own memory")

    def __getattr__(self, name: str) -> Any:
        if name == "memory":
            raise AttributeError(name)
        return getattr(self.memory, name)

    @property
    def generation(self) -> int:
        """Number of the current generation: 0 after `open`, one more after each growth."""
        return self.memory.number

    def acquire(self, frame: int | None = None, *, recv_policy: RecvPolicy | None = None) -> Lease:
        """Take a frame: the lowest free one, or the one that `plan.schedule.frame(...)` names.

        Every rank must take the same frame for the same dispatch. Where layers differ in `recv_policy` a frame has that
        of its layer: name the frame, or the policy, whose lowest free frame is taken then.

        Raises:
            LeaseError: the frame, or every frame (of the policy), is in use; the arena is closed.
            ConfigError: the frame, or every frame, has another recv_policy; policies differ and nothing says which.
            NativeError: in debug mode, bytes of the frame that belong to nobody were written.
        """
        memory = self.memory
        memory.require_open("acquire()")
        if frame is not None and type(frame) is not int:
            raise LeaseError(
                f"acquire(frame=...) takes an int, found {type(frame).__name__}; schedule.frame(layer, microbatch) "
                "gives one"
            )
        if self._older:
            self._free_unused()
        among = _frames_for(memory, frame, recv_policy)
        lease = Lease(memory, memory.book, frame, among, is_routed=not memory.is_external)
        if memory.debug is not None and lease.serial != NO_CLAIM:
            memory.hand_out(lease, memory.debug)
        return lease

    def lease_of(self, ticket: torch.Tensor) -> Lease:
        """Return a released lease of the forward that a ticket belongs to, for its views, and its `begin("backward")`.

        What a backward needs under `torch.utils.checkpoint`: there `ctx` knows the lease of the first pass, which is
        over, and `ctx.saved_tensors` the ticket of the second. Claims nothing: the ticket keeps the frame.

        Args:
            ticket: `lease.ticket`, or what autograd gives back for it.

        Raises:
            ConfigError: no ticket of this arena.
            LeaseError: its forward has ended, or the arena is closed.
        """
        self.require_open("lease_of()")
        memory = next((m for m in self._generations() if _is_ticket(ticket, m.handle)), None)
        if memory is None:
            raise ConfigError(f"lease_of() takes lease.ticket of this arena, found {type(ticket).__name__} of none")
        return Lease.of_ticket(memory, memory.book, memory.book.ticket(read_ticket(ticket)[1]))

    def grow(
        self, plan: Plan, tensor: torch.Tensor | None = None, *, registration: object = None
    ) -> list[str]:  # fmt: skip
        """Go on in new memory, of a plan that has at least as much of everything. Return which graphs are stale now.

        Leases taken from now on have the new memory. The old one stays, for the leases, tickets and graphs that use it,
        until the last of them is gone. A CapturedStep of old memory raises StaleGraphError when it is called; the list
        says where each such graph was captured, which is where to capture again.

        Collective: every rank calls it with the same plan, at the same place between its ops. Synchronises. If it
        raises, nothing has changed.

        Args:
            plan: what to go on with.
            tensor: of an arena that was adopted: the new memory, as in `adopt`. Not the old, which is still in use.
            registration: as in `adopt`.

        Raises:
            CaptureError: a graph is being captured.
            ConfigError: the plan is for other ranks, experts or rows, or has less than the present one; both values are
                named. A tensor is missing, does not fit, or is not wanted.
            PlanMismatchError: another rank brought another plan; raised on every rank.
            NativeError: some rank could not allocate; raised on every rank.
            PeerTimeoutError, LeaseError: the arena is poisoned, or closed.
        """
        instead = "grow between captures, and capture again afterwards"
        self._refuse_while_recording("grow()", instead)
        _refuse_allocation("grow()", instead)
        self._require_healthy("grow()")
        old = self.memory
        brings = tensor is not None or registration is not None
        agree(self._group, "grow()", lambda: _growth_offer(old, plan, tensor, brings=brings))
        check_growth(old.plan, plan)
        is_debugged = old.debug is not None
        if tensor is not None:
            fresh = Generation.adopt(plan, self._group, tensor, registration, debug=is_debugged)
        else:
            fresh = Generation.allocate(plan, self._group, old.window.kind, self._engine, old.device, debug=is_debugged)
        fresh.number, fresh.grower = old.number + 1, old.grower
        self._older.append(old)
        self.memory = fresh
        self.window_allocations += 1
        stale = [graph.where for memory in self._older for graph in memory.book.live_graphs()]
        self.free_unused()
        return stale

    def grow_to_peak(self) -> list[str]:
        """Grow to the largest demand that any dispatch so far has had, if that is more than C; as `grow`. Collective.

        So does the stash, to the most rows whose pages were wanted at once. Reads the device.
        """
        with torch.no_grad():
            found = self._group.all_gather((self.demand_peak_rows(), self.stash_peak_rows()))
        rows, stash_rows = (max(peaks) for peaks in zip(*found, strict=True))
        if rows <= self.capacity_rows and stash_rows <= self.memory.stash_rows:
            return []
        if self.memory.window.kind == "adopted":
            raise ConfigError(
                f"grow_to_peak() needs memory for {rows} rows, and this arena lies in the caller's: build a plan with "
                f"recv_capacity_per_rank={with_capacity(self.plan.config, rows).recv_capacity_per_rank} and call "
                "grow(plan, tensor)"
            )
        return self.grow(grown_plan(self.plan, max(rows, self.capacity_rows), stash_rows))

    @contextmanager
    def growing(self) -> Iterator[None]:
        """Let eager dispatches grow the arena when they need more rows than it has, before any row moves.

        Each dispatch reads its demand once (a synchronisation on CUDA). All ranks know it from the same counts, so all
        grow at the same dispatch, and its lease goes on in the new memory: look at regions of a lease after dispatch,
        not before. Then `plan.capacity_rows` is what the step needs. Compiled code cannot grow and raises
        CapacityError.

        Blocks may lie in one another and may overlap: growth ends with the last. Collective: every rank runs its ops
        inside, or none does.

        Raises:
            CaptureError: a graph is being captured.
            ConfigError: an arena of engine="external", which has no dispatch.
        """
        self.require_ops("growing()")
        self._refuse_while_recording("growing()", "run the step eagerly, outside the capture, and capture it then")
        self._require_healthy("growing()")
        self._num_growing += 1
        for memory in self._generations():
            memory.grower = self._make_room
        try:
            yield
        finally:
            self._num_growing -= 1
            for memory in self._generations() if self._num_growing == 0 else ():
                memory.grower = None

    def require_ops(self, call: str) -> None:
        """Refuse a call that lets dispatch grow the arena, where kernels that are not ours dispatch.

        Raises:
            ConfigError: engine="external".
        """
        if self.memory.is_external:
            raise ConfigError(
                f'{call} lets dispatch grow the arena, and with engine="external" the caller\'s kernels dispatch: give '
                "their demand to lease.end(total_recv_tokens=...), and call grow(plan) or grow_to_peak() between steps"
            )

    def save_capacity(self, path: str | PathLike[str]) -> None:
        """Write the capacity of this arena to a JSON file, for `epbuf.growth.load_capacity`. Local: one rank calls it.

        Raises:
            CaptureError: called while capturing.
        """
        self._refuse_while_recording("save_capacity()", "call it after the capture")
        self.require_open("save_capacity()")
        save_capacity(path, self.plan, self.demand_peak_rows())

    def check(self) -> None:
        """Raise what went wrong on the device and was not raised yet. Reads the device.

        Raises:
            CaptureError: called while capturing.
            PeerTimeoutError, LeaseError: the arena is poisoned, and by whom.
        """
        self._refuse_while_recording("check()", "call it after the capture, or after a replay")
        self._require_healthy("check()")

    @property
    def poisoned(self) -> bool:
        """Tell whether a wait failed, here or on a peer. Reads the device; LeaseError once the arena is closed."""
        return any(memory.poisoned for memory in self._generations())

    def barrier(self) -> None:
        """Wait on the host for every rank of the group. Collective."""
        self._group.barrier()

    def demand_peak_rows(self) -> int:
        """Return the largest demand that a dispatch so far put on any rank, in rows. Reads the device."""
        return max(self._peak_rows, *(max(memory.demand_peaks()) for memory in self._generations()))

    def stash_peak_rows(self) -> int:
        """Return the most rows that pages of this rank were wanted for at once, in whole pages. Reads the device.

        The largest of all ranks is what to give `Plan.build(stash_rows=)`. 0 without a stash.
        """
        return max(self._stash_peak_rows, *(memory.stash_peak_rows() for memory in self._generations()))

    def report(self) -> dict[str, Any]:
        """Return what the arena holds and what it has done, as plain data that JSON can carry. Reads the device.

        First comes what the current generation is; counts of events, staged bytes and the demand peak are those of the
        arena since it was opened. `claims` and `graphs` are those of all generations, each with its
        number; `generations` lists every one that still has memory, oldest first.

        Raises:
            CaptureError: called while capturing.
        """
        self._refuse_while_recording("report()", "call it after the capture")
        self.require_open("report()")
        if self._older:
            self._free_unused()
        parts = [memory.report() for memory in self._generations()]
        return {
            "rank": self.rank,
            "engine": self._engine,
            "window": self.window.kind,
            "window_reason": self.window_reason,
            "window_allocations": self.window_allocations,
            **parts[-1],
            **{name: past + sum(part[name] for part in parts) for name, past in self._past.items()},
            "demand_peak_rows": max(self._peak_rows, *(part["demand_peak_rows"] for part in parts)),
            "stash_peak_rows": max(self._stash_peak_rows, *(part["stash_peak_rows"] for part in parts)),
            "claims": [{"generation": p["generation"], **claim} for p in parts for claim in p["claims"]],
            "graphs": [
                {"generation": p["generation"], "is_stale": p is not parts[-1], **graph}
                for p in parts for graph in p["graphs"]
            ],
            "generations": parts,
        }  # fmt: skip

    def report_table(self) -> RenderableType:
        """Return the report as a `rich` renderable: `rich.print(arena.report_table())`."""
        return report_tables(self.report())

    def close(self) -> None:
        """Give the window back. Idempotent.

        Collective, except on a poisoned arena, where it is local. Views handed out before are dead afterwards.

        Raises:
            CaptureError: called while capturing.
            LeaseError: graphs that hold the memory are alive; they are listed.
        """
        if self.is_closed:
            return
        self._refuse_while_recording("close()", "close the arena after the capture, when its graphs are gone")
        graphs = [graph for memory in self._generations() for graph in memory.graphs_after_drain()]
        if graphs:
            places = "\n".join(f"  captured at {g.where}, frames {sorted(g.frames)}" for g in graphs)
            raise LeaseError(f"close() while {len(graphs)} graph(s) hold this memory:\n{places}\nDrop them first")
        is_healthy = not self.poisoned
        try:
            if is_healthy:
                self._group.barrier(self.plan.config.timeout_s)
            else:
                self._abort()  # peers that were not told yet must not wait for this rank in their close()
        except Exception as error:
            is_healthy = False
            raise PeerTimeoutError(
                f"rank {self.rank} closed its arena and a peer did not come: it died or left its group ({error}). "
                "The arena is closed on this rank"
            ) from error
        finally:
            for memory in self._generations():
                memory.let_go(is_healthy)
            self._older = []

    def free_unused(self) -> None:
        """Free old generations that no rank uses any more. Collective; on CUDA synchronises.

        On CPU each rank frees its own as soon as it may: a mapping of a peer's lives by itself.
        """
        if self.memory.engine.synchronous:
            self._free_unused()
        elif self._older:
            mine = {memory.number for memory in self._older if not memory.graphs_after_drain() and memory.is_unused}
            self._let_go_of(set.intersection(*self._group.all_gather(mine)))

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self.is_closed:
            for memory in self._generations():
                memory.abandon()
            warnings.warn(
                f"rank {self.rank} leaves its arena by {type(error).__name__}: peers are told, the window is not "
                "unmapped and there is no barrier",
                ResourceWarning,
                stacklevel=2,
            )

    def _generations(self) -> list[Generation]:
        return [*self._older, self.memory]

    def _refuse_while_recording(self, call: str, instead: str) -> None:
        for memory in self._generations():
            refuse_while_recording(memory.book, call, instead)

    def _require_healthy(self, call: str) -> None:
        self.require_open(call)
        for memory in self._generations():
            memory.check()

    def _abort(self) -> None:
        for memory in self._generations():
            memory.engine.abort()

    def _make_room(self, lease: Lease, num_rows: int) -> None:
        """Leave a lease whose dispatch needs `num_rows` in memory that may have them: the newest, or newer. Collective.

        Ranks that run ops on several streams may have seen other peaks, so all take the largest.
        """
        if lease.arena is self.memory:
            self.grow_to_peak()
            assert num_rows <= self.memory.capacity_rows, "the demand that overflowed is among the peaks"
        else:
            self._group.barrier()  # a route that no dispatch follows: all have read its counts before anyone goes on
        old = cast(Generation, lease.arena)
        lease.move(self.memory, self.memory.book, self.memory.frames_of(old.policies[lease.frame]))
        if self.memory.debug is not None:
            self.memory.hand_out(lease, self.memory.debug)

    def _free_unused(self) -> None:
        if self.memory.engine.synchronous:
            self._let_go_of({memory.number for memory in self._older if memory.is_unused})

    def _let_go_of(self, numbers: set[int]) -> None:
        for memory in [memory for memory in self._older if memory.number in numbers]:
            gone = memory.report()
            self._peak_rows = max(self._peak_rows, gone["demand_peak_rows"])
            self._stash_peak_rows = max(self._stash_peak_rows, gone["stash_peak_rows"])
            self._past = {name: past + gone[name] for name, past in self._past.items()}
            memory.let_go(is_healthy=True)
            self._older.remove(memory)


def _is_ticket(ticket: object, handle: int) -> bool:
    if not isinstance(ticket, torch.Tensor) or (ticket.dtype, ticket.shape) != (torch.uint8, (8,)):
        return False
    return ticket.device.type == "cpu" and ticket.is_contiguous() and read_ticket(ticket)[0] == handle


def _frames_for(memory: Generation, frame: int | None, recv_policy: RecvPolicy | None) -> frozenset[int] | None:
    """Return the frames that an acquire may take when it names none; None: all.

    Raises:
        ConfigError: no frame has the policy that was asked for, or not the frame that was named, or nothing says which.
    """
    policies = memory.policies
    if frame is not None and not 0 <= frame < len(policies):
        return None  # the book says that there is no such frame
    if recv_policy is None:
        if frame is None and len(set(policies)) > 1:
            raise ConfigError(
                f"acquire(): frames of this plan differ in recv_policy ({_counted(policies)}); pass the frame that "
                "plan.schedule.frame(layer, microbatch) names, or recv_policy="
            )
        return None
    of_policy = memory.frames_of(recv_policy)
    found = _counted(policies) if frame is None else repr(policies[frame])
    if (of_policy == frozenset()) or (frame is not None and of_policy is not None and frame not in of_policy):
        asked = f"frame={frame}, recv_policy={recv_policy!r}" if frame is not None else f"recv_policy={recv_policy!r}"
        raise ConfigError(
            f"acquire({asked}): the plan was built with {found}, which sizes its regions; give Plan.build the policy "
            "that the layers use"
        )
    return of_policy


def _counted(policies: Sequence[RecvPolicy]) -> str:
    """Spell policies of frames: how many frames have each, or the one that all have."""
    words = list(dict.fromkeys(policies))
    if len(words) == 1:
        return repr(words[0])
    return ", ".join(f"{word!r} for {policies.count(word)} frame(s)" for word in words)


def _refuse_allocation(call: str, instead: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{call} at {caller()} allocates and registers memory, which cannot be captured: {instead}"
        )  # fmt: skip
    for reference in _C.handle_objects():
        memory = reference()
        recording = memory.book.recording if memory is not None else None
        if recording is not None and recording.is_mine():
            raise CaptureError(
                f"{call} at {caller()} allocates and registers memory, which cannot be captured (capture began at "
                f"{recording.where}): {instead}"
            )


def _refuse_inference_mode(call: str) -> None:
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            f"{call} at {caller()} is inside torch.inference_mode: tensors made there can never be saved for "
            "backward. Open the arena outside; its leases, dispatch and combine work inside"
        )


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


def _window_kind(word: str, device: torch.device, group: AnyGroup, engine: str) -> tuple[str, str]:
    """Choose the kind of window: the word, or the default of the device, group and engine. Return it and why.

    Raises:
        ConfigError: the word does not exist, or not for this device and group.
    """
    one_process = group is None or isinstance(group, VirtualRank)
    if engine == "nccl_ep":
        if word not in ("auto", "own") or one_process:
            found = "ranks of one process" if one_process else f'window="{word}"'
            raise ConfigError(
                f'engine="nccl_ep" found {found}; it takes a process group, and "auto" or "own": the library registers '
                "buffers of its own"
            )
        return "own", "the library registers buffers of its own"
    if word == "own" and engine == "native":
        raise ConfigError('window="own" has no addresses of peers, which engine="native" needs; take "auto"')
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


def _span_of(plan: Plan, tensor: object) -> tuple[int, int]:
    """Return first byte and end of the window in a caller's tensor, which must be fit for it and in no arena's use."""
    start = check_adoptable(tensor, plan.total_bytes).data_ptr()
    _check_unused(start, plan.total_bytes)
    return start, start + plan.total_bytes


def _check_unused(address: int, nbytes: int) -> None:
    """Refuse memory that an open arena of this process lies in."""
    for reference in _C.handle_objects():
        memory: Generation | None = reference()
        if memory is not None and memory.overlaps(address, nbytes):
            raise ConfigError(
                f"adopt() was given memory at {address:#x} in which the arena opened at {memory.where} lies; "
                "close that one first, or pass other memory"
            )


def _growth_offer(old: Generation, plan: Plan, tensor: torch.Tensor | None, *, brings: bool) -> Offer:
    """Check what this rank brings to grow(): a plan, and memory just where the arena lies in the caller's."""
    check_plan(plan, "grow()")
    how = f'grow() of a window "{old.window.kind}" on {old.device.type}'
    if old.window.kind == "adopted":
        span = _span_of(plan, tensor)
        if tensor is not None and tensor.device != old.device:
            raise ConfigError(
                f"grow() was given memory on {tensor.device} and the arena lies on {old.device}; allocate it there"
            )
        return offer(how, plan, span)
    if brings:
        raise ConfigError(
            "grow(plan, tensor) is for arenas that were adopted; this one has a window of its own "
            f'("{old.window.kind}") and allocates the next: call grow(plan)'
        )
    return offer(how, plan)
