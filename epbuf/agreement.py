"""What ranks tell each other before they open, adopt or grow memory: whether each can, and whether all mean the same.

What a rank finds wrong with its own call travels, too: every rank raises, and none waits for one that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import torch

from epbuf.errors import ConfigError, PlanMismatchError
from epbuf.plan import Plan, describe_difference
from epbuf.windows.group import Group, VirtualRank


@dataclass(frozen=True)
class Offer:
    """What a rank brings to a call.

    Attributes:
        how: the call, engine, window and kind of device, in words that must be the same on all ranks.
        fingerprint, plan: of the plan; its JSON.
        memory: first byte and end of memory of the caller's.
        trouble: why this rank cannot; then there is nothing else.
    """

    how: str = ""
    fingerprint: str = ""
    plan: str = ""
    memory: tuple[int, int] | None = None
    trouble: str = ""


def agree(group: Group, call: str, check: Callable[[], Offer]) -> None:
    """Check a call on every rank and compare what each brings. Collective.

    Raises:
        ConfigError: some rank cannot, or means another call, engine or window; ranks of one process share memory.
        PlanMismatchError: another rank brought another plan.
        Exception: what `check` raised on this rank.
    """
    error: Exception | None = None
    try:
        mine = check()
    except Exception as found:  # whatever it is, peers must not wait
        error, mine = found, Offer(trouble=str(found) or type(found).__name__)
    with torch.no_grad():
        offers: list[Offer] = group.all_gather(mine)
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame
    _compare(call, offers)
    if isinstance(group, VirtualRank):
        _check_apart(offers)


def offer(how: str, plan: Plan, memory: tuple[int, int] | None = None) -> Offer:
    """Return what a rank that can brings."""
    return Offer(how, plan.fingerprint, plan.to_json(), memory)


def check_plan(plan: object, call: str) -> Plan:
    """Refuse what is no plan.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(f"{call} takes a Plan, found {type(plan).__name__}; make one with Plan.build(config)")
    return plan


def check_size(plan: Plan, group: Group) -> None:
    """Refuse a plan for another number of ranks.

    Raises:
        ConfigError: both numbers.
    """
    if group.size != plan.config.num_ranks:
        raise ConfigError(
            f"the plan is for num_ranks={plan.config.num_ranks} and the group has {group.size}; "
            "build the plan for the group, or pass the right group"
        )


def _compare(call: str, offers: Sequence[Offer]) -> None:
    first = offers[0]
    for rank, other in enumerate(offers):
        if other.trouble:
            raise ConfigError(f"rank {rank} refuses {call}: {other.trouble}")
    for rank, other in enumerate(offers):
        if other.how != first.how:
            raise ConfigError(
                f"ranks of one group must make the same call; rank 0 asks for {first.how} and rank {rank} for "
                f"{other.how}: pass the same words on every rank"
            )
    for rank, other in enumerate(offers):
        if other.fingerprint != first.fingerprint:
            _raise_mismatch(first.plan, other.plan, rank)


def _check_apart(offers: Sequence[Offer]) -> None:
    """Refuse ranks of one process that brought memory in common."""
    spans = sorted((*span, rank) for rank, each in enumerate(offers) if (span := each.memory) is not None)
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise ConfigError(
                f"ranks {min(one, other)} and {max(one, other)} brought the same memory, at {start:#x}: each rank "
                "needs plan.total_bytes of its own"
            )


def _raise_mismatch(first: str, other: str, rank: int) -> NoReturn:
    raise PlanMismatchError(
        f"ranks of one group must bring the same plan; rank 0 and rank {rank} differ in\n"
        f"{describe_difference(first, other, names=('rank 0', f'rank {rank}'))}\n"
        "Build it from the same values on every rank"
    )
