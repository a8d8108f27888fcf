"""Explore every interleaving of the protocol that PROTOCOL.md describes, on two and three ranks.

An op is a list of steps; a lane (one stream of one rank) runs its steps in order, and lanes interleave freely.
`explore` visits every reachable state and answers with one of these words:

    ok          every lane finishes, and every kernel found the rows that it wanted
    corrupt     a kernel finds other rows, or meets another kernel on the same rows
    dead-lock   some lane waits for what cannot come any more
    noticed     every rank saw in PROGRESS, or heard through ABORT, that some rank issued another call
    in part     some interleavings end so on some ranks only

A kernel touches all its rows from its own step until the next step of its lane: the longest that it can. By default a
publish reaches every rank in one step, and an await passes when all its cells match at once. Neither hides a failure:
a late store looks to its poller like a late poll, and asking for all cells at once can only add dead-locks. A `fine`
machine does without both: stores to peers are in flight and land in any order, and cells are polled one by one.

The cases are in protocol_cases.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Advance:
    """Add 1 to a counter of this rank."""

    counter: str

    def __str__(self) -> str:
        return f"advance {self.counter}"


@dataclass(frozen=True)
class Remember:
    """Copy a counter of this rank into another."""

    counter: str
    source: str

    def __str__(self) -> str:
        return f"remember {self.counter} = {self.source}"


@dataclass(frozen=True)
class Publish:
    """Store an epoch into this rank's cell at every rank: the value of a counter now, or a constant."""

    cell: str
    epoch: str | int

    def __str__(self) -> str:
        return f"publish {self.cell} = {self.epoch}"


@dataclass(frozen=True)
class Await:
    """Wait until the cells of all ranks, or of one, hold exactly this epoch."""

    cell: str
    epoch: str | int
    after_refusal: bool = False
    source: int | None = None

    def __str__(self) -> str:
        return f"await {self.cell} = {self.epoch}"


class Rows(NamedTuple):
    """Rows of a region: in this rank's window or in everybody's; all of them or those that this rank sends."""

    region: str
    tag: str
    everywhere: bool = False
    only_mine: bool = False


@dataclass(frozen=True)
class Move:
    """Run a kernel that reads and writes rows; a read wants the rows that carry its tag."""

    name: str
    reads: tuple[Rows, ...] = ()
    writes: tuple[Rows, ...] = ()
    by_user: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Announce:
    """Begin a call: tell every rank in PROGRESS its number and what it is. A workspace of None is any."""

    op: str
    frame: int
    workspace: int | None

    def __str__(self) -> str:
        return f"announce {self.op} of frame {self.frame}, workspace {self.workspace}"

    def agrees(self, other: Announce) -> bool:
        """Tell whether two ranks make the same call."""
        same_workspace = self.workspace == other.workspace or None in (self.workspace, other.workspace)
        return (self.op, self.frame) == (other.op, other.frame) and same_workspace


@dataclass(frozen=True)
class Compare:
    """Look at every rank's PROGRESS once, whether or not there is anything to wait for."""

    def __str__(self) -> str:
        return "compare PROGRESS"


@dataclass(frozen=True)
class Clear:
    """Set this rank's copy of a cell to zero, for all sources. The protocol has no such step."""

    cell: str

    def __str__(self) -> str:
        return f"clear {self.cell}"


@dataclass(frozen=True)
class Record:
    """Record an event on this stream; a rank's other streams may wait for it."""

    event: str

    def __str__(self) -> str:
        return f"record {self.event}"


@dataclass(frozen=True)
class AwaitEvent:
    """Hold this stream back until the event is recorded."""

    event: str

    def __str__(self) -> str:
        return f"await event {self.event}"


@dataclass(frozen=True)
class Finish:
    """End the lane, and with it the kernel before."""

    def __str__(self) -> str:
        return "finish"


Step = Advance | Remember | Publish | Await | Move | Announce | Compare | Clear | Record | AwaitEvent | Finish
Steps = list[Step]
Lane = tuple[int, int]  # rank, stream
Programs = dict[Lane, Steps]


