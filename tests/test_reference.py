"""The reference against formulations that share nothing with it: sorting, one-hot sums in float64, torch's autograd."""

from __future__ import annotations

import doctest
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from epbuf import reference
from epbuf.config import EpConfig
from epbuf.reference import Routing, slot_ranks, slot_rows

SHAPES = {
    "R1": {"num_ranks": 1, "num_experts": 3, "num_topk": 2},
    "R2-A4": {"num_ranks": 2, "num_experts": 6, "num_topk": 3, "expert_alignment": 4},
    "R4-L5": {"num_ranks": 4, "num_experts": 20, "num_topk": 4, "expert_alignment": 2},
    "R3-K_above_E": {"num_ranks": 3, "num_experts": 3, "num_topk": 5, "expert_alignment": 8},
}


@dataclass(frozen=True)
class Round:
    """A drawn routing with ids below 0, ids past E, duplicates, and another T on every rank."""

    config: EpConfig
    capacity: int
    topk_idx: list[Tensor]
    num_tokens: list[int | None]
    routing: Routing

    def whole(self, *shape: int) -> Tensor:
        """Draw small whole numbers, whose sums are exact in any order."""
        return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).float()

    def tokens(self) -> list[Tensor]:
        return [self.whole(len(ids), self.config.hidden) + rank for rank, ids in enumerate(self.topk_idx)]

    def weights(self) -> list[Tensor]:
        return [self.whole(*ids.shape) - rank for rank, ids in enumerate(self.topk_idx)]

    def rows(self) -> list[Tensor]:
        return [self.whole(self.capacity, self.config.hidden) + rank for rank in range(self.config.num_ranks)]

    def row_weights(self) -> list[Tensor]:
        return [self.whole(self.capacity) - rank for rank in range(self.config.num_ranks)]


@pytest.fixture(params=[(shape, fit) for shape in SHAPES for fit in ("roomy", "tight")], ids="-".join)
def drawn(request: pytest.FixtureRequest) -> Round:
    shape, fit = request.param
    config = EpConfig(hidden=8, max_tokens_per_rank=9, **SHAPES[shape])
    generator = torch.Generator().manual_seed(len(shape))
    topk_idx = [
        torch.randint(-1, config.num_experts + 2, (max(9 - 4 * rank, 0), config.num_topk), generator=generator)
        for rank in range(config.num_ranks)
    ]
    num_tokens: list[int | None] = [4, *[None] * (config.num_ranks - 1)]
    roomy = reference.route(config, 10_000, topk_idx, num_tokens)
    demand = max(int(rows) for rows in roomy.total_recv_tokens)
    capacity = demand + config.expert_alignment * (1 if fit == "roomy" else -2)
    return Round(config, capacity, topk_idx, num_tokens, reference.route(config, capacity, topk_idx, num_tokens))


def live_routes(drawn: Round) -> list[tuple[int, int, int, int]]:
    """List (expert, source rank, token, k) of every id that asks for a row, in the order of the contract."""
    return sorted(
        (int(expert), rank, token, k)
        for rank, ids in enumerate(drawn.topk_idx)
        for token, of_token in enumerate(ids[: drawn.num_tokens[rank]].tolist())
        for k, expert in enumerate(of_token)
        if 0 <= expert < drawn.config.num_experts
    )


