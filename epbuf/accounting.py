"""How many bytes one round moves: from the plan and the live counts, for reports, benchmarks and choices.

Sizes of regions depend on maxima only and are the plan's; what a round reads and writes depends on its routing and is
counted here, over all ranks, each byte as often as the algorithm needs it: an input once, an output once. Control words
and the scratch of route, a few KB a rank, are left out. Without torch: counts are plain numbers.

Shapes: counts [R][E]: rows that each rank sends to each expert. num_tokens [R]: live tokens of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epbuf.config import Payload, round_up
from epbuf.errors import ConfigError
from epbuf.plan import COUNT_HEADER_CELLS, Plan

_CELL_BYTES = 8
_SLOT_BYTES = 8
_ID_BYTES = 8  # int64; int32 ids halve it
_WEIGHT_BYTES = 4
_ROW_SCALE_BYTES = 4  # nvfp4

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Push:
    """Bytes of a dispatch, or of the dispatch of gradients that combine's backward is.

    Attributes:
        payload: each live token's row read once, each kept row written.
        scales: block scales and row scales of the kept rows written; read, too, when the payload is raw.
        weights: top-k weights read; a weight written for each kept and each padding row.
        padding: padding rows written, their scales included.
        slots: the slot map read.
        tiling: blocked scales of kept and padding rows read where they arrived and written into their tiles.
        wire: rows that cross once for several slots, and their block scales, written and read where they arrive; the
            slot maps that their receivers read.
    """

    payload: int
    scales: int
    weights: int
    padding: int
    slots: int
    tiling: int = 0
    wire: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.payload + self.scales + self.weights + self.padding + self.slots + self.tiling + self.wire


@dataclass(frozen=True)
class Pull:
    """Bytes of a combine, or of the combine of gradients that dispatch's backward is. Staging is not in it.

    Attributes:
        rows: each kept row read, a row of each live token written.
        weights: dispatch backward: a gradient of each kept row read, one of each (token, k) written.
        slots: the slot map read.
        wire: sums of several rows written and read, and the slot maps read by those who add.
    """

    rows: int
    weights: int
    slots: int
    wire: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.rows + self.weights + self.slots + self.wire


@dataclass(frozen=True)
class Traffic:
    """Bytes that one round reads and writes, over all ranks.

    Attributes:
        route: ids read twice (counted, then placed), slot maps written, count cells written and read.
        dispatch, combine: the forward.
        combine_backward, dispatch_backward: the backward.
        stash: rows below offs[-1] with their scales, read and written by combine and again by combine backward, which
            each dispatch of a layer with recv_policy "stash" adds.
        staging: rows below offs[-1] read and written, which each combine and each dispatch backward adds whose rows lie
            in an ordinary tensor. `staged_bytes` of `Arena.report()` counts what is written: half of it.
    """

    route: int
    dispatch: Push
    combine: Pull
    combine_backward: Push
    dispatch_backward: Pull
    staging: int
    stash: int


def traffic(plan: Plan, counts: Counts, num_tokens: Sequence[int], num_by_wire: int | None = None) -> Traffic:
    """Count the bytes of one round.

    Args:
        num_by_wire: how often, in all, a token has several kept rows on one rank that is not its own, which counts do
            not tell; needed where the plan dedups or adds by rank.

    Example, R = 1, E = 2, K = 1, H = 8 bf16 (rows of 16 bytes), A = 4, 3 tokens, counts [[3, 0]]: dispatch reads 3 rows
    and writes 3 (payload 96) and one row of padding (16); combine reads 3 and writes 3 (96); staging copies 4 (128).
    """
    config, tokens = plan.config, sum(num_tokens)
    kept, padding = sum(map(sum, kept_rows(plan, counts))), sum(padding_rows(plan, counts))
    num_slots = tokens * config.num_topk
    cells = config.num_ranks**2 * (config.num_experts + COUNT_HEADER_CELLS)
    pulled, slots = (kept + tokens) * plan.token_row_bytes, num_slots * _SLOT_BYTES
    by_wire = _num_by_wire(plan, num_by_wire)
    return Traffic(
        route=2 * num_slots * _ID_BYTES + slots + 2 * cells * _CELL_BYTES,
        dispatch=_push(plan, config.dispatch_payload, (tokens, kept, padding, by_wire), has_weights=True),
        combine=Pull(pulled, 0, slots, _sums(plan, by_wire)),
        combine_backward=_push(plan, config.combine_grad_payload, (tokens, kept, padding, by_wire), has_weights=False),
        dispatch_backward=Pull(pulled, (kept + num_slots) * _WEIGHT_BYTES, slots, _sums(plan, by_wire)),
        staging=2 * (kept + padding) * plan.token_row_bytes,
        stash=4 * (kept + padding) * (plan.row_bytes + _scale_bytes(config.dispatch_payload, config.hidden)),
    )


def kept_rows(plan: Plan, counts: Counts) -> list[list[int]]:
    """Count the rows that each rank sends to each rank, without those dropped at the capacity.

    Shapes: result [R][R], by source and destination.
    """
    kept = [[0] * plan.config.num_ranks for _ in counts]
    for rank, expert, start, _ in _zones(plan, counts):
        row = start
        for source, sent in enumerate(counts):
            kept[source][rank] += min(sent[expert], max(0, plan.capacity_rows - row))
            row += sent[expert]
    return kept


def padding_rows(plan: Plan, counts: Counts) -> list[int]:
    """Count the padding rows that each rank writes.

    Shapes: result [R].
    """
    padding = [0] * plan.config.num_ranks
    for rank, _, _, (first, end) in _zones(plan, counts):
        padding[rank] += max(0, min(end, plan.capacity_rows) - first)
    return padding


def _zones(plan: Plan, counts: Counts) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield (rank, expert, start of its zone, (first padding row, end)) in the order of the zones."""
    num_local_experts = plan.num_local_experts
    end = 0
    for expert in range(plan.config.num_experts):
        start = end if expert % num_local_experts else 0
        first_padding = start + sum(sent[expert] for sent in counts)
        end = round_up(first_padding, plan.config.expert_alignment)
        yield expert // num_local_experts, expert, start, (first_padding, end)


