"""Run one function on every rank: on threads of this process, or on long-lived processes.

A rank function is `function(rank, group, *args)`; `group` is what `Arena.open` takes. For processes the function, its
arguments and its result travel by pickle, so it must be a module-level function of a file that `sys.path` finds.
Every wait has a limit: a hang is a failure with the place where each rank stood.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from epbuf.windows.local import virtual_ranks

LIMIT_S = 60.0
START_LIMIT_S = 120.0  # importing torch on a loaded machine
GROUP_SIZES = (1, 2, 4, 8)
PRELOAD = ["torch.distributed", "epbuf.autograd", "pytest"]  # imported once, in the server that forks every rank


class RanksFailed(Exception):
    """What went wrong on every rank, in words."""


@dataclasses.dataclass
class Result:
    """How one rank ended: with a value, with an error, or not at all (`died`)."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    died: bool = False


def virtual(num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """Call `function` on one thread per rank; return the results in rank order.

    Raises: the first error of any rank, caused by a RanksFailed that holds every rank's traceback.
    """
    results = [Result() for _ in range(num_ranks)]
    order: list[int] = []

    def run(rank: int, member: Any) -> None:
        try:
            results[rank].value = function(rank, member, *args)
        except BaseException as error:
            results[rank].error, results[rank].trace = error, traceback.format_exc()
            order.append(rank)

    threads = [
        threading.Thread(target=run, args=(rank, member), name=f"rank {rank}", daemon=True)
        for rank, member in enumerate(virtual_ranks(num_ranks))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    _fail_if_stuck(threads, limit_s)
    return _values(results, order)


def _fail_if_stuck(threads: list[threading.Thread], limit_s: float) -> None:
    stuck = [thread for thread in threads if thread.is_alive()]
    if not stuck:
        return
    frames = sys._current_frames()
    places = [
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in stuck
        if thread.ident in frames
    ]
    raise RanksFailed(f"{len(stuck)} ranks still running after {limit_s} s\n" + "\n".join(places))


def _values(results: list[Result], order: list[int]) -> list[Any]:
    if not order:
        return [result.value for result in results]
    traces = "\n".join(f"rank {rank}:\n{results[rank].trace}" for rank in order)
    first = results[order[0]].error
    assert first is not None
    raise first from RanksFailed(f"{len(order)} of {len(results)} ranks failed\n{traces}")


class Ranks:
    """Long-lived processes, one per rank, joined in gloo groups of 1, 2, 4, 8 (and all) of them over loopback.

    Each takes `environment` over and calls `setup(rank)`, a module-level function, before it does anything else.
    """

    def __init__(
        self, num_ranks: int, directory: Path, environment: Mapping[str, str] | None = None,
        setup: Callable[[int], object] | None = None,
    ) -> None:  # fmt: skip
        self.num_ranks = num_ranks
        store = directory / f"store-{os.getpid()}-{time.monotonic_ns()}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            arguments = (rank, num_ranks, str(store), there, dict(environment or {}), setup)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.connections.append(here)
        started = self._collect(range(num_ranks), START_LIMIT_S)
        _values(started, [rank for rank, result in enumerate(started) if result.error])

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Call `function` on the first `num_ranks` processes; return the results, or raise the first error."""
        results = self.outcomes(num_ranks, function, *args, limit_s=limit_s)
        failed = [rank for rank, result in enumerate(results) if result.error]
        return _values(results, sorted(failed, key=lambda rank: _is_consequence(results[rank])))

    def outcomes(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S
    ) -> list[Result]:
        """Call `function` on the first `num_ranks` processes; return how each of them ended."""
        request = pickle.dumps((num_ranks, sys.path, pickle.dumps((function, args))))
        for connection in self.connections[:num_ranks]:
            connection.send_bytes(request)
        return self._collect(range(num_ranks), limit_s)

    def _collect(self, ranks: range, limit_s: float) -> list[Result]:
        """Read one answer from each rank; kill all processes when one does not answer in time."""
        results = [Result() for _ in ranks]
        waiting: dict[Any, int] = {self.connections[rank]: rank for rank in ranks}
        deadline = time.monotonic() + limit_s
        while waiting:
            ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                self.kill()
                raise RanksFailed(f"ranks {late} did not answer within {limit_s} s and were killed")
            for connection in ready:
                rank = waiting.pop(connection)
                results[rank] = _receive(connection, rank)
        return results

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End the processes: closing its pipe ends a rank; one that stays is killed."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
        self.processes, self.connections = [], []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Pool:
    """Processes for a whole session, started at the first use and again after one of them was lost."""

    def __init__(
        self, directory: Path, num_ranks: int = 4, environment: Mapping[str, str] | None = None,
        setup: Callable[[int], object] | None = None,
    ) -> None:  # fmt: skip
        self._start: Callable[[], Ranks] = lambda: Ranks(num_ranks, directory, environment, setup)
        self.ranks: Ranks | None = None

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Call `function` on the first `num_ranks` of them; return the results, or raise the first error."""
        if self.ranks is None or not self.ranks.alive:
            self.close()
            self.ranks = self._start()
        return self.ranks.run(num_ranks, function, *args, limit_s=limit_s)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None


def _is_consequence(result: Result) -> bool:
    """Tell whether a rank failed only because another one did."""
    return type(result.error).__name__ == "PeerTimeoutError"


def _receive(connection: Connection, rank: int) -> Result:
    try:
        result = pickle.loads(connection.recv_bytes())
        assert isinstance(result, Result)
        return result
    except (EOFError, ConnectionResetError):
        return Result(error=RanksFailed(f"rank {rank} died"), trace=f"rank {rank} died", died=True)


def _serve(
    rank: int, num_ranks: int, store: str, connection: Connection, environment: dict[str, str],
    setup: Callable[[int], object] | None,
) -> None:  # fmt: skip
    """Join the groups, then call what the parent sends until its pipe closes."""
    os.environ.update(environment)
    if setup is not None:
        setup(rank)
    groups = _join(rank, num_ranks, store)
    connection.send_bytes(pickle.dumps(Result()))
    while True:
        try:
            size, sys.path[:], call = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            break
        connection.send_bytes(_answer(call, rank, groups[size]))
    os._exit(0)  # nothing of a rank is worth the seconds that an orderly exit of torch takes


def _join(rank: int, num_ranks: int, store: str) -> dict[int, Any]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=START_LIMIT_S),
    )
    sizes = sorted({size for size in GROUP_SIZES if size <= num_ranks} | {num_ranks})
    return {size: dist.new_group(list(range(size))) for size in sizes}


def _answer(call: bytes, rank: int, group: Any) -> bytes:
    try:
        function, args = pickle.loads(call)
        return pickle.dumps(Result(value=function(rank, group, *args)))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            answer = pickle.dumps(Result(error=error, trace=trace))
            pickle.loads(answer)
            return answer
        except Exception:
            return pickle.dumps(Result(error=RanksFailed(f"{type(error).__name__}: {error}"), trace=trace))
