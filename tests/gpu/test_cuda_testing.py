"""`epbuf.testing`, debug mode and pipeline schedules on CUDA: a capture is a graph, and the allocator is watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import GpuPool, places
from routings import base_config
from torch import Tensor

import epbuf
from epbuf.errors import NativeError
from epbuf.testing import UnsafeStepError, assert_capture_safe
from graphs import pipeline

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

HIDDEN, TOKENS, TOPK = 16, 12, 3


def _open(group: Any, num_ranks: int, window: str, debug: bool = False) -> epbuf.Arena:
    config = base_config(num_ranks, token_dtype="fp32", expert_alignment=4)
    group = None if window == "local" else group
    return epbuf.Arena.open(epbuf.Plan.build(config), group, device="cuda", window=window, debug=debug)


def _draw(arena: epbuf.Arena) -> tuple[Tensor, Tensor]:
    ids = torch.rand(TOKENS, arena.plan.config.num_experts, device="cuda").topk(TOPK).indices
    return torch.randn(TOKENS, HIDDEN, device="cuda"), ids


def _vary(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return torch.randn_like(x), ids.roll(1, 0)


def _echo(arena: epbuf.Arena, x: Tensor, ids: Tensor) -> Tensor:
    with arena.acquire() as lease, torch.no_grad():
        return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)


def _rule(rank: int, group: Any, num_ranks: int, window: str, kind: str) -> str:
    kept: list[Tensor] = []
    pool = torch.cuda.MemPool()

    def step(x: Tensor, ids: Tensor) -> Tensor:
        y = _echo(arena, x, ids)
        if kind == "host read":
            y = y * float(x[0, 0])
        elif kind == "left behind":
            kept.append(y + 1)
        elif kind == "allocations" and torch.cuda.is_current_stream_capturing():
            with torch.cuda.use_mem_pool(pool):
                torch.empty(1 << 22, device="cuda").zero_()
        return y

    with _open(group, num_ranks, window) as arena:
        try:
            assert_capture_safe(step, *_draw(arena), vary=_vary, arenas=arena)
        except UnsafeStepError as error:
            return error.rule
        return ""


@places((1, "local"), (2, "torch_symm"))
@pytest.mark.parametrize("kind", ["", "host read", "left behind", "allocations"])
def test_step_breaks_the_rule_that_is_named(pool: GpuPool, num_ranks: int, window: str, kind: str) -> None:
    assert pool.run(num_ranks, _rule, num_ranks, window, kind) == [kind] * num_ranks


def _dead_canary(rank: int, group: Any, num_ranks: int, window: str) -> str:
    def step(x: Tensor, ids: Tensor, spoil: Tensor) -> Tensor:
        with arena.acquire() as lease, torch.no_grad():
            recv = epbuf.dispatch(lease, x, ids)
            past_the_end = recv.offs[-1:].long().clamp(max=len(recv.tokens) - 1)
            value = torch.where(spoil > 0, 1.0, lease.recv_tokens[past_the_end])
            lease.recv_tokens.index_copy_(0, past_the_end, value)
            return epbuf.combine(lease, recv.tokens)

    with _open(group, num_ranks, window, debug=True) as arena:
        clean, spoilt = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
        captured = epbuf.CapturedStep.capture(arena, step, (*_draw(arena), clean))
        for _ in range(3):
            captured(*_draw(arena), clean)
        captured.check()
        captured(*_draw(arena), spoilt)
        captured(*_draw(arena), clean)
        try:
            captured.check()
        except NativeError as error:
            return str(error)
        finally:
            captured.close()
        return ""


@places((1, "local"), (2, "torch_symm"))
def test_dead_canary_in_a_replay_is_raised_by_check(pool: GpuPool, num_ranks: int, window: str) -> None:
    for message in pool.run(num_ranks, _dead_canary, num_ranks, window):
        assert "frame 0" in message and "past the last zone" in message


def _pipeline(rank: int, group: Any, kind: str) -> pipeline.Found:
    return pipeline.compare(pipeline.Options(kind, num_steps=2), group, torch.device("cuda"))


@places((2, "torch_symm"))
@pytest.mark.parametrize("kind", pipeline.KINDS)
def test_captured_schedule_equals_one_by_one(pool: GpuPool, num_ranks: int, window: str, kind: str) -> None:
    for found in pool.run(num_ranks, _pipeline, kind):
        assert found.difference == 0
        assert all(used == planned for used, planned in found.num_frames)
