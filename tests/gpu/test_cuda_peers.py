"""Ranks that stay away, refuse or go another way on CUDA: who is named, where, and that life goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpus import GpuPool, open_arena, places
from graphed import captured
from ranks import raised
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf.errors import ConfigError, LeaseError, PeerTimeoutError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

TIMEOUT_S = 3
GRACE_S = 3


def _inputs(rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return tokens and a balanced routing: y is three times x."""
    inputs = draw_inputs(named_case("balanced", num_ranks), rank, True, "cuda")
    return inputs.x, inputs.topk_idx


def _good_round(arena: epbuf.Arena, x: Tensor, ids: Tensor) -> None:
    with arena.acquire() as lease, torch.no_grad():
        assert_same(epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens), x * 3, "y of a good round")
    arena.check()


def _absent(rank: int, group: Any, window: str, num_ranks: int, phase: str) -> dict[str, Any]:
    """Rank 1 leaves out what owes `phase`; the others must say so, and all work on in a new arena."""
    x, ids = _inputs(rank, num_ranks)
    x.requires_grad_()
    config = base_config(num_ranks, timeout_s=TIMEOUT_S)
    arena = open_arena(group, window, config)
    steps: dict[str, Callable[[dict[str, Any]], object]] = {
        "COUNT": lambda s: s.update(recv=epbuf.dispatch(s["lease"], x, ids)),
        "READY": lambda s: s.update(y=epbuf.combine(s["lease"], s["recv"].tokens)),
        "GO": lambda s: s["y"].backward(torch.ones_like(s["y"])),
    }
    state: dict[str, Any] = {"lease": arena.acquire()}
    for name, step in steps.items():
        if name == phase and rank == 1:
            time.sleep(TIMEOUT_S + 2)  # ABORT has come by then
            break
        step(state)
        if name == phase:
            break
        torch.cuda.synchronize()
    began = time.monotonic()
    found = {"message": raised(PeerTimeoutError, arena.check), "took": time.monotonic() - began}
    found["again"] = raised(PeerTimeoutError, arena.check)
    assert float(torch.ones(100, device="cuda").sum()) == 100  # the context lives
    state["lease"].release()
    del state
    if rank == 1:
        dist.barrier(group)  # it may be dead for all the others know: their close() is local
    arena.close()
    if rank != 1:
        dist.barrier(group)
    with open_arena(group, window, config) as fresh:
        _good_round(fresh, x.detach(), ids)
    return found


@places((2, "nccl"), (4, "torch_symm"))
@pytest.mark.parametrize("phase", ["COUNT", "READY", "GO"])
def test_rank_that_never_arrives(pool: GpuPool, num_ranks: int, window: str, phase: str) -> None:
    """Section 5: PeerTimeoutError on the others, in time, with rank and phase; context and processes go on."""
    results = pool.run(num_ranks, _absent, window, num_ranks, phase, limit_s=30)
    for rank, found in enumerate(results):
        if rank != 1:
            assert f"{phase} of rank 1" in found["message"] and "last progress" in found["message"], found["message"]
            assert f"{TIMEOUT_S} s" in found["message"] and f"{phase} of rank 1" in found["again"]
            assert found["took"] < TIMEOUT_S + GRACE_S


def _absent_from_replay(rank: int, group: Any, window: str) -> str:
    """Rank 1 replays once less. The others' next call raises by itself, and later kernels do nothing."""
    x, ids = _inputs(rank, 2)
    config = base_config(2, timeout_s=1)
    arena = open_arena(group, window, config)

    def step() -> Tensor:
        with arena.acquire() as lease, torch.no_grad():
            return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)

    graph, y = captured(step)
    graph.replay()
    assert_same(y, x * 3, "y of the first replay")
    y.fill_(7)
    if rank == 1:
        time.sleep(2)
    else:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert_same(y, torch.full_like(y, 7), "y of replays that found nobody")
    message = raised(PeerTimeoutError, step if rank == 0 else arena.check)
    del graph
    arena.close()
    with open_arena(group, window, config) as fresh:
        _good_round(fresh, x, ids)
    return message