def sorted_slots(drawn: Round) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Compute (rank, token, k) -> (destination, row) by walking the sorted routes."""
    slots, num_local_experts = {}, drawn.config.num_experts // drawn.config.num_ranks
    row, before = 0, (0, 0)
    for expert, *source in live_routes(drawn):
        dest, local = divmod(expert, num_local_experts)
        if dest != before[0]:
            row = 0
        elif local != before[1]:
            row += -row % drawn.config.expert_alignment
        before = (dest, local)
        if row < drawn.capacity:
            slots[tuple(source)] = (dest, row)
        row += 1
    return slots


def one_hot(drawn: Round, rank: int) -> Tensor:
    """Mark the slot of every (token, k) of a rank. Shapes: [T, K, R, C] float64."""
    marks = torch.zeros(*drawn.topk_idx[rank].shape, drawn.config.num_ranks, drawn.capacity, dtype=torch.float64)
    for (source, token, k), (dest, row) in sorted_slots(drawn).items():
        if source == rank:
            marks[token, k, dest, row] = 1
    return marks


def below(rows: Tensor, end: int) -> Tensor:
    return rows[:end].double()


def equal(actual: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=0, atol=0, equal_nan=True)


def test_examples_in_docstrings() -> None:
    """The worked examples say what the code does."""
    outcome = doctest.testmod(reference)
    assert outcome.attempted > 20 and outcome.failed == 0


def test_slots_are_those_of_a_sort(drawn: Round) -> None:
    """Sorting all routes by (expert, rank, token, k) gives every slot; what does not fit has none."""
    found = {
        (rank, token, k): (int(slot_ranks(slots[token, k])), int(slot_rows(slots[token, k])))
        for rank, slots in enumerate(drawn.routing.slot_map)
        for token in range(len(slots))
        for k in range(slots.shape[1])
        if slots[token, k] != reference.NO_SLOT
    }
    assert found == sorted_slots(drawn)


def test_zones_follow_from_counts(drawn: Round) -> None:
    """Ends, padded rows, true rows and demand are those of the counts, cut at the capacity."""
    config, capacity = drawn.config, drawn.capacity
    num_local_experts = config.num_experts // config.num_ranks
    counts = torch.bincount(torch.tensor([r[0] for r in live_routes(drawn)]), minlength=config.num_experts)
    for rank, of_rank in enumerate(counts.split(num_local_experts)):
        ends = (-(-of_rank // config.expert_alignment) * config.expert_alignment).cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
        rows = torch.arange(capacity)[:, None]
        routing = drawn.routing
        assert routing.offs[rank].tolist() == ends.clamp(max=capacity).tolist()
        assert routing.offs[rank].dtype == torch.int32
        assert routing.tokens_per_expert[rank].tolist() == ((rows >= starts) & (rows < ends)).sum(0).tolist()
        assert (
            routing.valid_tokens_per_expert[rank].tolist()
            == ((rows >= starts) & (rows < starts + of_rank)).sum(0).tolist()
        )
        assert routing.total_recv_tokens[rank].tolist() == [int(ends[-1])]


def test_overflow_is_one_flag_for_all(drawn: Round) -> None:
    """Overflow says whether any rank needs more than the capacity."""
    needed = max(int(rows) for rows in drawn.routing.total_recv_tokens)
    assert drawn.routing.overflow.tolist() == [float(needed > drawn.capacity)]
    assert drawn.routing.overflow.dtype == torch.float32


def test_bad_ids_are_counted_among_live_tokens(drawn: Round) -> None:
    """Ids at or past E count once each, rows past num_tokens not at all; int32 ids give the same slots."""
    live = [ids[:limit] for ids, limit in zip(drawn.topk_idx, drawn.num_tokens, strict=True)]
    assert drawn.routing.num_bad_ids == sum(int((ids >= drawn.config.num_experts).sum()) for ids in live)
    narrow = reference.route(drawn.config, drawn.capacity, [i.int() for i in drawn.topk_idx], drawn.num_tokens)
    equal(narrow.slot_map, drawn.routing.slot_map)


def test_route_leaves_the_ids_alone(drawn: Round) -> None:
    """Ids that route nothing are ignored, not overwritten."""
    ids = [torch.full_like(i, drawn.config.num_experts) for i in drawn.topk_idx]
    routing = reference.route(drawn.config, drawn.capacity, ids, [0] * len(ids))
    assert routing.num_bad_ids == 0
    equal(ids, [torch.full_like(i, drawn.config.num_experts) for i in drawn.topk_idx])


def test_dispatch_is_a_one_hot_product(drawn: Round) -> None:
    """Below the last end every row is the sum of its one source, or zero padding; later rows stay unwritten."""
    x, w = drawn.tokens(), drawn.weights()
    tokens, weights, written = reference.dispatch(drawn.config, drawn.capacity, drawn.routing, x, w)
    marks = [one_hot(drawn, rank) for rank in range(drawn.config.num_ranks)]
    want = sum(torch.einsum("tkrc,th->rch", m, rows.double()) for m, rows in zip(marks, x, strict=True))
    want_weights = sum(torch.einsum("tkrc,tk->rc", m, v.double()) for m, v in zip(marks, w, strict=True))
    assert isinstance(want, Tensor) and isinstance(want_weights, Tensor)
    for rank, offs in enumerate(drawn.routing.offs):
        end = int(offs[-1])
        equal([tokens[rank][:end], weights[rank][:end]], [want[rank, :end], want_weights[rank, :end]])
        assert tokens[rank][end:].isnan().all() and weights[rank][end:].isnan().all()
        assert written[rank].tolist() == [row < end for row in range(drawn.capacity)]


def test_dispatch_without_weights_marks_real_rows(drawn: Round) -> None:
    """A missing weight is 1 for a row that holds a token and 0 for padding."""
    _, weights, _ = reference.dispatch(drawn.config, drawn.capacity, drawn.routing, drawn.tokens(), None)
    for rank, offs in enumerate(drawn.routing.offs):
        real = sum(one_hot(drawn, source)[:, :, rank].sum((0, 1)) for source in range(drawn.config.num_ranks))
        assert isinstance(real, Tensor)
        equal([weights[rank][: int(offs[-1])]], [below(real, int(offs[-1]))])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_combine_is_a_one_hot_product(drawn: Round, weighted: bool) -> None:
    """Every token is the sum over k of its rows, times their weights."""
    rows, weights = drawn.rows(), drawn.row_weights()
    y = reference.combine(drawn.config, drawn.routing, rows, weights if weighted else None)
    factors = torch.stack(weights) if weighted else torch.ones(len(rows), drawn.capacity)
    staged = torch.stack(rows).double() * factors.double()[..., None]
    equal(y, [torch.einsum("tkrc,rch->th", one_hot(drawn, rank), staged) for rank in range(len(rows))])


@pytest.mark.parametrize("ids, want", [([0, 1, 2], 0.0), ([0, 2, 1], 1.0)], ids=["lost", "kept"])
def test_combine_adds_in_k_order(ids: list[int], want: float) -> None:
    """1e8 + 1 - 1e8 loses the 1 in float32, 1e8 - 1e8 + 1 keeps it."""
    config = EpConfig(num_ranks=1, num_experts=3, num_topk=3, hidden=8, max_tokens_per_rank=1)
    routing = reference.route(config, 3, [torch.tensor([ids])])
    rows = torch.tensor([1e8, 1.0, -1e8])[:, None].expand(3, 8)
    assert reference.combine(config, routing, [rows])[0].tolist() == [[want] * 8]


def test_combine_rounds_once_without_weights_and_each_row_with() -> None:
    """In bf16, 1 + 2^-8 + 2^-8 is exact in float32 and rounds to 1 + 2^-7; weighted rows are rounded before the sum."""
    config = EpConfig(num_ranks=1, num_experts=3, num_topk=3, hidden=8, max_tokens_per_rank=1)
    routing = reference.route(config, 3, [torch.tensor([[0, 1, 2]])])
    rows = torch.tensor([1.0, 2**-8, 2**-8]).bfloat16()[:, None].expand(3, 8)
    assert reference.combine(config, routing, [rows])[0].tolist() == [[1 + 2**-7] * 8]
    ones = torch.ones(3, 8).bfloat16()
    weights = torch.tensor([1 + 2**-8, 1 + 2**-8, 0.0])  # each product rounds to 1, their float32 sum would not
    assert reference.combine(config, routing, [ones], [weights])[0].tolist() == [[2.0] * 8]


def test_by_rank_adds_the_rounded_sums_of_the_ranks(drawn: Round) -> None:
    """Walking the sorted routes: bf16 sums of each rank's rows in k order, added in rank order and rounded."""
    config = EpConfig.model_validate(drawn.config.model_dump() | {"combine_order": "by_rank"})
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randn(drawn.capacity, config.hidden, generator=generator).bfloat16() for _ in drawn.topk_idx]
    sums: dict[tuple[int, int], dict[int, Tensor]] = {}
    for (rank, token, _), (dest, row) in sorted(sorted_slots(drawn).items()):
        of_rank = sums.setdefault((rank, token), {})
        of_rank[dest] = of_rank.get(dest, torch.zeros(config.hidden)) + rows[dest][row].float()
    want = [torch.zeros(len(ids), config.hidden).bfloat16() for ids in drawn.topk_idx]
    for (rank, token), of_rank in sums.items():
        total = torch.zeros(config.hidden)
        for dest in range(config.num_ranks):
            total = total + of_rank.get(dest, torch.zeros(config.hidden)).bfloat16().float()
        want[rank][token] = total.bfloat16()
    got = reference.combine(config, drawn.routing, rows)
    equal(got, want)
    equal(reference.dispatch_backward(config, drawn.routing, rows, None)[0], want)
    in_k_order = reference.combine(drawn.config, drawn.routing, rows)
    is_other = any(not torch.equal(a, b) for a, b in zip(got, in_k_order, strict=True))
    assert is_other <= (config.num_ranks > 1) <= is_other | bool(drawn.routing.overflow)


