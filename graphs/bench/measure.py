"""What the programs of the GPU benchmark share: the shape that is moved, the ranks, and how a time is taken.

A time is that of the device, by CUDA events. What is captured has its events in the graph, behind bodies that are not
timed: each host launches a graph of its own, up to half a millisecond apart, and the first op waits for the last rank.
A captured time is the mean of the ranks. What is not captured has events between calls that are queued one behind the
other; it is the time of the slowest rank. On CPU the same programs run small, to test them; a time is then that of the
host.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WARM_UP_CALLS = 3
LEAD_BODIES = 2  # of a graph, ahead of those that are timed


@dataclass(frozen=True)
class Shape:
    """What is moved: T tokens of H bf16 a rank, each to K of E experts on R ranks, zones of multiples of A rows.

    Written as R8-T4096-H7168-K8-E256-A128.
    """

    num_ranks: int
    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    alignment: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read what `str` writes."""
        return cls(*(int(part[1:]) for part in text.split("-")))

    def __str__(self) -> str:
        sizes = (self.num_ranks, self.num_tokens, self.hidden, self.num_topk, self.num_experts, self.alignment)
        return "-".join(f"{letter}{size}" for letter, size in zip("RTHKEA", sizes, strict=True))

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def topk_idx(self, rank: int) -> Tensor:
        """Draw the routing of a rank, on the CPU: distinct experts, uniform, the seed is the rank.

        Shapes: [T, K] int64.
        """
        return _draw_topk_idx(self.num_tokens, self.num_experts, self.num_topk, rank)

    def counts(self) -> Tensor:
        """Count the rows that each rank sends to each expert.

        Shapes: [R, E] int64.
        """
        rows = [self.topk_idx(rank).flatten().bincount(minlength=self.num_experts) for rank in range(self.num_ranks)]
        return torch.stack(rows)

    def demand_rows(self) -> int:
        """Return the rows, padding included, that the fullest rank receives."""
        padded = (self.counts().sum(0) + self.alignment - 1) // self.alignment * self.alignment
        return max(int(padded.view(self.num_ranks, -1).sum(1).max()), self.alignment)


@cache
def _draw_topk_idx(num_tokens: int, num_experts: int, num_topk: int, seed: int) -> Tensor:
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(num_topk, dim=1).indices


@dataclass(frozen=True)
class Session:
    """This process as one rank: its device, and the one stream that it works on."""

    rank: int
    num_ranks: int
    device: torch.device
    stream: torch.cuda.Stream | None

    @property
    def num_gpus(self) -> int:
        """GPUs that the ranks are spread over."""
        return min(self.num_ranks, torch.cuda.device_count()) if self.device.type == "cuda" else 1

    def working(self) -> AbstractContextManager[Any]:
        """Make the rank's stream the current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def finish(self) -> None:
        """Let the device finish."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Let the device finish, then wait on the host for every rank. Collective."""
        self.finish()
        dist.barrier()


def join(device_type: str, backend: str = "gloo") -> Session:
    """Become the rank that the environment names. Collective."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if device_type == "cpu":
        dist.init_process_group(backend)
        return Session(rank, num_ranks, torch.device("cpu"), None)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    return Session(rank, num_ranks, device, torch.cuda.Stream(device))


class HostEvent:
    """What a `torch.cuda.Event` is, by the clock of the host."""

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds from here to `end`."""
        return (end._seconds - self._seconds) * 1e3


@dataclass(frozen=True)
class Captured:
    """A graph of LEAD_BODIES leads, which bring the ranks in step, and of `repeats` bodies between two events.

    Attributes:
        replay: launches it on the current stream; on CPU, calls the bodies.
        begin: the event ahead of the bodies that are timed; each replay records it anew.
        end: the event behind them, likewise.
        repeats: bodies that are timed.
        session: the rank.
    """

    replay: Callable[[], None]
    begin: Any
    end: Any
    repeats: int
    session: Session

    def last_us(self) -> float:
        """Let the device finish; return what one body of the last replay took on this rank, in microseconds."""
        self.session.finish()
        return float(self.begin.elapsed_time(self.end)) * 1e3 / self.repeats


def _node_event(session: Session) -> Any:
    """Make an event that is a node of the graph in which it is recorded."""
    return HostEvent() if session.stream is None else torch.cuda.Event(enable_timing=True, external=True)


