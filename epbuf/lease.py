"""Claims on frames and workspaces, and which graphs hold which memory.

A frame is busy while a claim on it lives: the `Lease`, or a ticket that `Received` and autograd keep.
Claims end when their object dies, so a finaliser may run in any thread at any moment: it only appends the claim's
number to a queue, and the book applies the queue at its next call.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn, Protocol, cast

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode

from epbuf.errors import CaptureError, LeaseError
from epbuf.plan import Lifetime

Direction = Literal["forward", "backward"]
Use = Literal["frame", "forward", "backward"]
Phase = Literal["warm up", "record", "replay"]

_WORD = struct.Struct("=Q")  # of a ticket
_OURS = ("epbuf", "torch", "contextlib", "weakref")
NO_FRAME, NO_CLAIM = -1, 0  # of a lease that learns in dispatch which frame it has


class Regions(Protocol):
    """What a lease needs of its arena."""

    def region(self, name: str, index: int, lifetime: Lifetime) -> torch.Tensor:
        """Return the one tensor of a region."""

    def window_offset(self, name: str, index: int, lifetime: Lifetime) -> tuple[object, int]:
        """Return (window, bytes from its start)."""

    def lifetime(self, name: str, frame: int) -> Lifetime:
        """Return the lifetime word of a region as a lease of a frame has it, or raise KeyError."""

    def packed(self, name: str, index: int, lifetime: Lifetime) -> torch.Tensor:
        """Return a data region and the scales behind it as one uint8 tensor."""

    def begin_use(self, lease: Lease, use: Use) -> None:
        """Begin a use by kernels that are not ours."""

    def end_use(self, lease: Lease, use: Use, total_recv_tokens: torch.Tensor | None) -> None:
        """End it."""


class Captures(Protocol):
    """What the book needs of the engine to see captures that others began."""

    def capture_key(self) -> int:
        """Return the id of the current stream's capture, 0 outside."""

    def hold(self) -> Callable[[], bool]:
        """Add a hold to the graph being captured; return what tells whether any graph still has it."""


@dataclass
class Graph:
    """A captured graph that may touch the window.

    `key` is opaque: the capture id of a CUDA stream, or an object of our own on CPU.
    """

    key: Hashable
    where: str
    alive: Callable[[], bool]
    frames: set[int] = field(default_factory=set)
    thread: int = field(default_factory=threading.get_ident)
    acquired: list[int] = field(default_factory=list)
    phase: Phase = "record"
    flags: dict[int, torch.Tensor] = field(default_factory=dict)  # arena handle -> [num_frames] float32
    _replayed: int | None = None

    def begin(self, phase: Phase) -> None:
        """Start a run of the step: recording notes the frames that are acquired, a replay takes the same."""
        self.phase = phase
        self.thread = threading.get_ident()
        self._replayed = 0 if phase == "replay" else None
        if phase == "record":
            self.acquired = []

    def next_frame(self, asked: int | None) -> int | None:
        """Return the frame to take: in a replay the recorded one, whatever else happens to be free."""
        if self._replayed is None or self._replayed >= len(self.acquired):
            return asked
        self._replayed += 1
        return self.acquired[self._replayed - 1]

    def note(self, frame: int) -> None:
        """Remember a frame that was acquired, for replays; a replay adds none."""
        if self._replayed is None:
            self.acquired.append(frame)

    def is_mine(self) -> bool:
        """Tell whether the calling thread began the capture."""
        return self.thread == threading.get_ident()


@dataclass(slots=True)
class Ticket:
    """One dispatch, from its route until the last tensor that remembers it is gone."""

    serial: int
    frame: int
    lease: int
    num_tokens: int
    recorded_in: Hashable | None
    num_rows: int  # rows that expert_out may have besides C: those of Received.trim()
    overflowed: tuple[int, int] | None = None  # (rank, rows) of the largest demand, when over capacity
    bad_id: tuple[int, int, int] | None = None  # (rank, token, value) of the first id >= E
    filled: bool = False  # its rows have been moved
    combined: bool = False
    decoded: bool = False  # its rows have been decoded, since somebody cleared this
    returned: bool = False  # its first dispatch backward has run
    outstayed: bool = False  # it has been waited for, and is kept by somebody
    workspace: int = -1  # the forward workspace of the dispatch
    full_stash: int = -1  # the lowest rank that had too few pages of the stash
    weights_version: int | None = None  # of recv_topk_weights when combine read it
    versions: tuple[int, ...] = ()  # of the regions that it filled, where they are filled again for the backward
    control: torch.Tensor | None = None  # region control before the round, where the host reads what the round adds