def autograd_round(drawn: Round, weighted: bool) -> dict[str, list[Tensor]]:
    """Differentiate dispatch and combine written as index_select, and answer all gradients by name."""
    x, w = [[v.double().requires_grad_() for v in values] for values in (drawn.tokens(), drawn.weights())]
    out, factors = [[v.double().requires_grad_() for v in values] for values in (drawn.rows(), drawn.row_weights())]
    d_recv, d_factors = drawn.rows()[::-1], drawn.row_weights()[::-1]
    slots = sorted_slots(drawn)
    recv_loss, y = torch.zeros((), dtype=torch.float64), [v.detach() * 0 for v in x]
    for (rank, token, k), (dest, row) in slots.items():
        at = torch.tensor([row])
        recv_loss = recv_loss + (x[rank].index_select(0, torch.tensor([token]))[0] * d_recv[dest][row]).sum()
        recv_loss = recv_loss + w[rank][token, k] * d_factors[dest][row]
        pulled = out[dest].index_select(0, at)[0] * (factors[dest][row] if weighted else 1.0)
        y[rank] = y[rank].index_add(0, torch.tensor([token]), pulled[None])
    y_loss = sum((a * b).sum() for a, b in zip(y, drawn.tokens(), strict=True))
    leaves = {"dx": x, "dw": w, "d_expert_out": out, "d_recv_weights": factors}
    assert isinstance(y_loss, Tensor)
    (recv_loss + y_loss + sum(v.sum() * 0 for values in leaves.values() for v in values)).backward()
    return {name: [v.grad for v in values if v.grad is not None] for name, values in leaves.items()}


