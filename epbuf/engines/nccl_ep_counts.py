"""Counts, zones and overflow of the contract, from what ranks gather of each other: what NCCL EP does not tell.

`RouteCounts` computes in operations of torch, on CPU; `DeviceCounts` asks two kernels of ours for the same. `judge`
alone is for the host.
"""

from __future__ import annotations

import torch

from epbuf import _C
from epbuf.control import ControlWords
from epbuf.engine import StreamOrder, route_call
from epbuf.engines.regions import RegionTensors
from epbuf.plan import COUNT_HEADER_CELLS, Plan

_COLUMN = _C.CountColumn


class RouteCounts:
    """One rank's part in the exchange of counts, and what follows from it for each frame."""

    def __init__(self, plan: Plan, rank: int, regions: RegionTensors, words: ControlWords) -> None:
        """Take the regions that routes fill."""
        self._config, self._capacity_rows, self._rank, self._words = plan.config, plan.capacity_rows, rank, words
        assert _COLUMN.BAD_VALUE < COUNT_HEADER_CELLS, "a row of counts has room for what is said beside them"
        self._ids = regions.all("nccl_ep_topk_idx")
        self._offs, self._counts, self._overflow = map(regions.all, ("offs", "counts", "overflow"))

    def column(self, column: _C.CountColumn) -> int:
        """Return where a row of counts has what is said beside them."""
        return self._config.num_experts + int(column)

    def sent_ids(self, frame: int, num_tokens: int) -> torch.Tensor:
        """Return topk_idx of a frame as the library takes it: -1 for what is not sent.

        Shapes: [T, K] int64.
        """
        return self._ids[frame][:num_tokens]

    def num_live_rows(self, frame: int) -> torch.Tensor:
        """Return the end of a frame's last zone.

        Shapes: [1] int32.
        """
        return self._offs[frame][-1:]

    def count(
        self, frame: int, row: torch.Tensor, topk_idx: torch.Tensor, live_tokens: torch.Tensor | None, refusal: int
    ) -> None:  # fmt: skip
        """Count the rows that this rank sends to each expert, and write its ids as the library takes them.

        An id at or past E, of a token that is not live, or that its token has before becomes -1. Repeated experts make
        the rank refuse: the library would send one row for both. With a refusal nothing is counted.

        Shapes: row [E + 8] int64, topk_idx [T, K] int32 or int64.
        """
        row.zero_()
        row[self.column(_COLUMN.REFUSAL)] = refusal
        if refusal or not topk_idx.shape[0]:
            return
        num_experts, ids = self._config.num_experts, self.sent_ids(frame, topk_idx.shape[0])
        ids.copy_(topk_idx).clamp_(-1, num_experts)
        if live_tokens is not None:
            ids.masked_fill_(torch.arange(ids.shape[0])[:, None] >= live_tokens, -1)
        self._note_bad_id(row, ids == num_experts, topk_idx)
        earlier = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril(-1)
        again = (ids[:, :, None] == ids[:, None, :]) & earlier
        is_repeated = again.any(2) & (ids >= 0) & (ids < num_experts)
        row[self.column(_COLUMN.REFUSAL)] = is_repeated.any() * int(_C.Refusal.REPEATED_EXPERT)
        ids.masked_fill_(is_repeated, -1)
        row += torch.bincount((ids + 1).view(-1), minlength=row.shape[0])
        ids.masked_fill_(ids == num_experts, -1)

    def _note_bad_id(self, row: torch.Tensor, is_bad: torch.Tensor, topk_idx: torch.Tensor) -> None:
        for token, topk in is_bad.nonzero()[:1].tolist():
            row[self.column(_COLUMN.BAD_TOKEN)], row[self.column(_COLUMN.BAD_TOPK)] = token, topk
            row[self.column(_COLUMN.BAD_VALUE)] = topk_idx[token, topk]

    def summarise(self, frame: int, rows: torch.Tensor, num_tokens: int) -> None:
        """Compute zones, counts, overflow and what is counted, from the counts of all ranks.

        On an overflow, sent ids of rows at or past the capacity become -1: the library, which has no more rows than
        that, would drop others, or trap.

        Shapes: rows [R, E + 8] int64.
        """
        config, capacity = self._config, self._capacity_rows
        num_local, alignment = config.num_local_experts, config.expert_alignment
        valid = rows[:, 1 : config.num_experts + 1].sum(0).view(config.num_ranks, num_local)
        ends = ((valid + (alignment - 1)) // alignment * alignment).cumsum(1)
        mine, kept = ends[self._rank], ends[self._rank].clamp(max=capacity)
        starts = torch.nn.functional.pad(mine, (1, 0))[:-1]
        self._offs[frame].copy_(kept)
        counts = self._counts[frame]
        counts[:num_local] = kept.diff(prepend=kept.new_zeros(1))
        counts[num_local : 2 * num_local] = valid[self._rank].minimum((capacity - starts).clamp(min=0))
        counts[2 * num_local :] = mine[-1:]
        demand, rank = ends[:, -1].max(0, keepdim=True)
        is_over = demand > capacity
        self._overflow[frame].copy_(is_over)
        if is_over.any():
            self._drop_rows(self.sent_ids(frame, num_tokens), rows, ends)
        self._words.note_demand(frame, demand)
        self._note(rows, demand, rank, is_over)

    def _drop_rows(self, ids: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> None:
        num_experts, flat = self._config.num_experts, ids.view(-1)
        starts = torch.nn.functional.pad(ends, (1, 0))[:, :-1].reshape(-1)
        firsts = starts + rows[: self._rank, 1 : num_experts + 1].sum(0)
        earlier = (flat[:, None] == torch.arange(num_experts)).cumsum(0) - 1
        expert = flat.clamp(min=0)
        row = firsts[expert] + earlier.gather(1, expert[:, None])[:, 0]
        flat.masked_fill_(row >= self._capacity_rows, -1)

    def _note(self, rows: torch.Tensor, demand: torch.Tensor, rank: torch.Tensor, is_over: torch.Tensor) -> None:
        """Count events in the words that the host reads."""
        word = self._words.word
        word("num_overflows").add_(is_over)
        _keep(word("max_demand_rows"), is_over, demand)
        _keep(word("max_demand_rank"), is_over, rank)
        num_bad = rows[:, self.column(_COLUMN.NUM_BAD_IDS)]
        word("num_bad_ids").add_(num_bad.sum())
        has_bad, worst = _first(num_bad > 0)
        _keep(word("bad_rank"), has_bad, worst)
        for column in (_COLUMN.BAD_TOKEN, _COLUMN.BAD_TOPK, _COLUMN.BAD_VALUE):
            _keep(word(column.name.lower()), has_bad, rows[worst, self.column(column)])
        self.count_refusal(rows)

    def count_refusal(self, rows: torch.Tensor) -> None:
        """Count a refusal if any rank refuses, and note the lowest that does.

        Shapes: rows [R, E + 8] int64.
        """
        word, refusals = self._words.word, rows[:, self.column(_COLUMN.REFUSAL)]
        refuses, rank = _first(refusals > 0)
        word("num_refusals").add_(refuses)
        _keep(word("refusing_rank"), refuses, rank)
        _keep(word("refusal"), refuses, refusals[rank])
        word("refused_op").masked_fill_(refuses, int(_C.Op.ROUTE))
        self._words.mirror()

    def judge(self, rows: torch.Tensor) -> _C.Outcome:
        """Say on the host what the gathered counts mean.

        Shapes: rows [R, E + 8] int64 cpu.
        """
        config, outcome = self._config, new_outcome()
        refusals, num_bad = (rows[:, self.column(c)] for c in (_COLUMN.REFUSAL, _COLUMN.NUM_BAD_IDS))
        refusing = refusals.nonzero().flatten().tolist()
        if refusing:
            outcome.status, outcome.refusing_rank = int(_C.Status.REFUSED), refusing[0]
            outcome.refusal = int(refusals[refusing[0]])
            return outcome
        counts = rows[:, 1 : config.num_experts + 1].sum(0).view(config.num_ranks, -1)
        demand = (-(-counts // config.expert_alignment) * config.expert_alignment).sum(1)
        outcome.max_demand_rows, outcome.max_demand_rank = int(demand.max()), int(demand.argmax())
        outcome.overflow = int(outcome.max_demand_rows > self._capacity_rows)
        outcome.num_bad_ids = int(num_bad.sum())
        for rank in num_bad.nonzero().flatten().tolist()[:1]:
            outcome.bad_rank = rank
            for column in (_COLUMN.BAD_TOKEN, _COLUMN.BAD_TOPK, _COLUMN.BAD_VALUE):
                setattr(outcome, column.name.lower(), int(rows[rank, self.column(column)]))
        return outcome


class DeviceCounts(RouteCounts):
    """The same by one kernel of ours before the exchange, and one behind it."""

    def __init__(
        self, plan: Plan, rank: int, regions: RegionTensors, words: ControlWords, native: _C.CudaEngine,
        streams: StreamOrder,
    ) -> None:  # fmt: skip
        """Take the engine whose kernels they are."""
        super().__init__(plan, rank, regions, words)
        self._native, self._streams = native, streams

    def count(
        self, frame: int, row: torch.Tensor, topk_idx: torch.Tensor, live_tokens: torch.Tensor | None, refusal: int
    ) -> None:  # fmt: skip
        call = route_call((frame, -1, refusal, 0, self._streams.current()), topk_idx, live_tokens)
        self._issued(self._native.count_ids(call, self._ids[frame].data_ptr(), row.data_ptr()))

    def summarise(self, frame: int, rows: torch.Tensor, num_tokens: int) -> None:
        call = _C.SummariseCall()
        call.frame, call.num_tokens, call.stream = frame, num_tokens, self._streams.current()
        call.count_rows, call.sent_ids = rows.data_ptr(), self._ids[frame].data_ptr()
        call.mirror = self._words.mirror_address
        self._issued(self._native.summarise(call))

    def _issued(self, outcome: _C.Outcome) -> None:
        assert outcome.status == int(_C.Status.OK), "nobody poisons an engine that talks to no peer"


def new_outcome() -> _C.Outcome:
    """Return the outcome of a call that met nothing."""
    outcome = _C.Outcome()
    outcome.status, outcome.refusing_rank, outcome.bad_rank, outcome.stash_rank = int(_C.Status.OK), -1, -1, -1
    return outcome


def _first(ranks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether any rank has something, and the lowest that has.

    Shapes: ranks [R] bool; result [1] bool, [1] int64.
    """
    found, rank = ranks.to(torch.int64).max(0, keepdim=True)
    return found > 0, rank


def _keep(word: torch.Tensor, condition: torch.Tensor, value: torch.Tensor) -> None:
    """Set a word where a condition holds, in stream order.

    Shapes: word, condition and value [1].
    """
    torch.where(condition, value.to(word.dtype), word, out=word)
