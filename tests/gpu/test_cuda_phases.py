"""The kernels for several ranks on one GPU in one process: every phase on all ranks before the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import routings
import torch
from gpus import GpuPool
from phases import PLACE, VirtualRanks, combine, dispatch, play_virtual, route
from rounds import Inputs, assert_round, draw_inputs, expected
from routings import NAMED, Case, in_form, named_case, random_case, shape_case

from epbuf import _C
from epbuf.engine import Place, Rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

VARIANTS = ((False, False), (True, True))  # (weighted, whole numbers)
REFUSAL = int(_C.Refusal.SHAPE)


def _inputs(case: Case, whole: bool) -> list[Inputs]:
    return [draw_inputs(case, rank, whole, "cuda") for rank in range(case.config.num_ranks)]


def _compare(ranks: VirtualRanks, case: Case) -> None:
    for weighted, whole in VARIANTS:
        got = play_virtual(ranks, _inputs(case, whole), weighted)
        for rank, (mine, want) in enumerate(zip(got, expected(case, weighted, whole), strict=True)):
            assert_round(mine, want, f"{case.name}, rank {rank}")


def play_all(rank: int, group: Any, cases: Sequence[Case]) -> int:
    for case in cases:
        with VirtualRanks(case.config) as ranks:
            _compare(ranks, case)
        expected.cache_clear()
    return len(cases)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num_ranks", [2, 4, 8], ids="R{}".format)
def test_named_routings(pool: GpuPool, num_ranks: int) -> None:
    """Rules 1 to 10: route, dispatch, combine and both backwards equal the reference to the bit."""
    dtypes = ("bf16", "fp16", "fp32")
    cases = [
        named_case(routing, num_ranks, (1, 16, 128)[i % 3], dtypes[i // 3 % 3], hidden=(8, 72, 1000)[i % 3])
        for i, routing in enumerate(NAMED)
    ]
    assert pool.run(1, play_all, cases) == [len(cases)]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num_ranks", [2, 8], ids="R{}".format)
def test_named_shapes(pool: GpuPool, num_ranks: int) -> None:
    """Rule 11, with more tokens than one kernel can route, and few experts or one token."""
    cases = [shape_case(shape, num_ranks) for shape in ("L1", "L5", "K_above_E", "K64", "T1", "T_many_chunks")]
    assert pool.run(1, play_all, cases) == [len(cases)]


@pytest.mark.usefixtures("form")
def test_random_routings(pool: GpuPool) -> None:
    """Rules 1 to 11 on random sizes, capacities and ids, bad and repeated ones included, on 1 to 8 ranks."""
    assert pool.run(1, play_all, [random_case(seed) for seed in range(100, 140)]) == [40]


def _refused(ranks: VirtualRanks, op: str, inputs: Sequence[Inputs]) -> None:
    """Play a round up to the op that rank 1 refuses; nothing moves there on any rank."""

    def place(rank: int) -> Place:
        return Place(0, 0, REFUSAL if rank == 1 else 0)

    if op == "route":
        ranks.run(lambda r, e: e.route(place(r) if r != 1 else Place(0, -1, REFUSAL), inputs[r].topk_idx, None))
        return
    route(ranks, inputs)
    if op == "dispatch":
        ranks.run(lambda r, e: e.dispatch(place(r), inputs[r].x, None))
        return
    dispatch(ranks, inputs)
    y = [torch.full_like(i.x, 7) for i in inputs]
    rows = [Rows(i.expert_out) for i in inputs]
    if op == "combine":
        ranks.run(lambda r, e: e.combine(place(r), Rows(in_window=True) if r == 1 else rows[r], None, y[r]))
        torch.cuda.synchronize()
        assert all(bool((out == 7).all()) for out in y)
        return
    combine(ranks, inputs, False)
    if op == "combine_backward":
        ranks.run(lambda r, e: e.combine_backward(place(r), inputs[r].dy, False))
        return
    lone = op == "lone_dispatch_backward"
    if not lone:
        ranks.run(lambda r, e: e.combine_backward(PLACE, inputs[r].dy, False))
    ranks.run(
        lambda r, e: e.dispatch_backward(
            place(r), (Rows(), Rows()), y[r], None, num_tokens=len(y[r]), begins_use=lone, clears_open=True
        )
    )
    torch.cuda.synchronize()
    assert all(bool((out == 7).all()) for out in y)


def compare_refused(rank: int, group: Any, op: str) -> list[tuple[int, int, int, int]]:
    case = named_case("some_negative", 4, 16)
    with VirtualRanks(case.config) as ranks:
        _compare(ranks, case)
        _refused(ranks, op, _inputs(case, True))
        found = [(c.num_refusals, c.refusing_rank, c.refusal, c.refused_op) for c in ranks.controls()]
        _compare(ranks, case)
        _refused(ranks, op, _inputs(case, True))
        _compare(ranks, case)
        assert [control.num_refusals for control in ranks.controls()] == [2] * 4
        return found


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    "op", ["route", "dispatch", "combine", "combine_backward", "dispatch_backward", "lone_dispatch_backward"]
)
def test_refusal_of_one_rank(pool: GpuPool, op: str) -> None:
    """One rank refuses an op: the round is completed everywhere, all ranks know who and why, and the next round is
    right.
    """
    number = int(_C.Op[op.removeprefix("lone_").upper()])
    assert pool.run(1, in_form, routings.form, compare_refused, op) == [[(1, 1, REFUSAL, number)] * 4]