@contextmanager
def captured(
    body: Callable[[], None], repeats: int, session: Session, lead: Callable[[], None] | None = None
) -> Iterator[Captured]:
    """Run `lead` and `body` once, capture them as `Captured` says, and give that. Collective.

    Without a `lead`, `body` is one: ranks wait for each other in it.
    """
    lead = lead or body
    begin, end = _node_event(session), _node_event(session)

    def chain() -> None:
        for _ in range(LEAD_BODIES):
            lead()
        begin.record()
        for _ in range(repeats):
            body()
        end.record()

    lead()
    body()
    session.meet()
    if session.stream is None:
        yield Captured(chain, begin, end, repeats, session)
        return
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # a destructor may not run while the stream captures
    try:
        with torch.cuda.graph(graph, stream=session.stream, capture_error_mode="thread_local"):
            chain()
    finally:
        gc.enable()
    session.meet()
    yield Captured(graph.replay, begin, end, repeats, session)
    session.meet()
    graph.reset()


def time_replays(graph: Captured, num_samples: int) -> list[float]:
    """Time a body in each of `num_samples` replays, in microseconds: the mean of all ranks. Collective.

    Ranks that share a GPU are served one after the other, in no fixed order, so that between two bodies one rank is
    ahead of another by nearly a body. In the mean of all that cancels out; the largest of all would count it.
    """
    graph.session.meet()
    for _ in range(WARM_UP_CALLS):
        graph.replay()
    samples = []
    for _ in range(num_samples):
        graph.replay()
        samples.append(graph.last_us())
    return [statistics.fmean(of_ranks) for of_ranks in zip(*gather(samples), strict=True)]


def time_calls(call: Callable[[], object], num_samples: int, session: Session) -> list[float]:
    """Time each of `num_samples` calls on the slowest rank, in microseconds. Collective."""
    session.meet()
    return slowest(times_here(call, num_samples, session))


def times_here(call: Callable[[], object], num_samples: int, session: Session) -> list[float]:
    """Time each of `num_samples` calls on this rank, in microseconds."""
    for _ in range(WARM_UP_CALLS):
        call()
    if session.stream is None:
        return [_host_us(call) for _ in range(num_samples)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_samples + 1)]
    marks[0].record(session.stream)
    for mark in marks[1:]:
        call()
        mark.record(session.stream)
    torch.cuda.synchronize(session.device)
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(marks)]


def slowest(times: list[float]) -> list[float]:
    """Return, sample by sample, the largest of all ranks. Collective."""
    return [max(samples) for samples in zip(*gather(times), strict=True)]


def gather(item: Any) -> list[Any]:
    """Return every rank's item, on every rank. Collective."""
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def _host_us(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def rates(session: Session, nbytes: int) -> dict[str, float]:
    """Measure what the memory of one GPU does while the other ranks wait, in bytes per second. Collective.

    `copy` counts what is read and what is written, `write` is a fill by a kernel, `read` a sum; `peer` is a copy from
    one GPU to another while one goes the other way, counted one way, when the ranks are on several GPUs.
    """
    found = {}
    session.meet()
    if session.rank == 0:
        source, target = (torch.ones(nbytes // 4, device=session.device) for _ in range(2))
        found["copy"] = _rate(lambda: target.copy_(source), 2 * nbytes, session)
        found["write"] = _rate(lambda: target.fill_(2.0), nbytes, session)
        found["read"] = _rate(lambda: target.sum(), nbytes, session)
        if session.num_gpus > 1:
            found["peer"] = peer_rate(nbytes, [(0, 1), (1, 0)])
    session.meet()
    return gather(found)[0]


def _rate(call: Callable[[], object], nbytes: int, session: Session) -> float:
    return nbytes / statistics.median(times_here(call, 10, session)) * 1e6


def peer_rate(nbytes: int, ways: Sequence[tuple[int, int]]) -> float:
    """Copy from one GPU to another along all ways at once; return bytes per second of each way, the best of six."""
    gpus = sorted({gpu for way in ways for gpu in way})
    sources, targets = ({gpu: torch.ones(nbytes // 4, device=f"cuda:{gpu}") for gpu in gpus} for _ in range(2))
    streams = {gpu: torch.cuda.Stream(gpu) for gpu in gpus}
    best = float("inf")
    for _ in range(6):
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        start = time.perf_counter()
        for source, target in ways:
            with torch.cuda.stream(streams[source]):
                targets[target].copy_(sources[source], non_blocking=True)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        best = min(best, time.perf_counter() - start)
    return nbytes / best


def versions(session: Session) -> dict[str, str]:
    """Return what this process runs on."""
    if session.device.type == "cpu":
        return {"torch": torch.__version__}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": torch.__version__, "CUDA": str(torch.version.cuda), "NCCL of torch": nccl}


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Append a result as one line of JSON, at once: what was measured survives a later hang."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