@dataclass(frozen=True)
class Use:
    """One dispatch and what follows from it: its frame, its workspaces and the tag its rows carry.

    `recv_in_workspace`: the plan has save_recv=False. `alias`: the data regions of a workspace share their bytes.
    `in_window`: the experts write into the window themselves; otherwise the op stages their rows.
    `by_wire`: a token crosses once for each rank, as a row that is copied there, or as a sum that was made there.
    `says_ack`: some layer of the plan stashes, this one or another, so combine says when its pull is over.
    """

    frame: int = 0
    workspace: int = 0
    tag: str = "a"
    recv_in_workspace: bool = False
    alias: bool = False
    in_window: bool = True
    by_wire: bool = False
    says_ack: bool = False

    @property
    def round(self) -> str:
        return f"round[{self.frame}]"

    @property
    def forward_use(self) -> str:
        return f"forward_use[{self.workspace}]"

    @property
    def backward_use(self) -> str:
        return f"backward_use[{self.workspace}]"

    @property
    def last_ready(self) -> str:
        return f"last_ready[{self.workspace}]"

    @property
    def slots(self) -> Rows:
        return Rows(f"slots[{self.frame}]", self.tag)

    @property
    def recv(self) -> Rows:
        if not self.recv_in_workspace:
            return Rows(f"recv[{self.frame}]", self.tag)
        return Rows(f"{'forward' if self.alias else 'recv in workspace'}[{self.workspace}]", self.tag)

    @property
    def expert_out(self) -> Rows:
        aliased = self.alias and self.recv_in_workspace
        return Rows(f"{'forward' if aliased else 'expert_out'}[{self.workspace}]", self.tag + " out")

    @property
    def grad_expert_out(self) -> Rows:
        return Rows(f"{'backward' if self.alias else 'grad_expert_out'}[{self.workspace}]", self.tag + " grad out")

    @property
    def grad_recv(self) -> Rows:
        return Rows(f"{'backward' if self.alias else 'grad_recv'}[{self.workspace}]", self.tag + " grad in")

    @property
    def wire_rows(self) -> Rows:
        return Rows(f"wire_rows[{self.workspace}]", self.tag)

    @property
    def wire_sums(self) -> Rows:
        return Rows(f"wire_rows[{self.workspace}]", self.tag + " out")

    @property
    def grad_wire_rows(self) -> Rows:
        return Rows(f"grad_wire_rows[{self.workspace}]", self.tag + " grad out")

    @property
    def grad_wire_sums(self) -> Rows:
        return Rows(f"grad_wire_rows[{self.workspace}]", self.tag + " grad in")

    @property
    def pages(self) -> Rows:
        return Rows(f"pages[{self.frame}]", self.tag)

    def cell(self, name: str) -> str:
        """Name a cell of this use: COUNT and ARRIVED belong to the frame, all others to the workspace."""
        return f"{name}[{self.frame if name in ('count', 'arrived') else self.workspace}]"


def sent(rows: Rows) -> Rows:
    """Turn a region into the rows of it, at every rank, that this rank sends."""
    return rows._replace(everywhere=True, only_mine=True)


def pulled(rows: Rows) -> Rows:
    """Turn a region into its rows at every rank."""
    return rows._replace(everywhere=True)


def barrier(cell: str, epoch: str, *, after_refusal: bool = False) -> Steps:
    return [Publish(cell, epoch), Await(cell, epoch, after_refusal)]


def route(u: Use) -> Steps:
    return [
        Advance(u.round),
        *barrier(u.cell("count"), u.round),
        Compare(),
        Move("compute slots", writes=(u.slots,)),
    ]


def refused_route(u: Use) -> Steps:
    return [
        Advance(u.round),
        *barrier(u.cell("count"), u.round),
        Compare(),
        *barrier(u.cell("arrived"), u.round, after_refusal=True),
    ]


def dispatch(u: Use) -> Steps:
    pushed = u.wire_rows if u.by_wire else u.recv
    return [
        Move("push rows", reads=(u.slots,), writes=(sent(pushed),)),
        *barrier(u.cell("arrived"), u.round),
        *expand(u, "expand rows", u.wire_rows, u.recv),
    ]


def expand(u: Use, name: str, wire_rows: Rows, received: Rows) -> Steps:
    """Copy rows that came once into their slots; which slots these are the senders' slot maps say."""
    return [Move(name, reads=(pulled(u.slots), wire_rows), writes=(received,))] if u.by_wire else []


def add(u: Use, name: str, rows: Rows, sums: Rows) -> Steps:
    """Add this rank's rows of each token of its peers, for them to pull."""
    return [Move(name, reads=(pulled(u.slots), rows), writes=(sums,))] if u.by_wire else []


def read_by_pull(u: Use, rows: Rows, sums: Rows) -> tuple[Rows, ...]:
    """List what a pull reads: of the sums only those that were made for this rank."""
    return (u.slots, pulled(rows), *([sent(sums)] if u.by_wire else []))