@places((2, "torch_symm"), (2, "nccl"))
def test_rank_that_does_not_replay(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Section 5: a replay that waits in vain ends in time and poisons; the host hears of it at the next call."""
    message = pool.run(num_ranks, _absent_from_replay, window)[0]
    assert "COUNT of rank 1" in message


def _leaves(rank: int, group: Any, window: str) -> str:
    """Rank 1 leaves its `with` block by an exception between dispatch and combine; nobody waits 600 s for it."""
    x, ids = _inputs(rank, 2)
    config = base_config(2, timeout_s=600)
    if rank == 1:
        with (
            pytest.raises(ZeroDivisionError),
            pytest.warns(ResourceWarning, match="ZeroDivisionError"),
            open_arena(group, window, config) as arena,
            arena.acquire() as lease,
        ):
            epbuf.dispatch(lease, x, ids)
            torch.cuda.synchronize()
            raise ZeroDivisionError
        return ""
    with open_arena(group, window, config) as arena:

        def combine_and_check() -> None:
            with arena.acquire() as lease, torch.no_grad():
                epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)
                arena.check()

        return raised(PeerTimeoutError, combine_and_check)


@places((2, "torch_symm"), (2, "nccl"))
def test_rank_that_leaves_by_an_exception(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Section 4: leaving `with` by an exception reaches kernels that wait, by ABORT and not by time-out."""
    assert "rank 1" in pool.run(num_ranks, _leaves, window, limit_s=30)[0]


def _other_frame(rank: int, group: Any, window: str) -> str:
    x, ids = _inputs(rank, 2)
    arena = open_arena(group, window, base_config(2, timeout_s=20), num_frames=2)

    def dispatch_and_check() -> None:
        with arena.acquire(rank) as lease:
            epbuf.dispatch(lease, x, ids)
            arena.check()

    message = raised(LeaseError, dispatch_and_check)
    arena.close()
    return message


@places((2, "torch_symm"))
def test_ranks_on_different_frames(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 15: ranks that dispatch on different frames all raise LeaseError with both numbers, not a time-out."""
    for message in pool.run(num_ranks, _other_frame, window, limit_s=15):
        assert "frame 0" in message and "frame 1" in message


def _refused_dispatch(arena: epbuf.Arena, rank: int, x: Tensor, ids: Tensor, hears: str) -> str:
    """Rank 1 passes another dtype and raises at once; the other one hears of it at its next call, or by check()."""
    with arena.acquire() as lease:
        if rank == 1:
            return raised(ConfigError, lambda: epbuf.dispatch(lease, x.double(), ids))
        recv = epbuf.dispatch(lease, x, ids)
        if hears == "check":
            return raised(ConfigError, arena.check)
        torch.cuda.synchronize()
        return raised(ConfigError, lambda: epbuf.combine(lease, recv.tokens))


def _refused_combine(arena: epbuf.Arena, rank: int, x: Tensor, ids: Tensor, hears: str) -> str:
    """Likewise in combine, by a tensor with too few rows; the other one's y is not written."""
    with arena.acquire() as lease:
        tokens = epbuf.dispatch(lease, x, ids).tokens.detach()
        if rank == 1:
            return raised(ConfigError, lambda: epbuf.combine(lease, tokens[:3]))
        out = torch.full_like(x, 7)
        epbuf.combine(lease, tokens, out=out)
        torch.cuda.synchronize()
        assert_same(out, torch.full_like(x, 7), "y of a refused combine")
    if hears == "check":
        return raised(ConfigError, arena.check)
    with arena.acquire() as lease:
        return raised(ConfigError, lambda: epbuf.dispatch(lease, x, ids))


def _refusals(rank: int, group: Any, window: str, op: str) -> list[str]:
    x, ids = _inputs(rank, 2)
    refuse = _refused_dispatch if op == "dispatch" else _refused_combine
    with open_arena(group, window, base_config(2, timeout_s=20)) as arena:
        messages = []
        for hears in ("check", "call", "check"):
            messages.append(refuse(arena, rank, x, ids, hears))
            _good_round(arena, x, ids)
        assert arena.report()["num_refusals"] == 3
    return messages


@places((2, "torch_symm"), (2, "nccl"))
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_refusal_of_one_rank(pool: GpuPool, num_ranks: int, window: str, op: str) -> None:
    """Section 4: the refusing rank raises its own error at once, the other one with rank and cause at its next call or
    check(), nobody waits, and the next round is right.
    """
    others, own = pool.run(num_ranks, _refusals, window, op, limit_s=30)
    cause = {"dispatch": "wrong dtype", "combine": "wrong shape"}[op]
    assert all("rank 1" in message and cause in message for message in others), others
    assert not any("rank 1 refused" in message for message in own), own


def _refused_in_capture(rank: int, group: Any, window: str) -> str:
    """Rank 0 gives up a capture in which it refused: nothing was sent, so the next refusal of rank 1 is news to it."""
    x, ids = _inputs(rank, 2)
    with open_arena(group, window, base_config(2, timeout_s=20)) as arena:
        _good_round(arena, x, ids)
        if rank == 0:
            with arena.acquire() as lease, pytest.raises(ConfigError), torch.cuda.graph(torch.cuda.CUDAGraph()):
                epbuf.dispatch(lease, x.double(), ids)
        message = _refused_dispatch(arena, rank, x, ids, "check")
        _good_round(arena, x, ids)
    return message


@places((2, "torch_symm"))
def test_refusal_after_one_in_a_failed_capture(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Section 4: an own refusal that was only captured and never ran does not hide a peer's."""
    assert "rank 1 refused" in pool.run(num_ranks, _refused_in_capture, window, limit_s=30)[0]