@dataclass(slots=True)
class _Claim:
    serial: int
    kind: Literal["lease", "ticket"]
    where: str


@dataclass(slots=True)
class _Frame:
    index: int
    claims: dict[int, _Claim] = field(default_factory=dict)
    lease: int = 0
    dispatched: bool = False
    dispatched_by: Hashable | None = None  # the captured step that runs, if one does
    workspace: dict[Direction, int | None] = field(default_factory=lambda: {"forward": None, "backward": None})
    reserved_by: set[Hashable] = field(default_factory=set)
    uses: set[Use] = field(default_factory=set)  # by kernels that are not ours, begun and not ended


class LeaseBook:
    """Who uses which frame and workspace of one arena. Host state only; nothing that a replay needs."""

    def __init__(
        self, handle: int, num_frames: int, num_workspaces: int, captures: Captures | None = None, patience_s: float = 0
    ) -> None:  # fmt: skip
        self.handle = handle
        self._patience_s = patience_s
        self.graphs: dict[Hashable, Graph] = {}
        self._captures = captures
        self._guard: Graph | None = None
        self.num_frames_high_water = 0
        self._frames = [_Frame(index) for index in range(num_frames)]
        self._num_busy = 0
        self._owners: dict[int, _Frame] = {}  # of living claims
        self._num_workspaces = num_workspaces
        self._taken: dict[Direction, list[bool]] = {d: [False] * num_workspaces for d in ("forward", "backward")}
        self._tickets: dict[int, Ticket] = {}
        self._ended: deque[int] = deque()
        self._with_pages: set[int] = set()  # frames whose last eager dispatch took pages of the stash
        self._serial = 0
        self._lock = threading.RLock()

    def acquire(self, frame: int | None, where: str, among: Collection[int] | None = None) -> tuple[int, int]:
        """Claim a frame: the lowest free one, or the one named. Return (frame, serial of the claim).

        Args:
            among: frames that may be taken when none is named; None: all.

        Raises:
            LeaseError: no such frame, or busy.
        """
        self._await_returned(frame, among)
        with self._lock:
            self._apply_ended()
            graph = self._guard
            if graph is not None:
                frame = graph.next_frame(frame)
            chosen = self._free_frame(among) if frame is None else self._named_frame(frame)
            if graph is not None:
                graph.note(chosen.index)
            serial = self._claim(chosen, "lease", where)
            chosen.lease, chosen.dispatched = serial, False
            chosen.uses.clear()
            self.num_frames_high_water = max(self.num_frames_high_water, self._num_busy)
            return chosen.index, serial

    def acquire_like(self, frame: int, where: str, among: Collection[int] | None = None) -> tuple[int, int]:
        """Claim the frame of that number if it is free, else the lowest free one; as `acquire` otherwise."""
        with self._lock:
            self._apply_ended()
            is_free = frame < len(self._frames) and not self._is_busy(self._frames[frame])
            return self.acquire(frame if is_free else None, where, among)

    def end(self, serial: int) -> None:
        """End a claim; ending it twice is harmless."""
        self._ended.append(serial)
        with self._lock:
            self._apply_ended()

    def end_later(self, serial: int) -> None:
        """End a claim from a finaliser: no lock is taken."""
        self._ended.append(serial)

    def holds_frame(self, frame: int, lease: int) -> bool:
        """Tell whether the lease or a ticket of its dispatch still keeps the frame."""
        self._catch_up()
        return self._frames[frame].lease == lease and bool(self._frames[frame].claims)

    def is_live_lease(self, frame: int, lease: int) -> bool:
        """Tell whether the lease itself still claims the frame."""
        self._catch_up()
        return lease in self._frames[frame].claims

    def open_ticket(
        self, frame: int, lease: int, num_tokens: int, capacity_rows: int, graph: Graph | None
    ) -> Ticket:  # fmt: skip
        """Claim the frame once more, for the dispatch that begins and that `graph` records, if any does."""
        with self._lock:
            state = self._frames[frame]
            state.dispatched = True
            state.dispatched_by = self._guard.key if self._guard is not None else None
            serial = self._claim(state, "ticket", state.claims[lease].where)
            recorded_in = graph.key if graph is not None else None
            ticket = Ticket(serial, frame, lease, num_tokens, recorded_in, num_rows=capacity_rows)
            self._tickets[serial] = ticket
            return ticket

    def ticket(self, serial: int) -> Ticket:
        """Return a live ticket.

        Raises:
            LeaseError: it ended, so its frame may belong to somebody else.
        """
        self._catch_up()
        found = self._tickets.get(serial)
        if found is None:
            raise LeaseError(
                f"ticket {serial} has ended: the dispatch it belongs to failed or its arena was reset; dispatch again"
            )
        return found

    def cancel_ticket(self, ticket: Ticket) -> None:
        """Undo a dispatch that failed on every rank: its lease may dispatch again."""
        with self._lock:
            self.end_workspace(ticket.frame, "forward")
            self.end(ticket.serial)
            self._frames[ticket.frame].dispatched = False

    def may_dispatch(self, frame: int, lease: int) -> bool:
        """Tell whether the lease itself still claims the frame and has not dispatched."""
        self._catch_up()
        state = self._frames[frame]
        return lease in state.claims and not state.dispatched

    def claim_workspace(self, frame: int, direction: Direction, index: int | None = None) -> int:
        """Claim a workspace for a frame: the one it has already, else `index`, else the lowest free one.

        Raises:
            LeaseError: other frames have them all.
        """
        with self._lock:
            self._apply_ended()
            held = self._frames[frame].workspace[direction]
            if held is not None:
                return held
            chosen = self._free_workspace(direction, index)
            if chosen is None:
                raise LeaseError(self._no_workspace(frame, direction))
            self._frames[frame].workspace[direction] = chosen
            self._taken[direction][chosen] = True
            return chosen

    def workspace(self, frame: int, direction: Direction) -> int | None:
        """Return the workspace that a frame has claimed."""
        self._catch_up()
        return self._frames[frame].workspace[direction]

    def next_workspace(self, frame: int, direction: Direction) -> int:
        """Return the workspace that `claim_workspace` would give a frame; 0 when none is free."""
        with self._lock:
            self._apply_ended()
            held = self._frames[frame].workspace[direction]
            return held if held is not None else self._free_workspace(direction, None) or 0

    def end_workspace(self, frame: int, direction: Direction) -> None:
        """Give a frame's workspace back to its set."""
        with self._lock:
            held = self._frames[frame].workspace[direction]
            if held is not None:
                self._frames[frame].workspace[direction] = None
                self._taken[direction][held] = False

    def begin_use(self, frame: int, lease: int, use: Use) -> Ticket | None:
        """Begin a use of a frame by kernels that are not ours, and claim its workspace; `end_use` ends both.

        Returns the ticket of the lease's forward, if that has begun before.

        Raises:
            LeaseError: out of order, begun already, after the lease's end, or no workspace is free.
        """
        with self._lock:
            self._apply_ended()
            state = self._frames[frame]
            ticket = self._ticket_of(state) if state.lease == lease else None
            self._check_use(state, lease, use, ticket)
            if use != "frame":
                self.claim_workspace(frame, use)
            state.uses.add(use)
            return ticket

    def end_use(self, frame: int, lease: int, use: Use) -> Ticket | None:
        """End a use; return the ticket of the lease's forward.

        Raises:
            LeaseError: it has not begun, or its lease and ticket have ended.
        """
        with self._lock:
            self._apply_ended()
            state = self._frames[frame]
            if state.lease != lease or use not in state.uses:
                raise LeaseError(
                    f'end("{use}") on frame {frame} and no such use has begun there for this lease: call '
                    f'lease.begin("{use}") before the kernels, once for each end'
                )
            state.uses.discard(use)
            if use != "frame":
                self.end_workspace(frame, use)
            return self._ticket_of(state)

    @property
    def recording(self) -> Graph | None:
        """The graph that ops issued now belong to: whatever the stream captures, else what `recording_into` named."""
        return self._recording(None)

    def touch(self, frame: int, recorded_in: Hashable | None = None, capture: int | None = None) -> Graph | None:
        """Note that an op of `frame` is issued: while a graph records, the graph then holds the memory. Return it.

        An op whose lease was recorded in another graph reserves the frame for both graphs until they die. `capture`:
        that of the current stream, by who has asked already.
        """
        graph = self._recording(frame, capture)
        if graph is None or graph.phase == "warm up":
            return graph
        with self._lock:
            self.graphs[graph.key] = graph
            graph.frames.add(frame)
            if recorded_in is not None and recorded_in != graph.key:
                self._frames[frame].reserved_by |= {recorded_in, graph.key}
        return graph

    def crosses(self, ticket: Ticket | None) -> bool:
        """Tell whether an op issued now is recorded into another graph than its dispatch, whose replay it then needs.

        Not while a step warms up: it repeats its backward without that dispatch, and a replay will not.
        """
        return self._crosses(ticket, is_warm=False)

    def rehearses(self, ticket: Ticket | None) -> bool:
        """Tell whether a step warms up a backward whose dispatch is another graph's: what it needs must stay as it is.

        Otherwise the first replay, or the record that a CPU runs, would find that the dispatch has had its backward.
        """
        return self._crosses(ticket, is_warm=True)

    def _crosses(self, ticket: Ticket | None, *, is_warm: bool) -> bool:
        recorded_in = ticket.recorded_in if ticket is not None else None
        graph = self.recording if recorded_in is not None else None
        return graph is not None and recorded_in != graph.key and (graph.phase == "warm up") == is_warm

    @contextmanager
    def recording_into(self, graph: Graph) -> Iterator[None]:
        """Let ops issued inside count as recorded into `graph`.

        Each run of a step repeats the dispatch of a lease that was opened outside it.
        """
        for frame in self._frames:
            if frame.dispatched_by == graph.key:
                frame.dispatched = False
        self._guard = graph
        try:
            yield
        finally:
            self._guard = None

    def note_overflow(self, frame: int, overflow: torch.Tensor) -> None:
        """Add what a dispatch flagged to the flags of the step that runs, if one does, in stream order.

        One flag a frame: dispatches of one frame are ordered, those of two may run side by side on two streams.
        """
        flags = self._guard.flags.get(self.handle) if self._guard is not None else None
        if flags is not None:
            flag = flags[frame]
            torch.maximum(flag, overflow[0], out=flag)

    def live_graphs(self) -> list[Graph]:
        """Return the graphs that still hold memory of the arena."""
        with self._lock:
            self._forget_dead_graphs()
            return list(self.graphs.values())

    def take_pages(self, frame: int) -> list[int]:
        """Note that an eager dispatch of a frame takes pages; return the frames whose pages nobody can want any more.

        Their backward has not run, and no claim, reservation or graph has them.
        """
        with self._lock:
            self._apply_ended()
            self._forget_dead_graphs()
            held = {index for graph in self.graphs.values() for index in graph.frames}
            free = [index for index in self._with_pages - held if not self._is_busy(self._frames[index])]
            self._with_pages.difference_update(free)
            self._with_pages.add(frame)
            return sorted(free)

    def end_pages(self, frame: int) -> None:
        """Note that a frame has returned its pages."""
        self._with_pages.discard(frame)

    def claims(self) -> Iterator[tuple[int, str, str]]:
        """Yield (frame, kind, place in the user's code) of every living claim."""
        with self._lock:
            self._apply_ended()
            found = [(f.index, c.kind, c.where) for f in self._frames for c in f.claims.values()]
        yield from found

    def frames(self) -> list[dict[str, Any]]:
        """Describe every frame as plain data: who claims it since where, its workspaces, which graphs hold it."""
        with self._lock:
            self._apply_ended()
            self._forget_dead_graphs()
            return [
                {
                    "frame": frame.index,
                    "claims": [{"kind": claim.kind, "where": claim.where} for claim in frame.claims.values()],
                    "workspaces": dict(frame.workspace),
                    "held_by": [graph.where for graph in self.graphs.values() if frame.index in graph.frames],
                    "reserved_by": sorted(self.graphs[k].where for k in frame.reserved_by if k in self.graphs),
                }
                for frame in self._frames
            ]

    def newest_serial(self) -> int:
        """Return the number of the youngest claim; later claims have larger ones."""
        return self._serial

    def claims_since(self, serial: int) -> list[str]:
        """Describe living claims made after `serial` was the youngest, but for tickets of older leases."""
        with self._lock:
            self._apply_ended()
            young = [(f.index, c) for f in self._frames for c in f.claims.values() if min(c.serial, f.lease) > serial]
        return [f"{claim.kind} on frame {frame} from {claim.where}" for frame, claim in young]

    def _recording(self, frame: int | None, key: int | None = None) -> Graph | None:
        if key is None:
            key = self._captures.capture_key() if self._captures is not None else 0
        if not key:
            return self._guard
        with self._lock:
            if key not in self.graphs and self._captures is not None:
                self.graphs[key] = Graph(key, caller() or self._backward_of(frame), self._captures.hold())
            return self.graphs[key]

    def _backward_of(self, frame: int | None) -> str:
        """Name a capture that begins where no line of the user's calls: in autograd's thread."""
        claims = [] if frame is None else list(self._frames[frame].claims.values())
        return f"{claims[0].where} (a backward of the lease acquired there)" if claims else "a backward pass"

    def _ticket_of(self, frame: _Frame) -> Ticket | None:
        """Return the youngest ticket of a frame's lease."""
        found = [t for s in frame.claims if (t := self._tickets.get(s)) is not None and t.lease == frame.lease]
        return max(found, key=lambda ticket: ticket.serial, default=None)

    def _check_use(self, frame: _Frame, lease: int, use: Use, ticket: Ticket | None) -> None:
        asked = f'begin("{use}") on frame {frame.index}'
        if frame.lease != lease or not frame.claims:
            raise LeaseError(
                f"{asked} by a lease that has ended with nothing left that keeps the frame; acquire another, or keep "
                "lease.ticket until the last use"
            )
        if use in frame.uses:
            raise LeaseError(f'{asked} was called before and not ended; call lease.end("{use}") after the kernels')
        if use == "forward" and (frame.dispatched or lease not in frame.claims):
            found = "its lease was released" if lease not in frame.claims else "its lease has had its forward"
            raise LeaseError(f"{asked}, and {found}: one forward per lease; acquire another")
        if use == "backward" and ticket is None:
            raise LeaseError(
                f'{asked}, and the forward of its lease has not begun, or its ticket is gone: call begin("forward") '
                "first, and keep lease.ticket, for example with ctx.save_for_backward, until the backward"
            )

    def _claim(self, frame: _Frame, kind: Literal["lease", "ticket"], where: str) -> int:
        self._serial += 1
        if not frame.claims:
            self._num_busy += 1
        frame.claims[self._serial] = _Claim(self._serial, kind, where)
        self._owners[self._serial] = frame
        return self._serial

    def _catch_up(self) -> None:
        """Apply ended claims; what then reads a single field needs no lock."""
        if self._ended:
            with self._lock:
                self._apply_ended()

    def _apply_ended(self) -> None:
        while self._ended:
            serial = self._ended.popleft()
            self._tickets.pop(serial, None)
            frame = self._owners.pop(serial, None)
            if frame is None:
                continue
            del frame.claims[serial]
            if not frame.claims:
                self._num_busy -= 1
                frame.uses.clear()
                self.end_workspace(frame.index, "forward")
                self.end_workspace(frame.index, "backward")

    def _free_workspace(self, direction: Direction, index: int | None) -> int | None:
        taken = self._taken[direction]
        if index is not None:
            return None if taken[index] else index
        return taken.index(False) if False in taken else None

    def _forget_dead_graphs(self) -> None:
        dead = [key for key, graph in self.graphs.items() if not graph.alive()]
        for key in dead:
            del self.graphs[key]
        if dead:
            for frame in self._frames:
                frame.reserved_by.difference_update(dead)

    def _await_returned(self, frame: int | None, among: Collection[int] | None) -> None:
        """Wait a moment for tickets whose backward has returned, where they decide which frame is taken.

        On CUDA the thread that ran a backward drops its last node, and the ticket with it, a moment after the backward
        has returned to the caller. Ranks must not differ in whether they see that. Each ticket is waited for once.
        """
        deadline = time.monotonic() + self._patience_s
        while self._patience_s and (tickets := self._returned(self._candidates(among if frame is None else [frame]))):
            if time.monotonic() >= deadline:
                for ticket in tickets:
                    ticket.outstayed = True
                return
            time.sleep(0.0005)

    def _candidates(self, among: Collection[int] | None) -> list[_Frame]:
        """List the frames of those numbers, from the lowest; None: all. Numbers that do not exist have none."""
        return self._frames if among is None else [frame for frame in self._frames if frame.index in among]

    def _returned(self, frames: list[_Frame]) -> list[Ticket]:
        """List what alone keeps frames that would be taken else: those below the lowest free one."""
        with self._lock:
            self._apply_ended()
            found: list[Ticket] = []
            for each in frames:
                if not self._is_busy(each):
                    break
                tickets = [self._tickets.get(serial) for serial in each.claims]
                if not each.reserved_by and all(t and t.returned and not t.outstayed for t in tickets):
                    found += [ticket for ticket in tickets if ticket]
            return found

    def _is_busy(self, frame: _Frame) -> bool:
        return bool(frame.claims or frame.reserved_by)

    def _free_frame(self, among: Collection[int] | None) -> _Frame:
        self._forget_dead_graphs()
        frames = self._candidates(among)
        for frame in frames:
            if not self._is_busy(frame):
                return frame
        of_what = "" if among is None else " of its recv_policy"
        raise LeaseError(
            f"acquire() needs a free frame{of_what} and all {len(frames)} are busy:\n{self._who(frames)}\n"
            "Build the plan with a Schedule that has one frame per dispatch between its forward and its backward, "
            "for example Schedule.sequential(num_layers) or Schedule(num_frames=...), or end a claim first"
        )

    def _named_frame(self, index: int) -> _Frame:
        if not 0 <= index < len(self._frames):
            users = self._who()
            raise LeaseError(
                f"acquire(frame={index}) asks for a frame that the plan has not: it has frames 0 to "
                f"{len(self._frames) - 1}{f', in use by:{chr(10)}{users}{chr(10)}' if users else '. '}"
                "Take frames from the Schedule that built the plan"
            )
        self._forget_dead_graphs()
        frame = self._frames[index]
        if self._is_busy(frame):
            raise LeaseError(
                f"acquire(frame={index}): the frame is still in use:\n{self._who([frame])}\n"
                "Run the backward, drop the graph or the Received that keeps it, or plan more frames with Schedule"
            )
        return frame

    def _who(self, frames: Iterable[_Frame] | None = None) -> str:
        lines = []
        for frame in self._frames if frames is None else frames:
            for claim in frame.claims.values():
                keeper = "lease" if claim.kind == "lease" else "Received or autograd graph of the lease"
                lines.append(f"  frame {frame.index}: {keeper} acquired at {claim.where}")
            for key in frame.reserved_by:
                place = self.graphs[key].where if key in self.graphs else "a capture"
                lines.append(f"  frame {frame.index}: reserved by the graph captured at {place}")
        return "\n".join(lines)

    def _no_workspace(self, frame: int, direction: Direction) -> str:
        owners = sorted(f.index for f in self._frames if f.workspace[direction] is not None)
        ends = "its combine" if direction == "forward" else "its dispatch backward"
        return (
            f"frame {frame} needs a {direction} workspace and all {self._num_workspaces} are claimed, by frame(s) "
            f"{owners}: a claim lasts until {ends}. Issue that first (a backward restricted to some inputs never does "
            "unless an input of dispatch is among them), or plan more with Schedule(num_workspaces=...)"
        )


