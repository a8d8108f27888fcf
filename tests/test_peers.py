"""A rank that dies, leaves or stays away: the others say who and where, in time, and can close."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks, raised, size_of, virtual
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf.errors import LeaseError, PeerTimeoutError

Spread = Callable[..., list[Any]]
TIMEOUT_S = 5
GRACE_S = 2


def open_arena(group: Any, timeout_s: float = TIMEOUT_S, num_frames: int = 1) -> epbuf.Arena:
    config = base_config(size_of(group), timeout_s=timeout_s)
    return epbuf.Arena.open(epbuf.Plan.build(config, schedule=epbuf.Schedule(num_frames)), group)


def tokens(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    case = named_case("balanced", num_ranks)
    return draw_inputs(case, rank, True).x, case.topk_idx[rank]


def _failure(call: Callable[[], object]) -> tuple[str, float]:
    """Return the message of the PeerTimeoutError that a call raises, and how long it took."""
    began = time.monotonic()
    return raised(PeerTimeoutError, call), time.monotonic() - began


def _killed(rank: int, group: Any, moment: str) -> dict[str, Any]:
    """Rank 1 is killed by SIGKILL, either before it enters dispatch or while it waits there for rank 2."""
    x, ids = tokens(rank, 3)
    arena = open_arena(group)
    lease = arena.acquire()
    if rank == 1 and moment == "count":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 2 and moment == "arrived":
        time.sleep(1.5)
    message, took = _failure(lambda: epbuf.dispatch(lease, x, ids))
    again, took_again = _failure(arena.check)
    lease.release()
    later, took_later = _failure(lambda: epbuf.dispatch(arena.acquire(), x, ids))
    began = time.monotonic()
    arena.close()
    return {
        "message": message, "took": took, "again": again, "later": later,
        "then": took_again + took_later + time.monotonic() - began,
    }  # fmt: skip


@pytest.mark.parametrize("moment", ["count", "arrived"])
def test_killed_rank_is_named_in_time(moment: str, tmp_path: Path) -> None:
    """A rank killed in dispatch: the others raise PeerTimeoutError with rank and phase within timeout_s + 2 s,
    raise it again from every later call at once, and can close.
    """
    with Ranks(3, tmp_path) as ranks:
        results = ranks.outcomes(3, _killed, moment)
    assert results[1].died
    for rank in (0, 2):
        found = results[rank].value
        assert found is not None, results[rank].trace
        assert "rank 1" in found["message"] and moment in found["message"].lower()
        assert found["took"] < TIMEOUT_S + GRACE_S
        assert "rank 1" in found["again"] and "rank 1" in found["later"]
        assert found["then"] < GRACE_S


def _absent(rank: int, group: Any, phase: str) -> str | None:
    """Rank 1 issues fewer ops than rank 0, which must name the phase that rank 1 owes."""
    x, ids = tokens(rank, 2)
    x.requires_grad_()
    with open_arena(group, 1.0) as arena:
        lease = arena.acquire()
        steps: dict[str, Callable[[], Any]] = {}
        steps["COUNT"] = lambda: epbuf.dispatch(lease, x, ids)
        steps["READY"] = lambda: epbuf.combine(lease, (recv.tokens * 2.0))
        steps["GO"] = lambda: y.backward(torch.ones_like(y))
        for name, step in steps.items():
            if name == phase:
                if rank == 1:
                    time.sleep(2.5)  # keep the window of this rank open while rank 0 waits
                    return None
                return _failure(step)[0]
            if name == "COUNT":
                recv = step()
            else:
                y = step()
    raise AssertionError("no such phase")


@pytest.mark.parametrize("phase", ["COUNT", "READY", "GO"])
def test_missing_rank_is_named_with_its_phase(phase: str) -> None:
    """The time-out names the rank, the phase, both epochs, and what every rank did last."""
    message = virtual(2, _absent, phase)[0]
    assert "rank 1" in message and phase in message and "1 s" in message
    assert message.count("rank 0") >= 1 and "last progress" in message


def _poisoned_then_new(rank: int, group: Any, other: Any) -> Tensor:
    x, ids = tokens(rank, 2)
    arena = open_arena(group[rank], 1.0)
    if rank == 0:
        with arena.acquire() as lease:
            _failure(lambda: epbuf.dispatch(lease, x, ids))
    else:
        time.sleep(1.5)
        with arena.acquire() as lease:
            _failure(lambda: epbuf.dispatch(lease, x, ids))
    arena.close()
    with open_arena(other[rank], 20) as arena, arena.acquire() as lease:
        return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)


def test_new_arena_after_a_time_out() -> None:
    """A poisoned arena fails on every rank and closes locally; a new one works in the same processes."""
    from epbuf.windows.local import virtual_ranks

    def run(rank: int, _: Any) -> Tensor:
        return _poisoned_then_new(rank, groups[0], groups[1])

    groups = [virtual_ranks(2), virtual_ranks(2)]
    for rank, y in enumerate(virtual(2, run)):
        assert_same(y, tokens(rank, 2)[0] * 3, f"y of rank {rank}")


def _leaves_in_combine(rank: int, group: Any) -> str:
    x, ids = tokens(rank, 3)
    if rank == 2:
        with (
            pytest.raises(ZeroDivisionError),
            pytest.warns(ResourceWarning, match="ZeroDivisionError"),
            open_arena(group, 600) as arena,
            arena.acquire() as lease,
        ):
            epbuf.dispatch(lease, x, ids)
            raise ZeroDivisionError
        return ""
    with open_arena(group, 600) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, ids)
        return _failure(lambda: epbuf.combine(lease, recv.tokens))[0]


def test_rank_that_leaves_between_ops() -> None:
    """An exception between dispatch and combine reaches all peers by ABORT, not by time-out."""
    first, second, _ = virtual(3, _leaves_in_combine, limit_s=20)
    assert "rank 2" in first and "rank 2" in second


def _leaves_in_backward(rank: int, group: Any) -> str:
    x, ids = tokens(rank, 2)
    x.requires_grad_()

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    def step() -> None:
        with open_arena(group, 600) as arena, arena.acquire() as lease:
            rows = epbuf.dispatch(lease, x, ids).tokens * 2.0
            if rank == 1:
                rows.register_hook(fail)
            y = epbuf.combine(lease, rows)
            y.backward(torch.ones_like(y))

    if rank == 0:
        return raised(PeerTimeoutError, step)
    with pytest.warns(ResourceWarning):
        return raised(ZeroDivisionError, step)


def test_rank_that_leaves_in_backward() -> None:
    """An exception in one rank's experts' backward reaches the peer in its dispatch backward, by ABORT."""
    message, _ = virtual(2, _leaves_in_backward, limit_s=20)
    assert "rank 1" in message


def _refused_acquire(rank: int, group: Any) -> str:
    x, ids = tokens(rank, 2)
    if rank == 1:
        with (
            pytest.raises(LeaseError, match="frame=9"),
            pytest.warns(ResourceWarning),
            open_arena(group, 600) as arena,
        ):
            arena.acquire(frame=9)
        return ""
    with open_arena(group, 600) as arena, arena.acquire() as lease:
        return _failure(lambda: epbuf.dispatch(lease, x, ids))[0]


def test_refused_acquire_is_local_and_leaving_tells_the_peers() -> None:
    """A refused acquire raises on its rank alone; leaving `with` by it sets ABORT, so the peer does not wait."""
    message, _ = virtual(2, _refused_acquire, limit_s=20)
    assert "rank 1" in message


def _other_op(rank: int, group: Any) -> str:
    x, ids = tokens(rank, 2)
    with open_arena(group, 600, num_frames=2) as arena:
        lease = arena.acquire()
        recv = epbuf.dispatch(lease, x, ids)
        if rank == 0:
            return raised(LeaseError, lambda: epbuf.combine(lease, recv.tokens))
        return raised(LeaseError, lambda: epbuf.dispatch(arena.acquire(), x, ids))


def test_ranks_in_different_ops_all_raise() -> None:
    """Rank 0 combines while rank 1 dispatches again: LeaseError on both with both ops, not a time-out."""
    for message in virtual(2, _other_op, limit_s=20):
        assert "combine" in message and ("route" in message or "dispatch" in message)


def _poisoned_exit(rank: int, group: Any) -> bool:
    x, ids = tokens(rank, 2)
    with open_arena(group, 0.5) as arena:
        if rank == 0:
            with arena.acquire() as lease:
                _failure(lambda: epbuf.dispatch(lease, x, ids))
            with arena.acquire() as lease:
                _failure(lambda: epbuf.dispatch(lease, x, ids))
            return True
        time.sleep(1.5)
        _failure(arena.check)
        return True


def test_poisoned_arena_is_known_to_both_ranks() -> None:
    """After a time-out every later call raises at once, check() tells the rank that was late, and leaving is local."""
    assert virtual(2, _poisoned_exit, limit_s=20) == [True, True]