def experts(u: Use) -> Steps:
    writes = (u.expert_out,) if u.in_window else ()
    return [Move("experts", reads=(u.recv,), writes=writes, by_user=True)]


def stage_expert_out(u: Use) -> Steps:
    return [] if u.in_window else [Move("stage rows", writes=(u.expert_out,))]


def combine(u: Use) -> Steps:
    return [
        *stage_expert_out(u),
        *add(u, "add rows", u.expert_out, u.wire_sums),
        Advance(u.forward_use),
        *barrier(u.cell("ready"), u.forward_use),
        Move("pull rows", reads=read_by_pull(u, u.expert_out, u.wire_sums)),
        *([Publish(u.cell("ack"), u.forward_use)] if u.says_ack else []),
    ]


def refused_combine(u: Use) -> Steps:
    return [
        *stage_expert_out(u),
        *add(u, "add rows", u.expert_out, u.wire_sums),
        Advance(u.forward_use),
        *barrier(u.cell("ready"), u.forward_use),
        *barrier(u.cell("ack"), u.forward_use, after_refusal=True),
    ]


def enter_backward(u: Use) -> Steps:
    return [Await(u.cell("grad_ack"), u.last_ready), Advance(u.backward_use)]


def combine_backward(u: Use) -> Steps:
    return [
        *enter_backward(u),
        *barrier(u.cell("go"), u.backward_use),
        Move("push gradients", reads=(u.slots,), writes=(sent(u.grad_wire_rows if u.by_wire else u.grad_expert_out),)),
        *barrier(u.cell("grad_arrived"), u.backward_use),
        *expand(u, "expand gradients", u.grad_wire_rows, u.grad_expert_out),
    ]


def refused_combine_backward(u: Use) -> Steps:
    return [
        *enter_backward(u),
        *barrier(u.cell("go"), u.backward_use),
        *barrier(u.cell("grad_arrived"), u.backward_use, after_refusal=True),
    ]


def experts_backward(u: Use) -> Steps:
    """Compute the input gradient from the row gradient; with recv_in_workspace the received rows are gone."""
    reads = (u.grad_expert_out,) if u.recv_in_workspace else (u.grad_expert_out, u.recv)
    writes = (u.grad_recv,) if u.in_window else ()
    return [Move("experts backward", reads=reads, writes=writes, by_user=True)]


def weight_gradient(u: Use) -> Steps:
    """Compute the weight gradient after dispatch backward, the way zero-bubble schedules delay it."""
    return [Move("delayed weight gradient", reads=(u.recv, u.grad_expert_out), by_user=True)]


def stage_grad_recv(u: Use) -> Steps:
    return [] if u.in_window else [Move("stage gradients", writes=(u.grad_recv,))]


def dispatch_backward(u: Use) -> Steps:
    return [
        *stage_grad_recv(u),
        *add(u, "add gradients", u.grad_recv, u.grad_wire_sums),
        Remember(u.last_ready, u.backward_use),
        *barrier(u.cell("grad_ready"), u.backward_use),
        Move("pull gradients", reads=read_by_pull(u, u.grad_recv, u.grad_wire_sums)),
        Publish(u.cell("grad_ack"), u.backward_use),
    ]


def refused_dispatch_backward(u: Use) -> Steps:
    return [
        *stage_grad_recv(u),
        *add(u, "add gradients", u.grad_recv, u.grad_wire_sums),
        Remember(u.last_ready, u.backward_use),
        *barrier(u.cell("grad_ready"), u.backward_use),
        *barrier(u.cell("grad_ack"), u.backward_use, after_refusal=True),
    ]


def lone_dispatch_backward(u: Use) -> Steps:
    """Begin the use as well, where no combine backward did; the op stages the rows then."""
    return enter_backward(u) + dispatch_backward(replace(u, in_window=False))


def refused_lone_dispatch_backward(u: Use) -> Steps:
    return enter_backward(u) + refused_dispatch_backward(replace(u, in_window=False))


def forward(u: Use) -> Steps:
    return route(u) + dispatch(u) + experts(u) + combine(u)


def backward(u: Use) -> Steps:
    return combine_backward(u) + experts_backward(u) + dispatch_backward(u)


