"""The routings that the contract is checked on: named ones, and random ones from a seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from epbuf import EpConfig

TIMEOUT_S = 20

BY_WIRE: dict[str, object] = {"wire": "dedup", "combine_order": "by_rank"}
"""Tokens cross once for each rank, both ways."""

form: dict[str, object] = {}
"""Fields that every base_config of this process has; the fixture of that name sets BY_WIRE for a test."""


@dataclass(frozen=True, eq=False)
class Case:
    """One routing on one configuration.

    Shapes: topk_idx[r] [T_r, K] int64 or int32; num_tokens[r]: live tokens of rank r, None: all of them.
    """

    name: str
    config: EpConfig
    topk_idx: list[Tensor]
    num_tokens: list[int | None]
    num_tokens_dtype: torch.dtype = torch.int64

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.split("+")[0].encode())

    def live_tokens(self, rank: int) -> Tensor | None:
        """Return what rank `rank` passes as `num_tokens=`."""
        live = self.num_tokens[rank]
        return None if live is None else torch.tensor([live], dtype=self.num_tokens_dtype)


def in_form(rank: int, group: Any, fields: dict[str, object], function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank function on a process of its own with `form` as it is in the process that asked."""
    global form
    before, form = form, fields
    try:
        return function(rank, group, *args)
    finally:
        form = before


Ids = Callable[[EpConfig, torch.Generator], Sequence[Tensor]]


def named_case(routing: str, num_ranks: int, alignment: int = 1, token_dtype: str = "bf16", **changes: object) -> Case:
    """Build the case of a named routing."""
    name = f"{routing}-R{num_ranks}-A{alignment}-{token_dtype}"
    config = base_config(num_ranks, expert_alignment=alignment, token_dtype=token_dtype, **changes)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    topk_idx = list(NAMED[routing](config, generator))
    if routing in CAPACITY_OFFSETS:
        config = _with_capacity(config, _peak_demand(config, topk_idx) + CAPACITY_OFFSETS[routing] * alignment)
    elif routing in MORE_THAN_WORST:
        rows = num_ranks * config.max_tokens_per_rank * config.num_topk
        config = _with_capacity(config, _round_up(rows, alignment) + 4 * alignment)
    live: list[int | None] = [None] * num_ranks
    if routing.startswith("num_tokens"):
        live = [min(rank + 1, 5) for rank in range(num_ranks)]
        live[-1] = 0 if num_ranks > 1 else live[-1]
    live_dtype = torch.int32 if routing.endswith("int32") else torch.int64
    if alignment == 16:
        topk_idx = [ids.to(torch.int32) for ids in topk_idx]
    return Case(name, config, topk_idx, live, live_dtype)


def changed(case: Case, name: str, **fields: object) -> Case:
    """Return the same routing and inputs on another configuration, which `name` tells apart."""
    config = EpConfig(**(case.config.model_dump(exclude_defaults=True) | fields))
    return replace(case, name=f"{case.name}+{name}", config=config)


def shape_case(shape: str, num_ranks: int) -> Case:
    """Build the case of a named shape: distinct random experts for every token."""
    name = f"{shape}-R{num_ranks}"
    config = base_config(num_ranks, **SHAPES[shape](num_ranks))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return Case(name, config, _distinct(config, generator), [None] * num_ranks)


def padded_case(case: Case) -> Case:
    """Return the routing as a captured step takes it: max_tokens_per_rank tokens, of which `num_tokens` are live.

    The others hold ids that must not count.
    """
    config = case.config
    generator = torch.Generator().manual_seed(case.seed)
    topk_idx, live = [], []
    for ids, limit in zip(case.topk_idx, case.num_tokens, strict=True):
        rest = config.max_tokens_per_rank - len(ids)
        extra = torch.randint(0, config.num_experts, (rest, config.num_topk), generator=generator, dtype=ids.dtype)
        topk_idx.append(torch.cat([ids, extra]))
        live.append(len(ids) if limit is None else limit)
    return Case(f"{case.name}-padded", config, topk_idx, live, case.num_tokens_dtype)


