"""The readable specification: route, dispatch, combine and their backwards, for all ranks at once.

Plain torch on lists that hold one entry per rank. No windows, no cells, no processes: what every engine must compute,
written so that a person can check it. Shape letters: R ranks, T_r tokens of rank r, K top-k, H hidden, E experts,
L = E/R local experts, C receive capacity in rows, A expert alignment in rows.

Row sums are taken in float32 in k order from +0.0 and rounded once (with combine_order="by_rank" once on each rank, and
once more), so results are exact to the bit, except the dot products of `combine_backward_weighted`, whose order over H
is left to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epbuf.config import EpConfig, Payload, round_up

NO_SLOT = -1
_RANK_SHIFT = 32
_ROW_MASK = (1 << _RANK_SHIFT) - 1


@dataclass(frozen=True)
class Routing:
    """Say where every (token, k) of every rank goes; lists have one entry per rank.

    Shapes: slot_map [T_r, K] int64 (destination rank << 32 | row, or -1), offs [L] int32 (ends of the zones),
        tokens_per_expert [L] int64 (padded rows), valid_tokens_per_expert [L] int64 (true rows kept),
        total_recv_tokens [1] int64 (rows needed, padding included, before dropping),
        overflow [1] float32 (1 when any rank needs more than C rows; the same on every rank).
    """

    slot_map: list[Tensor]
    offs: list[Tensor]
    tokens_per_expert: list[Tensor]
    valid_tokens_per_expert: list[Tensor]
    total_recv_tokens: list[Tensor]
    overflow: Tensor
    num_bad_ids: int


def slot_ranks(slot_map: Tensor) -> Tensor:
    """Read the destination ranks out of a slot map; -1 where there is no slot."""
    return slot_map >> _RANK_SHIFT


def slot_rows(slot_map: Tensor) -> Tensor:
    """Read the rows out of a slot map; -1 where there is no slot."""
    return torch.where(slot_map == NO_SLOT, slot_map, slot_map & _ROW_MASK)


def route(
    config: EpConfig,
    capacity_rows: int,
    topk_idx: Sequence[Tensor],
    num_tokens: Sequence[int | None] | None = None,
) -> Routing:
    """Compute every slot, zone and count from the expert ids of all ranks.

    Expert e is local expert e % L of rank e // L. The zones of a rank follow each other by local index and each is
    padded to a multiple of A rows; an empty expert has none. Within a zone rows are ordered by (source rank, token,
    k). A row at or past C is dropped. Ids below 0 mean "no expert"; ids at or past E count as bad and are treated so.

    Two ranks with experts 0, 1 and 2, 3; zones are multiples of 2 rows. Expert 0 gets three rows (one of rank 0, then
    both of rank 1's second token) and one row of padding, expert 1 none; expert 2 gets three and expert 3 one:

    >>> config = EpConfig(num_ranks=2, num_experts=4, num_topk=2, hidden=8, max_tokens_per_rank=2, expert_alignment=2)
    >>> ids = [torch.tensor([[0, 2], [2, -1]]), torch.tensor([[2, 3], [0, 0]])]
    >>> routing = route(config, 8, ids)
    >>> [slot_ranks(s).tolist() for s in routing.slot_map]
    [[[0, 1], [1, -1]], [[1, 1], [0, 0]]]
    >>> [slot_rows(s).tolist() for s in routing.slot_map]
    [[[0, 0], [1, -1]], [[2, 4], [1, 2]]]
    >>> [offs.tolist() for offs in routing.offs]
    [[4, 4], [4, 6]]
    >>> [counts.tolist() for counts in routing.valid_tokens_per_expert]
    [[3, 0], [3, 1]]

    With room for 4 rows rank 1, which needs 6, drops expert 3 by position, and every rank knows that one overflowed.

    >>> tight = route(config, 4, ids)
    >>> slot_rows(tight.slot_map[1]).tolist(), tight.offs[1].tolist(), tight.total_recv_tokens[1].item()
    ([[2, -1], [1, 2]], [4, 4], 6)
    >>> tight.overflow.item()
    1.0

    Shapes: topk_idx[r] [T_r, K] int32 or int64.
    """
    num_bad_ids, ids = _live_ids(config, topk_idx, num_tokens)
    slot_map = [torch.full(rank_ids.shape, NO_SLOT, dtype=torch.int64) for rank_ids in ids]
    zones = [_fill_zones(config, capacity_rows, ids, slot_map, dest) for dest in range(config.num_ranks)]
    demand = [ends[-1:].clone() for _, _, ends in zones]
    offs = [ends.clamp(max=capacity_rows) for _, _, ends in zones]
    return Routing(
        slot_map=slot_map,
        offs=[o.to(torch.int32) for o in offs],
        tokens_per_expert=[o.diff(prepend=o.new_zeros(1)) for o in offs],
        valid_tokens_per_expert=[counts.minimum((capacity_rows - starts).clamp(min=0)) for starts, counts, _ in zones],
        total_recv_tokens=demand,
        overflow=(torch.cat(demand).max() > capacity_rows).float().reshape(1),
        num_bad_ids=num_bad_ids,
    )


def dispatch(
    config: EpConfig,
    capacity_rows: int,
    routing: Routing,
    x: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Copy every row, with its weight, into its slot; answer (recv_tokens, recv_topk_weights, written).

    Padding rows inside a zone are 0 with weight 0. Rows past the last zone are never written: NaN here, and False in
    `written`. Without weights every real row has weight 1.

    >>> config = EpConfig(num_ranks=1, num_experts=2, num_topk=1, hidden=8, max_tokens_per_rank=3, expert_alignment=2)
    >>> routing = route(config, 6, [torch.tensor([[1], [0], [1]])])
    >>> x = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 8)
    >>> tokens, weights, written = dispatch(config, 6, routing, [x], [torch.tensor([[0.5], [0.25], [0.75]])])
    >>> tokens[0][:, 0].tolist()
    [2.0, 0.0, 1.0, 3.0, nan, nan]
    >>> weights[0].tolist()
    [0.25, 0.0, 0.5, 0.75, nan, nan]
    >>> written[0].tolist()
    [True, True, True, True, False, False]

    Shapes: x[r] [T_r, H] token dtype, topk_weights[r] [T_r, K] float32;
        results [C, H] token dtype, [C] float32, [C] bool.
    """
    recv_tokens, recv_topk_weights, written = [], [], []
    for dest in range(config.num_ranks):
        row_written = torch.arange(capacity_rows) < routing.offs[dest][-1]
        tokens = x[dest].new_zeros(capacity_rows, x[dest].shape[1])
        weights = torch.zeros(capacity_rows, dtype=torch.float32)
        for src, slots in enumerate(routing.slot_map):
            token, k = (slot_ranks(slots) == dest).nonzero(as_tuple=True)
            row = slot_rows(slots)[token, k]
            tokens[row] = x[src][token]
            weights[row] = 1.0 if topk_weights is None else topk_weights[src][token, k]
        recv_tokens.append(_poison(tokens, ~row_written))
        recv_topk_weights.append(_poison(weights, ~row_written))
        written.append(row_written)
    return recv_tokens, recv_topk_weights, written


@dataclass(frozen=True)
class Quantised:
    """Rows in the format of a payload.

    Shapes: data [rows, H] uint8 (E4M3 bytes) or [rows, H / 2] (pairs of E2M1, the even element in the lower half),
        scales [rows, S] uint8 (E8M0 or E4M3 bytes) or float32, row_scales [rows] float32 for nvfp4, else None.
    """

    data: Tensor
    scales: Tensor
    row_scales: Tensor | None = None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Those that exist."""
        return (self.data, self.scales) if self.row_scales is None else (self.data, self.scales, self.row_scales)


def quantise(payload: Payload, rows: Tensor) -> Quantised:
    """Encode rows: scales from the largest magnitude of each block, elements rounded to nearest even.

    In float64, where every quotient that is compared is exact enough, but for fp8_block128, which is defined by two
    divisions in float32. A block (for nvfp4: a row) with an infinity or a NaN is NaN when it is decoded.

    mxfp8: 1000 / 448 is 2.23, so the scale is 4 (byte 129), and 250 becomes 256 (code 0x78):

    >>> rows = torch.tensor([[1000.0] + [0.0] * 31])
    >>> encoded = quantise(Payload.mxfp8(), rows)
    >>> encoded.scales.tolist(), hex(encoded.data[0, 0])
    ([[129]], '0x78')
    >>> dequantise(Payload.mxfp8(), encoded, torch.float32)[0, :2].tolist()
    [1024.0, 0.0]

    Shapes: rows [rows, H] of a token dtype.
    """
    blocks = _cut(rows.double(), payload)
    amax = blocks.abs().amax(dim=2)
    if payload.format == "mxfp8":
        return _mxfp8(blocks, amax)
    return _nvfp4(blocks, amax) if payload.format == "nvfp4" else _fp8_block128(blocks, amax)


def dequantise(payload: Payload, encoded: Quantised, dtype: torch.dtype) -> Tensor:
    """Decode rows: element times scale in float32, at most the largest number of `dtype`, then rounded to it.

    Shapes: result [rows, H].
    """
    limit = torch.finfo(dtype).max
    if payload.format == "nvfp4":
        assert encoded.row_scales is not None
        codes = torch.stack([encoded.data & 15, encoded.data >> 4], dim=2).flatten(1).long()
        values = _cut(_signed(codes, E2M1, 8), payload)
        values = (values * _signed(encoded.scales.long(), E4M3, 128)[:, :, None]).float()
        scales = encoded.row_scales[:, None, None].expand_as(values)
    else:
        values = _cut(_signed(encoded.data.long(), E4M3, 128).float(), payload)
        scales = encoded.scales[:, :, None] if payload.format == "fp8_block128" else _powers(encoded.scales)[:, :, None]
    product = values * scales
    is_limited = scales.isfinite() & values.isfinite()
    return torch.where(is_limited, product.clamp(-limit, limit), product).to(dtype).flatten(1)


def blocked(scales: Tensor) -> Tensor:
    """Order scales of one byte as block-scaled GEMMs read them: tiles of 128 rows and 4 scales, one after the other.

    In a tile rows 0, 32, 64 and 96 come first, four scales each, then rows 1, 33, 65 and 97, and so on.

    >>> first = blocked(torch.arange(128 * 4).view(128, 4)).flatten()[:20].tolist()
    >>> first[:8], first[16:]
    ([0, 1, 2, 3, 128, 129, 130, 131], [4, 5, 6, 7])

    Shapes: scales [rows, S], rows a multiple of 128; result [rows, S rounded up to 4].
    """
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4)  # [tile, row group, row, tile, scale]
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)


def dispatch_quantised(
    config: EpConfig, capacity_rows: int, routing: Routing, payload: Payload, x: Sequence[Tensor]
) -> list[Quantised]:
    """Quantise every row and copy it into its slots; padding rows are 0 in data, scales and row scales.

    Rows past the last zone are 0 here, and not written there. Scales lie row by row, whatever the layout.

    Shapes: x[r] [T_r, H] token dtype; results as `Quantised`, C rows.
    """
    sent = list(zip(*(quantise(payload, rows).parts for rows in x), strict=True))  # by part, then by rank
    return [
        Quantised(*(_place(capacity_rows, routing, dest, parts) for parts in sent)) for dest in range(config.num_ranks)
    ]


def combine(
    config: EpConfig,
    routing: Routing,
    expert_out: Sequence[Tensor],
    recv_weights: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Add up, for every token, the rows in its slots; a token with no slot gets zeros.

    The sum is in float32 in k order with one rounding. With weights each row is first multiplied in float32 by its
    weight and rounded once to the token dtype, as in the copy that stages it into the window. With
    combine_order="by_rank" the rows on each rank are added so, and their sums, of the token dtype, likewise in rank
    order.

    >>> config = EpConfig(num_ranks=1, num_experts=2, num_topk=2, hidden=8, max_tokens_per_rank=2)
    >>> routing = route(config, 4, [torch.tensor([[1, 0], [-1, -1]])])
    >>> out = torch.tensor([[10.0], [1.0]]).expand(2, 8)
    >>> combine(config, routing, [out])[0][:, 0].tolist()
    [11.0, 0.0]
    >>> combine(config, routing, [out], [torch.tensor([0.5, 2.0])])[0][:, 0].tolist()
    [7.0, 0.0]

    In bf16, whose numbers between 256 and 512 are even, 256 + 1 + 1 + 1 is 259 in float32 and 260 as y. With the first
    and the last row on rank 1 and two on rank 0 the ranks send 2 and 256 (257 rounded), and y is 258:

    >>> sizes = dict(num_ranks=2, num_experts=4, num_topk=4, hidden=8, max_tokens_per_rank=1)
    >>> ids = [torch.tensor([[2, 0, 1, 3]]), torch.empty(0, 4, dtype=torch.int64)]
    >>> out = [torch.tensor([[first], [1.0]], dtype=torch.bfloat16).expand(2, 8) for first in (1.0, 256.0)]
    >>> for order in ("k", "by_rank"):
    ...     config = EpConfig(**sizes, combine_order=order)
    ...     combine(config, route(config, 2, ids), out)[0][0, 0].item()
    260.0
    258.0

    Shapes: expert_out[r] [C, H] token dtype, recv_weights[r] [C] float32; result[r] [T_r, H] token dtype.
    """
    staged = list(expert_out)
    if recv_weights is not None:
        staged = [_scale_rows(rows, weights) for rows, weights in zip(expert_out, recv_weights, strict=True)]
    add = _sum_by_rank if config.combine_order == "by_rank" else _sum_slots
    return [add(routing.slot_map[rank], staged) for rank in range(config.num_ranks)]


def combine_backward(config: EpConfig, capacity_rows: int, routing: Routing, dy: Sequence[Tensor]) -> list[Tensor]:
    """Send every token's gradient to each of its slots; padding rows 0, rows past the last zone NaN.

    Shapes: dy[r] [T_r, H] token dtype; result[r] [C, H] token dtype.
    """
    grad_expert_out, _, _ = dispatch(config, capacity_rows, routing, dy, None)
    return grad_expert_out


def combine_backward_weighted(
    config: EpConfig,
    capacity_rows: int,
    routing: Routing,
    dy: Sequence[Tensor],
    expert_out: Sequence[Tensor],
    recv_weights: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Differentiate a weighted combine: answer (d_expert_out, d_recv_weights).

    With g the row that an unweighted combine would send back: d_recv_weights = <expert_out, g> in float32, and
    d_expert_out = weight * g, multiplied in float32 and rounded once. Padding rows are 0 in both, later rows NaN.

    Shapes: dy[r] [T_r, H], expert_out[r] [C, H] token dtype, recv_weights[r] [C] float32;
        results [C, H] token dtype, [C] float32.
    """
    grads = combine_backward(config, capacity_rows, routing, dy)
    grad_expert_out, grad_weights = [], []
    for rank, grad in enumerate(grads):
        real = _real_rows(routing, rank, capacity_rows)
        past = torch.arange(capacity_rows) >= routing.offs[rank][-1]
        dots = (expert_out[rank].float() * grad.float()).sum(dim=1)
        grad_weights.append(_poison(dots.where(real, dots.new_zeros(())), past))
        weighted = _scale_rows(grad, recv_weights[rank])
        grad_expert_out.append(_poison(weighted.where(real[:, None], weighted.new_zeros(())), past))
    return grad_expert_out, grad_weights


def dispatch_backward(
    config: EpConfig,
    routing: Routing,
    d_recv: Sequence[Tensor],
    d_recv_weights: Sequence[Tensor] | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Pull the gradients of received rows and weights back to their tokens: answer (dx, dw).

    dx[t] is the sum over k, or by rank, as in `combine`. dw[t, k] is copied; 0 where there is no slot, and everywhere
    when the weights have no gradient.

    Shapes: d_recv[r] [C, H] token dtype, d_recv_weights[r] [C] float32; results [T_r, H] token dtype, [T_r, K] float32.
    """
    dx = combine(config, routing, d_recv)
    if d_recv_weights is None:
        return dx, [torch.zeros(slots.shape, dtype=torch.float32) for slots in routing.slot_map]
    columns = [weights[:, None] for weights in d_recv_weights]
    dw = [
        torch.stack([_pull(slots[:, k], columns)[:, 0] for k in range(slots.shape[1])], dim=1)
        for slots in routing.slot_map
    ]
    return dx, dw


def _code_values(exponent_bits: int, mantissa_bits: int, bias: int) -> Tensor:
    """List the values of the codes of a small float without sign, in float64: subnormals, then normals."""
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        values.append(mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias))
    return torch.tensor(values, dtype=torch.float64)


E2M1 = _code_values(2, 1, 1)
"""The values of the 8 codes of E2M1: 0 to 6. Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3."""

E4M3 = torch.cat([_code_values(4, 3, 7)[:-1], torch.tensor([torch.nan], dtype=torch.float64)])
"""The values of the 128 codes of E4M3: 0 to 448, and NaN. Source: OCP OFP8 revision 1.0, section 5."""


def _nearest(values: Tensor, grid: Tensor) -> Tensor:
    """Return the index of the nearest value of a grid, halfway the even one; the last beyond the grid.

    Shapes: values [...] float64 >= 0, grid [n] ascending from 0.
    """
    grid = grid.to(values.device)
    above = torch.searchsorted(grid, values.contiguous()).clamp(1, len(grid) - 1)
    to_below, to_above = values - grid[above - 1], grid[above] - values
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return torch.where(takes_above, above, above - 1)


def _e4m3(values: Tensor) -> Tensor:
    """Encode float64: nearest, ties to even, saturating; every NaN is 0x7F."""
    codes = _nearest(values.abs().nan_to_num(0.0), E4M3[:-1]) + 128 * values.signbit()
    return torch.where(values.isnan(), 0x7F, codes).to(torch.uint8)


def _signed(codes: Tensor, values: Tensor, sign: int) -> Tensor:
    magnitude = values.to(codes.device)[codes & (sign - 1)]
    return torch.where(codes & sign != 0, -magnitude, magnitude)


def _cut(rows: Tensor, payload: Payload) -> Tensor:
    """Cut rows into blocks. Shapes: rows [rows, H]; result [rows, H / block, block]."""
    return rows.reshape(len(rows), rows.shape[1] // payload.scale_block, payload.scale_block)


def _powers(scales: Tensor) -> Tensor:
    """Decode E8M0 bytes."""
    powers = torch.ldexp(torch.ones((), dtype=torch.float64, device=scales.device), scales.double() - 127).float()
    return torch.where(scales == 255, torch.nan, powers)


def _quotient(values: Tensor, divisor: int) -> Tensor:
    """Divide with one rounding; on CUDA torch multiplies by the reciprocal of a Python number, which rounds twice."""
    return values / torch.full_like(values, divisor)


def _mxfp8(blocks: Tensor, amax: Tensor) -> Quantised:
    mantissa, exponent = torch.frexp(_quotient(amax, 448))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-127)
    scales = torch.where(amax.isfinite(), torch.where(amax == 0, 0, exponent + 127), 255)
    shift = torch.where(scales == 0, 0, 127 - scales)[:, :, None]
    elements = torch.where(scales[:, :, None] == 255, torch.nan, torch.ldexp(blocks, shift))
    return Quantised(_e4m3(elements).flatten(1), scales.to(torch.uint8))


def _fp8_block128(blocks: Tensor, amax: Tensor) -> Quantised:
    scales = _quotient(amax.float(), 448)
    scales = torch.where(scales == 0, 1.0, scales)
    return Quantised(_e4m3((blocks.float() / scales[:, :, None]).double()).flatten(1), scales)


def _nvfp4(blocks: Tensor, amax: Tensor) -> Quantised:
    row_scales = _quotient(amax.amax(dim=1).float(), 448 * 6)
    row_scales = torch.where(row_scales == 0, 1.0, row_scales)
    scales = _e4m3(amax / (6 * row_scales.double()[:, None]))
    divisor = (E4M3.to(scales.device)[scales.long()] * row_scales.double()[:, None])[:, :, None]
    is_usable = divisor.isfinite() & (divisor != 0)
    magnitudes = torch.where(is_usable, blocks.abs() / divisor, 0.0)
    codes = (_nearest(magnitudes, E2M1) + 8 * blocks.signbit()).flatten(1).to(torch.uint8)
    return Quantised(codes[:, ::2] | codes[:, 1::2] << 4, scales, row_scales)


def _place(capacity_rows: int, routing: Routing, dest: int, parts: Sequence[Tensor]) -> Tensor:
    """Copy the rows of every rank into their slots on rank `dest`, and zeros everywhere else."""
    placed = parts[dest].new_zeros(capacity_rows, *parts[dest].shape[1:])
    for src, slots in enumerate(routing.slot_map):
        token, k = (slot_ranks(slots) == dest).nonzero(as_tuple=True)
        placed[slot_rows(slots)[token, k]] = parts[src][token]
    return placed


def _live_ids(
    config: EpConfig, topk_idx: Sequence[Tensor], num_tokens: Sequence[int | None] | None
) -> tuple[int, list[Tensor]]:
    """Copy the ids with every id that routes nothing set to -1, and count the bad ones among live tokens."""
    num_bad_ids, ids = 0, []
    for rank, rank_ids in enumerate(topk_idx):
        live = rank_ids.to(torch.int64, copy=True)
        limit = None if num_tokens is None else num_tokens[rank]
        if limit is not None:
            live[limit:] = -1
        bad = live >= config.num_experts
        num_bad_ids += int(bad.sum())
        ids.append(live.masked_fill(bad, -1).clamp(min=-1))
    return num_bad_ids, ids


def _fill_zones(
    config: EpConfig, capacity_rows: int, ids: Sequence[Tensor], slot_map: Sequence[Tensor], dest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the rows of rank `dest` to slots, zone by zone; answer its zones' (starts, counts, ends) before dropping."""
    num_local_experts = config.num_experts // config.num_ranks
    starts, counts, ends = [], [], [0]
    for expert in range(dest * num_local_experts, (dest + 1) * num_local_experts):
        starts.append(ends[-1])
        next_row = starts[-1]
        for src, rank_ids in enumerate(ids):
            hits = rank_ids == expert  # row-major order of [T, K] is the order (token, k)
            rows = torch.arange(next_row, next_row + int(hits.sum()))
            slot_map[src][hits] = torch.where(rows < capacity_rows, dest << _RANK_SHIFT | rows, NO_SLOT)
            next_row += len(rows)
        counts.append(next_row - starts[-1])
        ends.append(round_up(next_row, config.expert_alignment))
    return torch.tensor(starts), torch.tensor(counts), torch.tensor(ends[1:])


def _real_rows(routing: Routing, rank: int, capacity_rows: int) -> Tensor:
    """Mark the rows of `rank` that hold a token, [C] bool: neither padding nor past the last zone."""
    ends = routing.offs[rank].long()
    starts = ends - routing.tokens_per_expert[rank]
    rows = torch.arange(capacity_rows)[:, None]
    return ((rows >= starts) & (rows < starts + routing.valid_tokens_per_expert[rank])).any(dim=1)


def _scale_rows(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows.float() * weights[:, None]).to(rows.dtype)


def _poison(values: Tensor, where: Tensor) -> Tensor:
    values[where] = torch.nan
    return values


def _pull(slots: Tensor, regions: Sequence[Tensor]) -> Tensor:
    """Read one row per slot from the ranks' regions, as float32; zeros where there is no slot. Shapes: slots [T]."""
    rows = torch.zeros(len(slots), regions[0].shape[1], dtype=torch.float32)
    for src, region in enumerate(regions):
        mine = slot_ranks(slots) == src
        rows[mine] = region[slot_rows(slots[mine])].float()
    return rows


def _sum_slots(slots: Tensor, regions: Sequence[Tensor]) -> Tensor:
    """Add the rows of each token's slots in k order. Shapes: slots [T, K], regions[r] [C, H]; result [T, H]."""
    total = torch.zeros(slots.shape[0], regions[0].shape[1], dtype=torch.float32)
    for k in range(slots.shape[1]):
        total += _pull(slots[:, k], regions)
    return total.to(regions[0].dtype)


def _sum_by_rank(slots: Tensor, regions: Sequence[Tensor]) -> Tensor:
    """Add the rows of each token on each rank in k order, and the rounded sums in rank order. Shapes: likewise."""
    total = torch.zeros(slots.shape[0], regions[0].shape[1], dtype=torch.float32)
    for rank in range(len(regions)):
        on_rank = torch.where(slot_ranks(slots) == rank, slots, NO_SLOT)
        total += _sum_slots(on_rank, regions).float()
    return total.to(regions[0].dtype)