def experts_backward_with_weights(u: Use) -> Steps:
    """Compute both gradients, which takes the received rows, whatever they lie in."""
    writes = (u.grad_recv,) if u.in_window else ()
    reads = (u.recv, u.grad_expert_out)
    return [Move("experts backward with its weight gradient", reads=reads, writes=writes, by_user=True)]


def recomputing_backward(u: Use) -> Steps:
    """Run backward with the received rows brought back by one more dispatch."""
    return [
        *combine_backward(u), *route(u), *dispatch(u), *experts_backward_with_weights(u), *dispatch_backward(u),
    ]  # fmt: skip


def stash(u: Use) -> Steps:
    return [Move("stash rows", reads=(u.recv,), writes=(u.pages,))]


def stashing_backward(u: Use) -> Steps:
    """Run backward with the received rows copied back from the frame's pages."""
    restore = Move("restore rows", reads=(u.pages,), writes=(u.recv,))
    return [
        *combine_backward(u),
        Await(u.cell("ack"), u.forward_use),
        restore,
        *experts_backward_with_weights(u),
        *dispatch_backward(u),
    ]


def announced(u: Use, *ops: Callable[[Use], Steps]) -> Steps:
    """Run ops that say in PROGRESS what they are; elsewhere it is left out, because no wait depends on it."""
    return [step for op in ops for step in (Announce(op.__name__, u.frame, u.workspace), *op(u))]


Place = tuple[
    str, int, int
]  # a cell: (name, source, destination); rows: (region, owner, sender); a word: (name, rank, 0)
Memory = tuple[int, ...]  # one number per place: an epoch, a count, a flag, or the number of a tag
Action = Callable[[Memory], Memory | None]  # None: the lane must wait


class State(NamedTuple):
    """Where each lane stands, and what every place holds."""

    pcs: tuple[int, ...]
    memory: Memory


class Touch(NamedTuple):
    """The rows that a kernel reads and writes, with the tag that it wants or leaves there."""

    reads: dict[Place, str]
    writes: dict[Place, str]


NOTHING = Touch({}, {})