def test_dispatch_backward_is_autograd(drawn: Round) -> None:
    """dx sums the gradients of a token's rows, dw fetches those of its weights; 0 where there is no slot."""
    want = autograd_round(drawn, weighted=False)
    d_recv, d_weights = drawn.rows()[::-1], drawn.row_weights()[::-1]
    for rank, offs in enumerate(drawn.routing.offs):  # garbage where no op may look
        d_recv[rank][int(offs[-1]) :], d_weights[rank][int(offs[-1]) :] = torch.nan, torch.nan
    dx, dw = reference.dispatch_backward(drawn.config, drawn.routing, d_recv, d_weights)
    equal(dx, want["dx"])
    equal(dw, want["dw"])
    _, without = reference.dispatch_backward(drawn.config, drawn.routing, d_recv, None)
    equal(without, [torch.zeros_like(v) for v in dw])


def test_combine_backward_is_autograd(drawn: Round) -> None:
    """Every row gets its token's gradient, padding 0; rows past the last zone are not written."""
    want = autograd_round(drawn, weighted=False)["d_expert_out"]
    got = reference.combine_backward(drawn.config, drawn.capacity, drawn.routing, drawn.tokens())
    for rank, offs in enumerate(drawn.routing.offs):
        end = int(offs[-1])
        equal([got[rank][:end]], [want[rank][:end]])
        assert got[rank][end:].isnan().all()


def test_weighted_combine_backward_is_autograd(drawn: Round) -> None:
    """Rows and weights get the gradients of the product, whatever the padding of expert_out holds."""
    want = autograd_round(drawn, weighted=True)
    real = [torch.isfinite(w) & (w == 1) for w in real_rows(drawn)]
    expert_out, factors = drawn.rows(), drawn.row_weights()
    for rank, rows in enumerate(real):
        expert_out[rank][~rows], factors[rank][~rows] = torch.nan, torch.nan
    d_rows, d_weights = reference.combine_backward_weighted(
        drawn.config, drawn.capacity, drawn.routing, drawn.tokens(), expert_out, factors
    )
    for rank, offs in enumerate(drawn.routing.offs):
        end = int(offs[-1])
        equal([d_rows[rank][:end]], [want["d_expert_out"][rank][:end]])
        equal([d_weights[rank][:end]], [want["d_recv_weights"][rank][:end]])
        assert d_rows[rank][end:].isnan().all() and d_weights[rank][end:].isnan().all()


def real_rows(drawn: Round) -> list[Tensor]:
    """Give weight 1 to every row that holds a token."""
    _, weights, _ = reference.dispatch(drawn.config, drawn.capacity, drawn.routing, drawn.tokens(), None)
    return weights