def random_case(seed: int) -> Case:
    """Draw sizes, capacity and ids, bad and repeated ones included."""
    draw = random.Random(seed)
    num_ranks, alignment = draw.randint(1, 8), draw.choice([1, 2, 16, 128])
    config = base_config(
        num_ranks,
        num_experts=num_ranks * draw.randint(1, 5),
        num_topk=draw.randint(1, 6),
        hidden=8 * draw.randint(1, 12),
        max_tokens_per_rank=draw.randint(1, 80),
        token_dtype=draw.choice(["bf16", "fp16", "fp32"]),
        expert_alignment=alignment,
    )
    generator = torch.Generator().manual_seed(seed)
    num_tokens = [draw.randint(0, config.max_tokens_per_rank) for _ in range(num_ranks)]
    topk_idx = [
        torch.randint(-2, config.num_experts + 2, (tokens, config.num_topk), generator=generator)
        for tokens in num_tokens
    ]
    live = [draw.randint(0, tokens) if draw.random() < 0.3 else None for tokens in num_tokens]
    demand = _peak_demand(config, topk_idx)
    capacity = max(alignment, _round_up(int(demand * draw.choice([0.4, 0.8, 1.0, 1.5])), alignment))
    return Case(f"random-{seed}", _with_capacity(config, capacity), topk_idx, live)


def base_config(num_ranks: int, **changes: object) -> EpConfig:
    """Build a small configuration: 3 of 4 experts a rank, 12 tokens, rows of 16 elements."""
    fields: dict[str, object] = {
        "num_ranks": num_ranks,
        "num_experts": 4 * num_ranks,
        "num_topk": 3,
        "hidden": 16,
        "max_tokens_per_rank": 12,
        "timeout_s": TIMEOUT_S,
    }
    return EpConfig(**(fields | form | changes))