class Machine:
    """All lanes of all ranks and the memory they share.

    `silent` ranks have no tokens: they send and pull no row, and take every other step. With `may_time_out` a wait
    that is not over may also give up. A rank (of one stream) that gave up or noticed another call is poisoned and skips
    every later step of the library; the user's kernels still run there, on rows that are no longer right.
    """

    def __init__(
        self, programs: Programs, *, silent: Sequence[int] = (), may_time_out: bool = False, fine: bool = False
    ) -> None:
        self.lanes = sorted(programs)
        self.ranks = range(1 + max(rank for rank, _ in self.lanes))
        self.senders = [rank for rank in self.ranks if rank not in silent]
        self.may_time_out, self.fine = may_time_out, fine
        self.steps = [[*self._polls(programs[lane]), Finish()] for lane in self.lanes]
        self.words = [
            [f"rank {rank}, stream {stream}: {step}" for step in steps]
            for (rank, stream), steps in zip(self.lanes, self.steps, strict=True)
        ]
        self.tags: list[object] = ["nothing"]
        self.index: dict[Place, int] = {}
        self.in_flight: dict[int, int] = {}
        self.poison = [self._at("poisoned", rank) for rank in self.ranks]
        self.touches = [
            [self._touch(rank, step) for step in steps] for (rank, _), steps in zip(self.lanes, self.steps, strict=True)
        ]
        self.actions = [
            [self._action(rank, step) for step in steps]
            for (rank, _), steps in zip(self.lanes, self.steps, strict=True)
        ]

    def start(self) -> State:
        """Answer the state in which no lane has begun, every epoch is 0 and every row is empty."""
        return State((0,) * len(self.lanes), (0,) * len(self.index))

    def is_over(self, state: State) -> bool:
        """Tell whether every lane has finished."""
        return all(pc == len(steps) for pc, steps in zip(state.pcs, self.steps, strict=True))

    def num_poisoned(self, state: State) -> int:
        """Count the ranks that gave up or noticed another call."""
        return sum(state.memory[at] for at in self.poison)

    def stuck_lanes(self, state: State) -> list[str]:
        """Say what each unfinished lane waits for."""
        return [f"stuck: {w[pc]}" for w, pc in zip(self.words, state.pcs, strict=True) if pc < len(w)]

    def successors(self, state: State) -> Iterator[tuple[State | None, str]]:
        """List what one step of one lane leads to, with that step in words; None is a corrupt kernel."""
        for store, cell in self.in_flight.items():
            if state.memory[store]:
                yield State(state.pcs, _put(state.memory, {cell: state.memory[store], store: 0})), "a store lands"
        for lane_idx, pc in enumerate(state.pcs):
            if pc < len(self.steps[lane_idx]):
                yield from self._steps_of_lane(state, lane_idx, pc)

    def _steps_of_lane(self, state: State, lane_idx: int, pc: int) -> Iterator[tuple[State | None, str]]:
        rank, step = self.lanes[lane_idx][0], self.steps[lane_idx][pc]
        words = self.words[lane_idx][pc]
        memory: Memory | None = state.memory
        if not self._skips(state, rank, step):
            complaint = self._complaint(state, lane_idx) if isinstance(step, Move) else ""
            if complaint:
                yield None, words + complaint
                return
            memory = self.actions[lane_idx][pc](state.memory)
        if (memory is None and self._may_give_up(state, rank, step)) or (
            isinstance(step, Compare) and self._sees_another_call(state, rank)
        ):
            memory, words = _put(state.memory, {self.poison[rank]: 1}), words + ", gives up"
        if memory is not None:
            yield State((*state.pcs[:lane_idx], pc + 1, *state.pcs[lane_idx + 1 :]), memory), words

    def _skips(self, state: State, rank: int, step: Step) -> bool:
        """Tell whether a rank is poisoned and the step is the library's."""
        return bool(state.memory[self.poison[rank]]) and not (isinstance(step, Move) and step.by_user)

    def _may_give_up(self, state: State, rank: int, step: Step) -> bool:
        """Tell whether a wait may end early: by the clock, by a peer's ABORT, or by a peer's PROGRESS."""
        if not isinstance(step, Await):
            return False
        return self.may_time_out or self._sees_another_call(state, rank) or self.num_poisoned(state) > 0

    def _sees_another_call(self, state: State, rank: int) -> bool:
        """Compare PROGRESS: a rank at the same call number with another op, frame or workspace."""
        if ("call", rank, rank) not in self.index:
            return False
        calls = [state.memory[self.index["call", src, rank]] for src in self.ranks]
        whats = [self.tags[state.memory[self.index["what", src, rank]]] for src in self.ranks]
        mine = whats[rank]
        return any(
            call == calls[rank] and isinstance(what, Announce) and isinstance(mine, Announce) and not what.agrees(mine)
            for call, what in zip(calls, whats, strict=True)
        )

    def _polls(self, steps: Steps) -> Iterator[Step]:
        for step in steps:
            if self.fine and isinstance(step, Await):
                yield from (replace(step, source=src) for src in self.ranks)
            else:
                yield step

    def _at(self, name: str, first: int, second: int = 0) -> int:
        return self.index.setdefault((name, first, second), len(self.index))

    def _store(self, cell: str, src: int, dst: int) -> int:
        """Answer the place that a publish writes: the cell, or the store that is in flight to a peer's."""
        at = self._at(cell, src, dst)
        if not self.fine or src == dst:
            return at
        store = self._at(f"{cell} in flight", src, dst)
        self.in_flight[store] = at
        return store

    def _tag(self, tag: object) -> int:
        if tag not in self.tags:
            self.tags.append(tag)
        return self.tags.index(tag)

    def _epoch(self, rank: int, epoch: str | int) -> Callable[[Memory], int]:
        if isinstance(epoch, int):
            return lambda memory: epoch
        at = self._at(epoch, rank)
        return lambda memory: memory[at]

    def _touch(self, rank: int, step: Step) -> Touch:
        if not isinstance(step, Move):
            return NOTHING
        return Touch(dict(self._parts(rank, step.reads)), dict(self._parts(rank, step.writes)))

    def _parts(self, rank: int, accesses: Sequence[Rows]) -> Iterator[tuple[Place, str]]:
        for rows in accesses:
            if rows.everywhere and rank not in self.senders:
                continue
            for owner in self.ranks if rows.everywhere else (rank,):
                for sender in (rank,) if rows.only_mine else self.senders:
                    self._at(rows.region, owner, sender)
                    yield (rows.region, owner, sender), rows.tag

    def _action(self, rank: int, step: Step) -> Action:
        """Turn a step into a function from the memory before it to the memory after it."""
        match step:
            case Advance(counter):
                at = self._at(counter, rank)
                return lambda memory: _put(memory, {at: memory[at] + 1})
            case Remember(counter, source):
                at, value = self._at(counter, rank), self._epoch(rank, source)
                return lambda memory: _put(memory, {at: value(memory)})
            case Publish(cell, epoch):
                stores, value = [self._store(cell, rank, dst) for dst in self.ranks], self._epoch(rank, epoch)
                return lambda memory: _put(memory, dict.fromkeys(stores, value(memory)))
            case Await(cell, epoch, source=source):
                sources = self.ranks if source is None else (source,)
                cells, value = [self._at(cell, src, rank) for src in sources], self._epoch(rank, epoch)
                return lambda memory: memory if all(memory[at] == value(memory) for at in cells) else None
            case Announce():
                calls, what = [self._at("call", rank, dst) for dst in self.ranks], self._tag(step)
                whats = [self._at("what", rank, dst) for dst in self.ranks]
                return lambda memory: _put(
                    memory, dict.fromkeys(calls, memory[calls[0]] + 1) | dict.fromkeys(whats, what)
                )
            case Clear(cell):
                zeros = {self._at(cell, src, rank): 0 for src in self.ranks}
                return lambda memory: _put(memory, zeros)
            case Record(event):
                at = self._at(event, rank)
                return lambda memory: _put(memory, {at: 1})
            case AwaitEvent(event):
                at = self._at(event, rank)
                return lambda memory: memory if memory[at] else None
            case _:
                written = {self._at(*place): self._tag(tag) for place, tag in self._touch(rank, step).writes.items()}
                return lambda memory: _put(memory, written)

    def _complaint(self, state: State, lane_idx: int) -> str:
        """Say what is wrong with the kernel that a lane is about to start; nothing if it may."""
        mine = self._seen_touch(state, lane_idx, state.pcs[lane_idx])
        for other_idx, other_pc in enumerate(state.pcs):
            if other_idx == lane_idx or other_pc == 0:
                continue
            other = self._seen_touch(state, other_idx, other_pc - 1)
            clash = (mine.writes.keys() & (other.reads.keys() | other.writes.keys())) or (
                mine.reads.keys() & other.writes.keys()
            )
            if clash:
                region, owner, _ = min(clash)
                kernel = self.steps[other_idx][other_pc - 1]
                return f" touches {region} of rank {owner} under '{kernel}' of rank {self.lanes[other_idx][0]}"
        for (region, owner, sender), tag in mine.reads.items():
            found = self.tags[state.memory[self.index[region, owner, sender]]]
            if found != tag:
                return f" reads {region} of rank {owner}, part of rank {sender}: wants '{tag}', finds '{found}'"
        return ""

    def _seen_touch(self, state: State, lane_idx: int, pc: int) -> Touch:
        """Answer what a kernel touches; on a poisoned rank only what the user's kernels write is of interest."""
        rank, touch = self.lanes[lane_idx][0], self.touches[lane_idx][pc]
        if not state.memory[self.poison[rank]]:
            return touch
        return NOTHING if self._skips(state, rank, self.steps[lane_idx][pc]) else Touch({}, touch.writes)


