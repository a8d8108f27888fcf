"""Capacity that a run has learned: from one plan to the next, and from one run to the next in a small file.

Without torch: plans and plain numbers.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

from epbuf.config import EpConfig, round_up
from epbuf.errors import ConfigError
from epbuf.plan import STASH_PAGE_ROWS, Plan

_FORMAT = "epbuf capacity 1"

# How many rows a rank needs depends on these, so a capacity that was learned with others says nothing.
_LEARNED_FOR = ("num_ranks", "num_experts", "num_topk", "max_tokens_per_rank", "expert_alignment")

_MAY_CHANGE = {
    "recv_capacity_per_rank", "capacity_factor", "max_tokens_per_rank", "overflow_policy", "validate_ids",
    "max_num_sms", "timeout_s",
}  # fmt: skip


def grown_plan(plan: Plan, num_rows: int, stash_rows: int = 0) -> Plan:
    """Return the plan with room for `num_rows` rows a rank, rounded up to the alignment, and all else as it was.

    Room for `stash_rows` in the stash, too, if the plan has less; one that was planned for the worst case stays so.
    """
    return Plan.build(
        with_capacity(plan.config, num_rows), plan.schedule, recv_policy=plan.recv_policy,
        stash_rows=None if plan.stash_rows is None else max(plan.stash_rows, stash_rows), engine=plan.engine,
    )  # fmt: skip


def with_capacity(config: EpConfig, num_rows: int) -> EpConfig:
    """Return the config with an explicit capacity, rounded up to the alignment."""
    capacity = round_up(num_rows, config.expert_alignment)
    return EpConfig(**{**dict(config), "recv_capacity_per_rank": capacity, "capacity_factor": None})


def check_growth(old: Plan, new: Plan) -> None:
    """Check that an arena of one plan can go on with another.

    Raises:
        ConfigError: it is for other ranks, experts or rows, has less of something, or is the same plan.
    """
    facts = {field: (getattr(old.config, field), getattr(new.config, field)) for field in EpConfig.model_fields}
    planned = {name: (getattr(old, name), getattr(new, name)) for name in ("recv_policy", "engine")}
    for field, (found, asked) in {**facts, **planned}.items():
        if field not in _MAY_CHANGE and found != asked:
            raise ConfigError(
                f"grow() keeps {field}: the arena has {field}={found!r} and the new plan {asked!r}. Build it from the "
                "arena's own config, or open another arena"
            )
    sizes = zip(_sizes(old), _sizes(new), strict=True)
    for (name, found), (_, asked) in sizes:
        if asked < found:
            raise ConfigError(f"grow() only adds: the arena has {name}={found} and the new plan {asked}; plan as much")
    if old.fingerprint == new.fingerprint:
        raise ConfigError(
            f"grow() was given the plan that the arena has (recv_capacity_per_rank={old.capacity_rows}); build one "
            "with more of something"
        )


def _sizes(plan: Plan) -> tuple[tuple[str, int], ...]:
    return (
        ("recv_capacity_per_rank", plan.capacity_rows),
        ("max_tokens_per_rank", plan.config.max_tokens_per_rank),
        ("num_frames", plan.schedule.num_frames),
        ("num_workspaces", plan.schedule.num_workspaces),
        ("stash_rows", plan.num_stash_pages * STASH_PAGE_ROWS),
    )


def save_capacity(path: str | PathLike[str], plan: Plan, demand_peak_rows: int) -> None:
    """Write the capacity of a plan, and what was demanded of it, to a JSON file; replaces it in one step.

    Raises:
        ConfigError: the file cannot be written; whatever lay there is untouched.
    """
    facts = {name: getattr(plan.config, name) for name in _LEARNED_FOR}
    content = {
        "format": _FORMAT, "capacity_rows": plan.capacity_rows, "demand_peak_rows": demand_peak_rows,
        "learned_for": facts,
    }  # fmt: skip
    target = Path(path)
    beside = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        beside.replace(target)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}): pass the path of a file in a folder that exists"
        ) from error


def load_capacity(path: str | PathLike[str], config: EpConfig) -> EpConfig:
    """Return the config with the rows that an earlier run of the same sizes had, or demanded if that was more.

    Raises:
        FileNotFoundError: there is no such file: nothing was learned yet.
        ConfigError: the file is damaged, of something else, or of other sizes; it is named.
    """
    content = _read(path)
    learned_for, capacity = content.get("learned_for"), content.get("capacity_rows")
    demand = content.get("demand_peak_rows")
    if not isinstance(learned_for, dict) or not _is_count(capacity, 1) or not _is_count(demand, 0):
        raise ConfigError(
            f"{path} is damaged: it has learned_for={learned_for!r}, capacity_rows={capacity!r} and "
            f"demand_peak_rows={demand!r}, where an object and two numbers of rows belong; delete it and let a run "
            "save it again"
        )
    for name in _LEARNED_FOR:
        asked, found = getattr(config, name), learned_for.get(name)
        if asked != found:
            raise ConfigError(
                f"{path} was learned with {name}={found!r} and the config has {asked!r}: its capacity says nothing "
                "about this run; save one file for each configuration"
            )
    try:
        return with_capacity(config, max(capacity, demand))
    except ConfigError as error:
        raise ConfigError(f"{path} has a capacity that no config takes: {error}") from None


def _is_count(value: object, least: int) -> TypeGuard[int]:
    return type(value) is int and value >= least


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON, or of UTF-8
        raise ConfigError(
            f"{path} is no capacity file: {error}; delete it and let a run save it again, or pass another path"
        ) from None
    form = content.get("format") if isinstance(content, dict) else type(content).__name__
    if form != _FORMAT:
        raise ConfigError(
            f"{path} is no capacity file of this version: found format {form!r}, expected {_FORMAT!r}; pass the file "
            "that arena.save_capacity wrote"
        )
    assert isinstance(content, dict), "only an object has the format"
    return content