class _TicketBytes(bytearray):
    """The 8 bytes of a ticket tensor. Their death ends the claim."""

    __slots__ = ("book", "serial")
    book: LeaseBook
    serial: int

    def __del__(self) -> None:
        self.book.end_later(self.serial)


def make_ticket_tensor(book: LeaseBook, serial: int) -> torch.Tensor:
    """Make the tensor that keeps a claim alive.

    Shapes: [8] uint8 cpu: arena handle and serial, 32 bits each.
    """
    claim = _TicketBytes(_WORD.pack(serial << 32 | book.handle))
    claim.book, claim.serial = book, serial
    return torch.frombuffer(claim, dtype=torch.uint8)


def read_ticket(ticket: torch.Tensor) -> tuple[int, int]:
    """Return (arena handle, serial) from a ticket tensor."""
    word = ctypes.c_uint64.from_address(ticket.data_ptr()).value
    return word & 0xFFFFFFFF, word >> 32


def _make_token(book: LeaseBook, frame: int, serial: int, among: Collection[int] = ()) -> torch.Tensor:
    """Make the tensor by which ops know a lease.

    Shapes: [3 + n] int64 cpu: arena handle, frame, serial; of a lease without a claim, the frames it may take if not
        all.
    """
    words = book.handle, frame, serial, *sorted(among)
    return torch.frombuffer(bytearray(struct.pack(f"={len(words)}q", *words)), dtype=torch.int64)