def _put(memory: Memory, changes: Mapping[int, int]) -> Memory:
    after = list(memory)
    for at, value in changes.items():
        after[at] = value
    return tuple(after)


@dataclass(frozen=True)
class Result:
    """What `explore` found, and the shortest way into a failure."""

    verdict: str
    num_states: int
    trace: tuple[str, ...] = ()


def explore(machine: Machine) -> Result:
    """Visit every reachable state, nearest first, and stop at the first failure."""
    start = machine.start()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    ends: set[int] = set()  # how many ranks are poisoned where all lanes have finished
    while queue:
        state = queue.popleft()
        is_stuck = not machine.is_over(state)
        if not is_stuck:
            ends.add(machine.num_poisoned(state))
        for after, words in machine.successors(state):
            is_stuck = False
            if after is None:
                return Result("corrupt", len(came_from), (*_way_to(state, came_from), words))
            if after not in came_from:
                came_from[after] = (state, words)
                queue.append(after)
        if is_stuck:
            return Result("dead-lock", len(came_from), (*_way_to(state, came_from), *machine.stuck_lanes(state)))
    if machine.may_time_out or ends == {0}:
        return Result("ok", len(came_from))
    return Result("noticed" if ends == {len(machine.ranks)} else "in part", len(came_from))


def _way_to(state: State, came_from: Mapping[State, tuple[State, str] | None]) -> tuple[str, ...]:
    words: list[str] = []
    while (origin := came_from[state]) is not None:
        state, step = origin
        words.append(step)
    return tuple(reversed(words))
