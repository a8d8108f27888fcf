"""Contract rules 4 and 10 inside replays: overflow and bad ids reach all ranks, and the next replay is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import GpuPool, open_arena, places
from ranks import raised
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf.errors import CapacityError, ConfigError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CAPACITY = 64  # the balanced routing fits; one expert for all tokens of two ranks or more does not


def _tokens(rank: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, a routing that fits, and one that needs 36 rows of each rank on rank 0."""
    inputs = draw_inputs(named_case("balanced", num_ranks, 1, "fp32"), rank, True, "cuda")
    return inputs.x, inputs.topk_idx, torch.zeros_like(inputs.topk_idx)


def _config(num_ranks: int, **changes: object) -> epbuf.EpConfig:
    return base_config(num_ranks, token_dtype="fp32", recv_capacity_per_rank=CAPACITY, **changes)


def _reactions(rank: int, group: Any, window: str, num_ranks: int, policy: str) -> dict[str, Any]:
    x, easy, hard = _tokens(rank, num_ranks)
    seen: list[str] = []
    with open_arena(
        group, window, _config(num_ranks, overflow_policy="error" if policy == "error" else "drop")
    ) as arena:

        def step(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with arena.acquire() as lease, torch.no_grad():
                recv = epbuf.dispatch(lease, x, ids)
                return epbuf.combine(lease, recv.tokens), recv.overflow.clone(), recv.total_recv_tokens.clone()

        reaction: Any = {"callback": lambda _: seen.append("called"), "error": None}.get(policy, policy)
        captured = epbuf.CapturedStep.capture(arena, step, (x, easy), on_overflow=reaction)
        flags, messages = [], []
        for number in range(4):
            y, flag, demand = captured(x, hard if number in (1, 2) else easy)
            flags.append(float(flag))
            if number in (1, 2):
                assert int(demand) == (36 * num_ranks if rank == 0 else 0)
            else:
                assert_same(y, x * 3, f"y of replay {number}")
            if policy in ("raise", "error") and number in (1, 2):
                reader = captured.check if number == 1 else lambda: captured(x, easy)  # or the next call
                messages.append(raised(CapacityError, reader))
            elif number == 1:
                captured.check()
        captured.check()
        captured.close()
        return {"flags": flags, "messages": messages, "seen": seen, "overflows": arena.report()["num_overflows"]}


@places((2, "torch_symm"), (4, "nccl"))
@pytest.mark.parametrize("policy", ["raise", "skip", "callback", "error"])
def test_overflow_in_a_replay(pool: GpuPool, num_ranks: int, window: str, policy: str) -> None:
    """Rule 10: a replay that overflows completes and flags all ranks; what happens then is on_overflow's to say, at the
    next check() or call; the next replay is right.
    """
    for found in pool.run(num_ranks, _reactions, window, num_ranks, policy):
        assert found["flags"] == [0, 1, 1, 0] and found["overflows"] == 2
        assert len(found["messages"]) == (2 if policy in ("raise", "error") else 0)
        assert all(str(CAPACITY) in m and str(36 * num_ranks) in m for m in found["messages"])
        assert found["seen"] == (["called"] * 2 if policy == "callback" else [])


def _bad_ids(rank: int, group: Any, window: str, num_ranks: int) -> str:
    x, ids, _ = _tokens(rank, num_ranks)
    bad = ids.clone()
    if rank == 1:
        bad[4, 0] = 99
    with open_arena(group, window, _config(num_ranks, validate_ids=True)) as arena:

        def step(x: Tensor, ids: Tensor) -> Tensor:
            with arena.acquire() as lease, torch.no_grad():
                return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)

        captured = epbuf.CapturedStep.capture(arena, step, (x, ids))
        captured(x, bad)
        message = raised(ConfigError, captured.check)
        assert_same(captured(x, ids), x * 3, "y of the next replay")
        captured.check()
        captured.close()
    return message


@places((2, "torch_symm"))
def test_bad_id_in_a_replay(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 4: captured, a bad id is counted and raised on every rank at the step's check."""
    for message in pool.run(num_ranks, _bad_ids, window, num_ranks):
        assert "rank 1" in message and "token 4" in message and "99" in message


def _found_inf(rank: int, group: Any, window: str, num_ranks: int) -> list[bool]:
    """Train a scale by fused AdamW whose found_inf is the overflow flag; tell which replays changed its state."""
    x, easy, hard = _tokens(rank, num_ranks)
    scale = torch.nn.Parameter(torch.ones(16, device="cuda"))
    optimizer = torch.optim.AdamW([scale], lr=0.1, fused=True, capturable=True)
    with open_arena(group, window, _config(num_ranks)) as arena:

        def step(x: Tensor, ids: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, ids)
                mask = recv.row_mask()[:, None]
                rows = torch.where(mask, torch.where(mask, recv.tokens, 0) * scale, 0)
                loss = epbuf.combine(lease, rows).square().mean()
                optimizer.found_inf = recv.overflow.squeeze().clone()  # type: ignore[attr-defined]
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = epbuf.CapturedStep.capture(arena, step, (x, easy), restore=(scale, optimizer))

        def state() -> list[Tensor]:
            return [scale.detach().clone(), *(v.clone() for v in optimizer.state[scale].values())]

        changed = []
        for ids in (easy, hard, hard, easy, hard, easy):
            before = state()
            captured(x, ids)
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, state(), strict=True)))
        captured.close()
    assert not bool(scale.isnan().any())
    return changed


@places((2, "torch_symm"), (4, "nccl"))
def test_overflow_leaves_weights_alone(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 10: with recv.overflow as found_inf a captured optimiser skips just the steps that overflowed somewhere."""
    for changed in pool.run(num_ranks, _found_inf, window, num_ranks):
        assert changed == [True, False, False, True, False, True]