def _balanced(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    tokens = torch.arange(config.max_tokens_per_rank)[:, None] * config.num_topk
    ids = (tokens + torch.arange(config.num_topk)) % config.num_experts
    return [ids.clone() for _ in range(config.num_ranks)]


def _distinct(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    return [_distinct_ids(config, config.max_tokens_per_rank, generator) for _ in range(config.num_ranks)]


def _distinct_ids(config: EpConfig, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Draw different experts for the K choices of a token; -1 where K exceeds E."""
    width = max(config.num_topk, config.num_experts)
    order = torch.rand(num_tokens, width, generator=generator).argsort(dim=1)[:, : config.num_topk]
    return torch.where(order < config.num_experts, order, -1)


def _one_expert(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    ids = torch.full((config.max_tokens_per_rank, config.num_topk), -1)
    ids[:, 1] = config.num_experts - 2
    return [ids.clone() for _ in range(config.num_ranks)]


def _one_rank(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    num_local_experts = config.num_experts // config.num_ranks
    first = (config.num_ranks - 1) * num_local_experts
    return [
        first + torch.rand(config.max_tokens_per_rank, num_local_experts, generator=generator).argsort(dim=1)[:, :3]
        for _ in range(config.num_ranks)
    ]


def _empty_rank(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    num_local_experts = config.num_experts // config.num_ranks
    return [torch.where(ids < num_local_experts, -1, ids) for ids in _distinct(config, generator)]


def _one_rank_without_tokens(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    ids = _distinct(config, generator)
    ids[-1] = ids[-1][:0]
    return ids


def _no_tokens(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    return [torch.empty(0, config.num_topk, dtype=torch.int64) for _ in range(config.num_ranks)]


def _different_t(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    return [ids[: 1 + 5 * rank % config.max_tokens_per_rank] for rank, ids in enumerate(_distinct(config, generator))]


def _all_negative(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    return [torch.full((config.max_tokens_per_rank, config.num_topk), -1 - rank) for rank in range(config.num_ranks)]


def _some_negative(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    return [
        torch.where(torch.rand(ids.shape, generator=generator) < 0.5, -1, ids) for ids in _distinct(config, generator)
    ]


def _duplicates(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    ids = _distinct(config, generator)
    for rank_ids in ids:
        rank_ids[::2, 2] = rank_ids[::2, 0]
        rank_ids[::3] = rank_ids[::3, :1]
    return ids


def _too_large(config: EpConfig, generator: torch.Generator) -> list[Tensor]:
    ids = _distinct(config, generator)
    for rank, rank_ids in enumerate(ids):
        rank_ids[rank % len(rank_ids), 0] = config.num_experts
        rank_ids[-1, 1] = 2**31 - 1
    return ids


NAMED: dict[str, Ids] = {
    "balanced": _balanced,
    "one_expert": _one_expert,
    "one_rank": _one_rank,
    "empty_rank": _empty_rank,
    "one_rank_without_tokens": _one_rank_without_tokens,
    "no_tokens": _no_tokens,
    "different_t": _different_t,
    "num_tokens_int32": _distinct,
    "num_tokens_int64": _distinct,
    "all_negative": _all_negative,
    "some_negative": _some_negative,
    "duplicates": _duplicates,
    "too_large": _too_large,
    "exactly_at_capacity": _distinct,
    "one_row_over": _distinct,
    "far_over": _distinct,
}
CAPACITY_OFFSETS = {"exactly_at_capacity": 0, "one_row_over": -1, "far_over": -3}  # in units of A rows, from the demand
MORE_THAN_WORST = {"duplicates"}  # repeated experts may exceed the default capacity

SHAPES: dict[str, Callable[[int], dict[str, object]]] = {
    "L1": lambda ranks: {"num_experts": ranks, "num_topk": min(ranks, 2)},
    "L3": lambda ranks: {"num_experts": 3 * ranks},
    "L5": lambda ranks: {"num_experts": 5 * ranks},
    "K1": lambda ranks: {"num_topk": 1},
    "K_above_L": lambda ranks: {"num_experts": 2 * ranks, "num_topk": 2 * ranks},
    "K_above_E": lambda ranks: {"num_experts": ranks, "num_topk": ranks + 3},
    "K64": lambda ranks: {"num_experts": 16 * ranks, "num_topk": 64, "max_tokens_per_rank": 5},
    "H8": lambda ranks: {"hidden": 8},
    "H4_fp32": lambda ranks: {"hidden": 4, "token_dtype": "fp32"},
    "H72": lambda ranks: {"hidden": 72, "expert_alignment": 16},
    "H2880_fp16": lambda ranks: {"hidden": 2880, "token_dtype": "fp16", "max_tokens_per_rank": 5},
    "H7168": lambda ranks: {"hidden": 7168, "max_tokens_per_rank": 5},
    "T1": lambda ranks: {"max_tokens_per_rank": 1},
    "T_many_chunks": lambda ranks: {"max_tokens_per_rank": 333, "expert_alignment": 128},
}


def _with_capacity(config: EpConfig, capacity: int) -> EpConfig:
    return EpConfig(**(config.model_dump(exclude_defaults=True) | {"recv_capacity_per_rank": capacity}))


def _peak_demand(config: EpConfig, topk_idx: Sequence[Tensor]) -> int:
    """Count the rows that the fullest rank needs, padding included."""
    ids = torch.cat([rank_ids.reshape(-1) for rank_ids in topk_idx])
    counts = torch.bincount(ids[(ids >= 0) & (ids < config.num_experts)].long(), minlength=config.num_experts)
    rows = [_round_up(int(count), config.expert_alignment) for count in counts]
    num_local_experts = config.num_experts // config.num_ranks
    return max(sum(rows[first : first + num_local_experts]) for first in range(0, len(rows), num_local_experts))


def _round_up(rows: int, alignment: int) -> int:
    return -(-rows // alignment) * alignment
