"""Contract rules 1 to 10 against the reference: every named routing, shape and random case, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Pool, virtual
from rounds import DTYPES, compare, compare_rows, expected, play
from routings import BY_WIRE, NAMED, SHAPES, Case, changed, named_case, random_case, shape_case
from torch import Tensor

Spread = Callable[..., list[Any]]


def _cases() -> dict[str, tuple[str, Case]]:
    """List (how ranks run, case) by test id."""
    dtypes = list(DTYPES)
    named = [
        named_case(routing, num_ranks, alignment, dtypes[(i + j) % 3])
        for i, routing in enumerate(NAMED)
        for num_ranks, alignments in ((1, (1, 16)), (2, (1, 16, 128)), (4, (1, 16)), (8, (128,)))
        for j, alignment in enumerate(alignments)
        if not (routing == "empty_rank" and num_ranks == 1) and not (num_ranks == 8 and i % 2)
    ]
    shaped = [shape_case(shape, num_ranks) for shape in SHAPES for num_ranks in (1, 2, 4)]
    drawn = [random_case(seed) for seed in range(24)]
    processes = [
        named_case(routing, num_ranks, 16, dtypes[i % 3])
        for i, routing in enumerate(NAMED)
        for num_ranks in (1, 2, 4)
        if not (routing == "empty_rank" and num_ranks == 1)
    ] + [shape_case(shape, num_ranks) for shape in ("L5", "K_above_E", "H7168") for num_ranks in (2, 4)]
    virtual_ones, on_processes = [*named, *shaped, *drawn], list(processes)
    virtual_ones += [changed(case, "by_wire", **BY_WIRE) for case in virtual_ones if case.config.num_ranks > 1]
    on_processes += [changed(case, "by_wire", **BY_WIRE) for case in processes if case.config.num_ranks == 4]
    both = [("virtual", case) for case in virtual_ones] + [("processes", case) for case in on_processes]
    return {f"{how}-{case.name}": (how, case) for how, case in both}


CASES = _cases()


@pytest.fixture(scope="module")
def played(pool: Pool) -> Callable[..., list[dict[str, Tensor]]]:
    """Play each case once however many tests look at it: `played(test id, weighted, whole)`."""
    known: dict[tuple[str, bool, bool], list[dict[str, Tensor]] | BaseException] = {}

    def run(name: str, weighted: bool = False, whole: bool = False) -> list[dict[str, Tensor]]:
        key = (name, weighted, whole)
        if key not in known:
            how, case = CASES[name]
            runner: Spread = virtual if how == "virtual" else pool.run
            try:
                known[key] = runner(case.config.num_ranks, play, case, weighted, whole)
            except Exception as error:
                known[key] = error
        found = known[key]
        if isinstance(found, BaseException):
            raise found
        return found

    return run


Played = Callable[..., list[dict[str, Tensor]]]
every_case = pytest.mark.parametrize("name", list(CASES))
rounding_cases = pytest.mark.parametrize("name", [name for name in CASES if name.split("-")[1] in ("random", *SHAPES)])


@every_case
def test_zones_follow_local_index(name: str, played: Played) -> None:
    """Rule 1: expert e is local expert e % L of rank e // L; zone j has up(count_j, A) rows."""
    compare(played(name), expected(CASES[name][1], False, False), ("offs", "tokens_per_expert"))


@every_case
def test_slots_are_ordered_by_rank_token_k(name: str, played: Played) -> None:
    """Rule 2: inside a zone rows are ordered by (source rank, token index, k)."""
    compare(played(name), expected(CASES[name][1], False, False), ("slot_map",))


@every_case
def test_every_row_of_the_receive_region(name: str, played: Played) -> None:
    """Rules 3 and 6: real rows arrive bit for bit, padding is 0, rows past the last zone keep the poison."""
    compare(played(name), expected(CASES[name][1], False, False), ("recv_tokens", "recv_topk_weights"))


@every_case
def test_combine_sums_in_k_order(name: str, played: Played) -> None:
    """Rules 6 and 8: y is the fp32 sum in k order, or by rank, as rounded; a token with no live row gets zeros."""
    compare(played(name), expected(CASES[name][1], False, False), ("y",))


@rounding_cases
def test_weighted_combine_rounds_once(name: str, played: Played) -> None:
    """Rule 6: with topk_weights= each row is multiplied in fp32 by its weight and rounded once before the sum."""
    compare(played(name, weighted=True), expected(CASES[name][1], True, False), ("y",))


@every_case
def test_backward_of_rows(name: str, played: Played) -> None:
    """Rule 7: d_expert_out[slot] = dy[t], padding rows 0."""
    compare_rows(played(name), expected(CASES[name][1], False, False), ("grad_expert_out",))


@every_case
def test_backward_of_tokens_and_weights(name: str, played: Played) -> None:
    """Rule 7: dx[t] sums d_recv over its slots in k order, dw[t, k] = d_recv_weight[slot]; 0 where no slot."""
    compare(played(name), expected(CASES[name][1], False, False), ("dx", "dw"))


@every_case
def test_weighted_combine(name: str, played: Played) -> None:
    """Rule 6: y of a weighted combine, on whole numbers, in every routing."""
    compare(played(name, weighted=True, whole=True), expected(CASES[name][1], True, True), ("y",))


@every_case
def test_weighted_backward_on_whole_numbers(name: str, played: Played) -> None:
    """Rules 6 and 7: gradients of a weighted combine, rows and weights, equal the reference to the bit."""
    want = expected(CASES[name][1], True, True)
    compare_rows(played(name, weighted=True, whole=True), want, ("grad_expert_out", "grad_weights"))


@every_case
def test_overflow_is_counted_and_dropped_by_position(name: str, played: Played) -> None:
    """Rule 10: true rows kept, true demand, and a flag that is the same on all ranks."""
    names = ("valid_tokens_per_expert", "total_recv_tokens", "overflow")
    compare(played(name), expected(CASES[name][1], False, False), names)


@rounding_cases
def test_weighted_backward_within_rounding(name: str, played: Played) -> None:
    """Rule 6: gradients of the weights of a weighted combine agree with the reference within fp32 rounding."""
    case = CASES[name][1]
    for mine, want in zip(played(name, weighted=True), expected(case, True, False), strict=True):
        end = int(want["offs"][-1])
        torch.testing.assert_close(mine["grad_weights"][:end], want["grad_weights"][:end], rtol=1e-5, atol=1e-4)
