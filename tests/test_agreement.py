"""Calls that open or grow memory are collective: what one rank cannot, or means otherwise, every rank raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import raised, size_of, virtual
from torch import Tensor

import epbuf
from epbuf.errors import ConfigError, PlanMismatchError

LIMIT_S = 20.0  # whoever waits for a rank that has left waits longer


def plan_of(num_ranks: int, num_frames: int = 1) -> epbuf.Plan:
    config = epbuf.EpConfig(
        num_ranks=num_ranks, num_experts=num_ranks, num_topk=1, hidden=4, max_tokens_per_rank=3, token_dtype="fp32"
    )
    return epbuf.Plan.build(config, epbuf.Schedule(num_frames))


def memory_of(plan: epbuf.Plan, past: int = 0) -> Tensor:
    room = torch.zeros(plan.total_bytes + 512 + past, dtype=torch.uint8)
    start = -room.data_ptr() % 256 + past
    return room[start : start + plan.total_bytes]


def made_in_inference_mode(plan: epbuf.Plan) -> Tensor:
    with torch.inference_mode():
        return memory_of(plan)


def opens(plan: epbuf.Plan, group: Any, **words: Any) -> epbuf.Arena:
    return epbuf.Arena.open(plan, group, **({"engine": "external"} | words))


Call = Callable[[epbuf.Plan, Any], epbuf.Arena]

ODD: dict[str, tuple[Call, str]] = {
    "no_plan": (lambda plan, group: opens(None, group), "takes a Plan, found NoneType"),  # type: ignore[arg-type]
    "plan_of_another_size": (lambda plan, group: opens(plan_of(3), group), "num_ranks=3 and the group has 2"),
    "engine": (lambda plan, group: opens(plan, group, engine="extern"), 'engine="extern" does not exist'),
    "window": (lambda plan, group: opens(plan, group, window="pool"), 'window="pool" does not exist'),
    "device": (lambda plan, group: opens(plan, group, device="tpu"), "tpu"),
    "another_engine": (lambda plan, group: opens(plan, group, engine="native"), 'engine="native"'),
    "another_window": (lambda plan, group: opens(plan, group, window="own"), 'window="own"'),
    "adopted": (lambda plan, group: epbuf.Arena.adopt(plan, memory_of(plan), group), "Arena.adopt"),
}


def _opened(rank: int, group: Any, word: str) -> str:
    plan = plan_of(2)
    call = ODD[word][0] if rank == 1 else opens
    message = raised(ConfigError, lambda: call(plan, group))
    opens(plan, group).close()
    return message


@pytest.mark.parametrize("word", ODD)
def test_open_that_one_rank_means_otherwise_raises_on_all(spread: Callable[..., list[Any]], word: str) -> None:
    """The rank is named; afterwards the same group opens an arena."""
    mine, other = ODD[word][1], "rank 1"
    first, second = spread(2, _opened, word, limit_s=LIMIT_S)
    assert mine in first and other in first
    assert mine in second


BROUGHT: dict[str, tuple[Callable[[epbuf.Plan], Any], str]] = {
    "no_plan": (memory_of, "takes a Plan"),
    "short": (lambda plan: memory_of(plan)[:-1], "bytes for the plan"),
    "unaligned": (lambda plan: memory_of(plan, 16), "multiple of 256 bytes"),
    "no_tensor": (lambda plan: None, "found NoneType"),
    "inference_mode": (made_in_inference_mode, "inference_mode"),
}


def _adopted(rank: int, group: Any, word: str) -> str:
    plan: Any = None if (word, rank) == ("no_plan", 1) else plan_of(2)
    make = BROUGHT[word][0] if rank == 1 else memory_of
    return raised(ConfigError, lambda: epbuf.Arena.adopt(plan, make(plan_of(2)), group))


@pytest.mark.parametrize("word", BROUGHT)
def test_memory_that_one_rank_cannot_lie_in_raises_on_all(word: str) -> None:
    first, second = virtual(2, _adopted, word, limit_s=LIMIT_S)
    assert BROUGHT[word][1] in second and f"rank 1 refuses Arena.adopt: {second}" == first


def _grown(rank: int, group: Any, brought: dict[str, Any], how: str) -> str:
    plan = plan_of(size_of(group))
    with opens(plan, group) if how == "open" else epbuf.Arena.adopt(plan, memory_of(plan), group) as arena:
        more = plan_of(size_of(group), 2)
        default = {"tensor": memory_of(more)} if how == "adopt" else {}
        message = raised(ConfigError, lambda: arena.grow(more, **(brought if rank == 1 else default)))
        assert arena.generation == 0
        arena.grow(more, **default)
        return message


@pytest.mark.parametrize(
    ("how", "brought", "message"),
    [
        ("open", {"tensor": torch.zeros(1 << 16, dtype=torch.uint8)}, "window of its own"),
        ("open", {"registration": "handle"}, "window of its own"),
        ("adopt", {}, "found NoneType"),
        ("adopt", {"tensor": torch.zeros(3, dtype=torch.uint8)}, "bytes for the plan"),
    ],
    ids=["tensor_not_wanted", "registration_not_wanted", "tensor_missing", "tensor_short"],
)
def test_growth_that_one_rank_cannot_raises_on_all(how: str, brought: dict[str, Any], message: str) -> None:
    """Nothing has changed: the same ranks then grow."""
    first, second = virtual(2, _grown, brought, how, limit_s=LIMIT_S)
    assert message in second and f"rank 1 refuses grow(): {second}" == first


def _shared(rank: int, group: Any, memory: Tensor, step: int) -> str:
    plan = plan_of(2)
    return raised(ConfigError, lambda: epbuf.Arena.adopt(plan, memory[step * rank :], group))


@pytest.mark.parametrize("step", [0, 256])
def test_ranks_of_one_process_cannot_adopt_the_same_memory(step: int) -> None:
    """Whole or in part: each would write into the other's rows."""
    memory = memory_of(plan_of(2, 4))
    for message in virtual(2, _shared, memory, step, limit_s=LIMIT_S):
        assert "ranks 0 and 1 brought the same memory" in message


def _planned(rank: int, group: Any) -> str:
    return raised(PlanMismatchError, lambda: opens(plan_of(2, 1 + rank), group))


def test_different_plans_are_still_told_apart() -> None:
    for message in virtual(2, _planned, limit_s=LIMIT_S):
        assert "num_frames" in message