def _num_by_wire(plan: Plan, given: int | None) -> int:
    if given is None and (plan.dedups or plan.adds_by_rank):
        raise ConfigError(
            f"traffic of a plan with wire={plan.config.wire!r} and combine_order={plan.config.combine_order!r} needs "
            "num_by_wire: how often a token has several rows on one other rank"
        )
    return given or 0


def _shared_slots(plan: Plan) -> int:
    """Count what all ranks read of their peers' slot maps."""
    config = plan.config
    num_read = config.num_ranks * (config.num_ranks - 1) * config.max_tokens_per_rank * config.num_topk
    return num_read * _SLOT_BYTES


def _sums(plan: Plan, by_wire: int) -> int:
    return 2 * by_wire * plan.token_row_bytes + _shared_slots(plan) if plan.adds_by_rank else 0


def _push(plan: Plan, payload: Payload, rows: tuple[int, int, int, int], *, has_weights: bool) -> Push:
    """Count a dispatch of (tokens, kept rows, padding rows, rows by wire) in a payload."""
    tokens, kept, padding, by_wire = rows
    config = plan.config
    row_bytes = payload.row_bytes_for(config.hidden, config.token_dtype)
    wire_bytes = payload.wire_scale_row_bytes_for(config.hidden)
    tiled_bytes = payload.scale_row_bytes_for(config.hidden)
    scale_bytes = wire_bytes + (_ROW_SCALE_BYTES if payload.format == "nvfp4" else 0)
    is_raw = payload.format == "raw"  # the caller encoded the rows, and their scales are read with them
    num_slots = tokens * config.num_topk
    return Push(
        payload=tokens * (row_bytes if is_raw else plan.token_row_bytes) + kept * row_bytes,
        scales=(kept + tokens * is_raw) * scale_bytes,
        weights=(num_slots + kept + padding) * _WEIGHT_BYTES if has_weights else 0,
        padding=padding * (row_bytes + scale_bytes),
        slots=num_slots * _SLOT_BYTES,
        tiling=(kept + padding) * (wire_bytes + tiled_bytes) if payload.scale_layout == "blocked" else 0,
        wire=2 * by_wire * (row_bytes + wire_bytes) + _shared_slots(plan) if plan.dedups else 0,
    )


def _scale_bytes(payload: Payload, hidden: int) -> int:
    """Count the bytes of block scales and row scales of a row."""
    return payload.scale_row_bytes_for(hidden) + (_ROW_SCALE_BYTES if payload.format == "nvfp4" else 0)
