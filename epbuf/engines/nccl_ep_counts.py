"""Counts, zones and overflow of the contract, from what ranks gather of each other: what NCCL EP does not tell.

All is computed in operations of torch, which a graph records; `judge` alone is for the host.
"""

from __future__ import annotations

import torch

from epbuf import _C
from epbuf.control import ControlWords
from epbuf.engines.regions import RegionTensors
from epbuf.plan import COUNT_HEADER_CELLS, Plan

# Columns of a rank's row of counts: ids that mean no expert, E counts, ids at or past E, and then, from the end:
_NUM_BAD, _REFUSAL, _BAD_TOKEN, _BAD_TOPK, _BAD_VALUE = -7, -6, -5, -4, -3
assert _NUM_BAD + COUNT_HEADER_CELLS == 1, "an id of E is counted in the column behind the last expert's"


class RouteCounts:
    """One rank's part in the exchange of counts, and what follows from it for each frame.

    Attributes:
        ids: for each frame, topk_idx as the library takes it: [T, K] int64, -1 for what is not sent.
    """

    def __init__(self, plan: Plan, rank: int, regions: RegionTensors, words: ControlWords) -> None:
        """Make what routes compute with, once: addresses that a graph keeps."""
        config = plan.config
        num_topk, tokens = config.num_topk, config.max_tokens_per_rank
        self._config, self._capacity_rows, self._rank, self._words = config, plan.capacity_rows, rank, words
        self.ids = regions.all("nccl_ep_topk_idx")
        self._offs, self._counts, self._overflow = map(regions.all, ("offs", "counts", "overflow"))
        device = self.ids[0].device
        self._token = torch.arange(tokens, device=device)[:, None]
        self._earlier = torch.ones(num_topk, num_topk, dtype=torch.bool, device=device).tril(-1)
        self._unit = torch.ones(tokens * num_topk, dtype=torch.int64, device=device)

    def refuse(self, row: torch.Tensor, refusal: int) -> None:
        """Say in this rank's row that it refuses.

        Shapes: row [E + 8] int64.
        """
        row[_REFUSAL].fill_(refusal)

    def num_live_rows(self, frame: int) -> torch.Tensor:
        """Return the end of a frame's last zone.

        Shapes: [1] int32.
        """
        return self._offs[frame][-1:]

    def count(
        self, row: torch.Tensor, ids: torch.Tensor, topk_idx: torch.Tensor, live_tokens: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Count the rows that this rank sends to each expert, and write its ids as the library takes them.

        An id at or past E, of a token that is not live, or that its token has before becomes -1. Repeated experts make
        the rank refuse: the library would send one row for both.

        Shapes: row [E + 8] int64, ids [T, K] int64, topk_idx [T, K] int32 or int64.
        """
        row.zero_()
        if not ids.shape[0]:
            return
        num_experts = self._config.num_experts
        ids.copy_(topk_idx).clamp_(-1, num_experts)
        if live_tokens is not None:
            ids.masked_fill_(self._token[: ids.shape[0]] >= live_tokens, -1)
        if self._config.validate_ids:
            self._note_bad_id(row, ids, topk_idx)
        again = (ids[:, :, None] == ids[:, None, :]) & self._earlier
        is_repeated = again.any(2) & (ids >= 0) & (ids < num_experts)
        row[_REFUSAL].copy_(is_repeated.any() * int(_C.Refusal.REPEATED_EXPERT))
        ids.masked_fill_(is_repeated, -1)
        row.scatter_add_(0, (ids + 1).view(-1), self._unit[: ids.numel()])
        ids.masked_fill_(ids == num_experts, -1)

    def _note_bad_id(self, row: torch.Tensor, ids: torch.Tensor, topk_idx: torch.Tensor) -> None:
        first = (ids == self._config.num_experts).view(-1).to(torch.int8).argmax()
        row[_BAD_TOKEN].copy_(first // ids.shape[1])
        row[_BAD_TOPK].copy_(first % ids.shape[1])
        row[_BAD_VALUE].copy_(topk_idx.reshape(-1)[first])

    def summarise(self, frame: int, rows: torch.Tensor) -> None:
        """Compute zones, counts, overflow and what is counted, from the counts of all ranks.

        Shapes: rows [R, E + 8] int64.
        """
        config, capacity = self._config, self._capacity_rows
        num_local, alignment = config.num_local_experts, config.expert_alignment
        valid = rows[:, 1 : config.num_experts + 1].sum(0).view(config.num_ranks, num_local)
        ends = ((valid + (alignment - 1)) // alignment * alignment).cumsum(1)
        mine, kept = ends[self._rank], ends[self._rank].clamp(max=capacity)
        padded = kept.diff(prepend=self._unit.new_zeros(1))
        starts = torch.nn.functional.pad(mine, (1, 0))[:-1]
        self._offs[frame].copy_(kept)
        counts = self._counts[frame]
        counts[:num_local] = padded
        counts[num_local : 2 * num_local] = valid[self._rank].minimum((capacity - starts).clamp(min=0))
        counts[2 * num_local :] = mine[-1:]
        demand, rank = ends[:, -1].max(0, keepdim=True)
        is_over = demand > capacity
        self._overflow[frame].copy_(is_over)
        self._words.note_demand(frame, demand)
        self._note(rows, demand, rank, is_over)

    def _note(self, rows: torch.Tensor, demand: torch.Tensor, rank: torch.Tensor, is_over: torch.Tensor) -> None:
        """Count events in the words that the host reads."""
        word = self._words.word
        word("num_overflows").add_(is_over)
        _keep(word("max_demand_rows"), is_over, demand)
        _keep(word("max_demand_rank"), is_over, rank)
        num_bad = rows[:, _NUM_BAD]
        word("num_bad_ids").add_(num_bad.sum())
        if self._config.validate_ids:
            has_bad, worst = _first(num_bad > 0)
            _keep(word("bad_rank"), has_bad, worst)
            for name, column in (("bad_token", _BAD_TOKEN), ("bad_topk", _BAD_TOPK), ("bad_value", _BAD_VALUE)):
                _keep(word(name), has_bad, rows[worst, column])
        self.count_refusal(rows)

    def count_refusal(self, rows: torch.Tensor) -> None:
        """Count a refusal if any rank refuses, and note the lowest that does.

        Shapes: rows [R, E + 8] int64.
        """
        word, refusals = self._words.word, rows[:, _REFUSAL]
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
        refusing = rows[:, _REFUSAL].nonzero().flatten().tolist()
        if refusing:
            outcome.status, outcome.refusing_rank = int(_C.Status.REFUSED), refusing[0]
            outcome.refusal = int(rows[refusing[0], _REFUSAL])
            return outcome
        counts = rows[:, 1 : config.num_experts + 1].sum(0).view(config.num_ranks, -1)
        demand = (-(-counts // config.expert_alignment) * config.expert_alignment).sum(1)
        outcome.max_demand_rows, outcome.max_demand_rank = int(demand.max()), int(demand.argmax())
        outcome.overflow = int(outcome.max_demand_rows > self._capacity_rows)
        outcome.num_bad_ids = int(rows[:, _NUM_BAD].sum())
        if outcome.num_bad_ids and config.validate_ids:
            bad = int((rows[:, _NUM_BAD] > 0).nonzero()[0])
            outcome.bad_rank, outcome.bad_token = bad, int(rows[bad, _BAD_TOKEN])
            outcome.bad_topk, outcome.bad_value = int(rows[bad, _BAD_TOPK]), int(rows[bad, _BAD_VALUE])
        return outcome


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