class Lease:
    """Exclusive right to one frame, for one dispatch and what follows from it.

    Regions are attributes: `lease.recv_tokens`, `lease.expert_out`, `lease.grad_recv_tokens`, ... Each is a detached
    view, valid while its claim lives: those of the frame while the lease or a ticket of its dispatch keeps the frame,
    those of the forward workspace from dispatch to combine, those of the backward workspace from combine backward to
    dispatch backward.

    Attributes:
        frame: index of the frame.
        arena: the arena it belongs to.
        ticket: of the dispatch, or of the forward that `begin` began, until release(); None before.
        released: whether this claim has ended; what autograd or a `Received` keeps may still live.
    """

    released = True  # until acquire() succeeds; also for an instance that was never initialised

    def __init__(
        self, arena: Regions, book: LeaseBook, frame: int | None, among: Collection[int] | None = None, *,
        is_routed: bool = True,
    ) -> None:  # fmt: skip
        """Claim a frame; where our own route follows (`is_routed`), one that a checkpoint has saved may say which."""
        self.where = caller() or "unknown"
        may_take: Collection[int] = ()
        if is_routed and _recomputes_selectively():
            self.frame, self.serial = NO_FRAME if frame is None else frame, NO_CLAIM
            may_take = among or ()
        else:
            self.frame, self.serial = book.acquire(frame, self.where, among)
        self.arena = arena
        self.book = book
        self.token = _make_token(book, self.frame, self.serial, may_take)
        self.ticket: torch.Tensor | None = None
        self.num_tokens = 0
        self.sent: tuple[torch.Tensor | None, ...] = ()  # what a dispatch in combine's backward sends again
        self.released = False

    @classmethod
    def of_ticket(cls, arena: Regions, book: LeaseBook, ticket: Ticket) -> Lease:
        """Return a lease that claims nothing, for what a ticket keeps."""
        lease = cls.__new__(cls)
        lease.where, lease.ticket, lease.num_tokens, lease.sent = caller() or "unknown", None, ticket.num_tokens, ()
        lease.take(arena, book, ticket.frame, ticket.lease)
        return lease

    def release(self) -> None:
        """End this claim. What autograd or a `Received` keeps stays claimed until they are gone.

        Raises:
            LeaseError: released before.
        """
        if self.released:
            raise LeaseError(
                f"release() was called twice on the lease of frame {self.frame} acquired at {self.where}; "
                "a lease ends once: by release(), by leaving its with block, or by its death"
            )
        self.released = True
        self.ticket = None
        self.book.end(self.serial)

    def move(self, arena: Regions, book: LeaseBook, among: Collection[int] | None) -> None:
        """Go on, before dispatch, with a frame of newer memory: that of the same number if it is free, else of `among`.

        Raises:
            LeaseError: every frame there is in use; nothing has changed.
        """
        frame, serial = book.acquire_like(self.frame, self.where, among)
        self.book.end(self.serial)
        self.take(arena, book, frame, serial)

    def take(self, arena: Regions, book: LeaseBook, frame: int, serial: int) -> None:
        """Stand for a claim that the book has, or had, and that no other lease stands for."""
        self.arena, self.book, self.frame, self.serial = arena, book, frame, serial
        self.token = _make_token(book, frame, serial)

    def __del__(self) -> None:
        if not self.released:
            self.book.end_later(self.serial)

    def __reduce__(self) -> NoReturn:
        raise LeaseError("a lease is one claim and cannot be copied or pickled; acquire another")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.released:
            self.release()

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            place = self._place_of(name)
        except KeyError:
            raise AttributeError(f"a lease has no region {name!r}") from None
        return self.arena.region(name, *place).detach()

    def window_of(self, name: str) -> tuple[object, int]:
        """Return (window, byte offset) of a region, for kernels that address the window themselves.

        Raises:
            LeaseError: no claim covers the region now.
        """
        return self.arena.window_offset(name, *self._place_or_error(name))

    def packed(self, name: str) -> torch.Tensor:
        """Return a data region and the scales that follow it as one uint8 view.

        Shapes: [C * (row + scale row)] uint8.

        Raises:
            LeaseError: no claim covers the region now.
            ConfigError: the plan leaves a gap between data and scales.
        """
        return self.arena.packed(name, *self._place_or_error(name))

    def begin(self, use: Use = "forward") -> None:
        """Begin a use of this frame by kernels that are not ours; `end` ends it. For engine="external".

        The current stream waits for the last users of the frame and of the workspace, within one capture or outside
        any, and while a graph records it holds the memory, as with dispatch and combine. Local: the kernels themselves
        synchronise the ranks, which must use the same frames in the same order. Does not synchronise with the host.

        Args:
            use: "forward": dispatch to combine; claims a forward workspace, and makes `lease.ticket`, [8] uint8 cpu,
                which keeps the frame while it lives: save it for the backward. Once for each lease. "backward":
                combine's backward to dispatch's backward; claims a backward workspace, and works after release(), too,
                while the ticket lives. It may begin in the forward, where kernels want the memory of their gradient
                then. "frame": regions of the frame alone, for example a delayed weight gradient, at any time.

        Raises:
            ConfigError: an arena of another engine, an unknown word, a backward of an inference_only plan, or inside
                torch.compile.
            LeaseError: out of order, or after the lease's or the arena's end; no workspace is free.
        """
        self.arena.begin_use(self, use)

    def end(self, use: Use = "forward", *, total_recv_tokens: torch.Tensor | None = None) -> None:
        """End a use: what the current stream has been given so far is the last of it. Views of its workspace end, too.

        Args:
            use: as in `begin`.
            total_recv_tokens: of "forward": [1] int32 or int64 on the device, rows that the dispatch needed on this
                rank (the largest of all ranks, if known), padding included and before dropping. More than the
                capacity counts as an overflow: `step.overflow`, `arena.report()`, and what `grow_to_peak()` grows to.

        Raises:
            ConfigError: an arena of another engine, an unknown word, or no such tensor.
            LeaseError: it has not begun; the arena is closed.
        """
        self.arena.end_use(self, use, total_recv_tokens)

    def _place_or_error(self, name: str) -> tuple[int, Lifetime]:
        try:
            return self._place_of(name)
        except KeyError:
            raise LeaseError(f"the plan has no region {name!r} that a lease can name; print(plan) lists them") from None

    def _place_of(self, name: str) -> tuple[int, Lifetime]:
        frame = max(self.frame, 0)
        lifetime = self.arena.lifetime(name, frame)
        if lifetime in ("arena", "stash"):
            raise KeyError(name)
        if torch.compiler.is_compiling():  # traced code: claims are checked by the ops when it runs
            return frame if lifetime == "frame" else 0, lifetime
        if self.serial == NO_CLAIM:
            raise LeaseError(
                f"{name} of a lease that was acquired at {self.where} while a selective checkpoint runs its region "
                "again: the saved route says in dispatch which frame it is; look at regions after dispatch"
            )
        if not self.book.holds_frame(self.frame, self.serial):
            raise LeaseError(
                f"{name} belongs to frame {self.frame}, and the lease acquired at {self.where} has ended with nothing "
                "left that keeps the frame; its bytes may be somebody else's now"
            )
        if lifetime == "frame":
            return self.frame, lifetime
        return self._workspace_of(name, cast(Direction, lifetime)), lifetime

    def _workspace_of(self, name: str, direction: Direction) -> int:
        workspace = self.book.workspace(self.frame, direction)
        if workspace is None:
            span = "dispatch to combine" if direction == "forward" else "combine backward to dispatch backward"
            raise LeaseError(
                f"{name} lies in a {direction} workspace, which frame {self.frame} claims from {span} only; "
                "it has none now"
            )
        return workspace

    def __repr__(self) -> str:
        return f"Lease(frame={self.frame}, acquired at {self.where}{', released' if self.released else ''})"


def _recomputes_selectively() -> bool:
    """Tell whether a selective checkpoint runs its region again, so that the route to come may be a saved one.

    Source: torch 2.13, torch/utils/checkpoint.py, `create_selective_checkpoint_contexts`; torch has no public word for
    it.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _CachedTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())


def caller() -> str:
    """Name the line of user code that called epbuf: the nearest frame outside epbuf and torch; empty if none did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _is_ours(frame: FrameType) -> bool:
    module: str = frame.f_globals.get("__name__", "")
    return module.startswith(_OURS) and module.partition(".")[0] in _OURS


def refuse_while_recording(book: LeaseBook, call: str, instead: str) -> None:
    """Raise CaptureError when a graph is being recorded over the book's arena."""
    if book.recording is not None:
        raise CaptureError(f"{call} cannot be captured (capture began at {book.recording.where}): {instead}")
