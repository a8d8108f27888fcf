"""Quantised and raw rows on CUDA: the bits of the reference, in eager calls, a capture and its replays."""

from __future__ import annotations

from typing import Any

import pytest
import routings
import torch
from gpus import GpuPool, open_arena, places
from rounds import draw_inputs
from routings import Case, in_form
from test_payloads import (
    PAYLOADS,
    ROUTINGS,
    assert_raw,
    assert_received,
    assert_round,
    case_of,
    copies,
    eager_and_replayed,
    encoded_inputs,
    every_form,
    every_payload,
    expected,
    poison,
    raw_case,
    raw_round,
    round_of,
)
from torch import Tensor

import epbuf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def on_cpu(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.cpu()
    return [on_cpu(part) for part in result] if isinstance(result, list) else result


def _rounds(rank: int, group: Any, window: str, cases: list[tuple[Case, bool]]) -> list[dict[str, Any]]:
    results = []
    for case, weighted in cases:
        inputs = draw_inputs(case, rank, False, "cuda")
        with open_arena(group, window, case.config) as arena:
            round_of(arena, inputs, weighted)
            got = round_of(arena, inputs, weighted)
            results.append({name: on_cpu(value) for name, value in got.items()})
            arena.check()
    return results


def _cases(word: str, num_ranks: int) -> list[tuple[Case, bool]]:
    """Every routing in bf16; each dtype with weights; rows of one, two and a half, and many steps of 512 elements."""
    cases = [(case_of(word, routing, num_ranks), False) for routing in ROUTINGS]
    cases += [(case_of(word, num_ranks=num_ranks, dtype=dtype), True) for dtype in ("bf16", "fp16", "fp32")]
    return cases + [(case_of(word, num_ranks=num_ranks, hidden=hidden), False) for hidden in (384, 1280, 7168)]


@places((1, "local"), (2, "torch_symm"), (4, "torch_symm"))
@every_payload
@every_form
def test_rounds_equal_the_reference(pool: GpuPool, num_ranks: int, window: str, word: str) -> None:
    """Data, scales and row scales, padding 0, nothing behind the zones, gradients of both directions: to the bit."""
    cases = _cases(word, num_ranks)
    results = pool.run(num_ranks, _rounds, window, cases)
    for number, (case, weighted) in enumerate(cases):
        assert_round(case, [rank[number] for rank in results], weighted)


def _prequantised(rank: int, group: Any, window: str, case: Case) -> list[Tensor]:
    rows, scales = encoded_inputs(case, rank)
    scales = tuple(part.cuda() for part in scales) if isinstance(scales, tuple) else scales.cuda()
    inputs = draw_inputs(case, rank, False, "cuda")
    with open_arena(group, window, case.config) as arena, torch.no_grad():
        poison(arena)
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, rows.cuda(), inputs.topk_idx, x_scales=scales, num_tokens=inputs.num_tokens)
            got = copies(recv.tokens, recv.scales, recv.row_scales)
            end = int(recv.offs[-1])
        arena.check()
    return [part.cpu() for part in got] + [torch.tensor(end)]


@places((2, "torch_symm"))
@every_payload
@every_form
def test_rows_that_are_encoded_already(pool: GpuPool, num_ranks: int, window: str, word: str) -> None:
    """Rows and scales that the caller encoded arrive as the rows that dispatch would have encoded."""
    case = case_of(word, num_ranks=num_ranks)
    for rank, (*got, end) in enumerate(pool.run(num_ranks, _prequantised, window, case)):
        assert_received(got, expected(case, "x", PAYLOADS[word])[rank], int(end))


def _raw(rank: int, group: Any, window: str, scale_row_bytes: int) -> dict[str, Any]:
    with open_arena(group, window, raw_case(scale_row_bytes).config) as arena:
        got = raw_round(arena, scale_row_bytes)
        arena.check()
    return got


@every_form
@places((2, "torch_symm"))
@pytest.mark.parametrize("scale_row_bytes", [0, 32])
def test_raw_bytes_are_forwarded(pool: GpuPool, num_ranks: int, window: str, scale_row_bytes: int) -> None:
    assert_raw(pool.run(num_ranks, in_form, routings.form, _raw, window, scale_row_bytes), scale_row_bytes)


def _replayed(rank: int, group: Any, window: str, case: Case) -> list[tuple[list[Tensor], list[Tensor]]]:
    with open_arena(group, window, case.config) as arena:
        return [(on_cpu(eager), on_cpu(replayed)) for eager, replayed in eager_and_replayed(arena, case)]


@places((1, "local"), (2, "torch_symm"))
@every_payload
@every_form
def test_replays_equal_eager_steps(pool: GpuPool, num_ranks: int, window: str, word: str) -> None:
    """Captured once and replayed with other values and routings: y, dx and received bytes equal eager, to the bit."""
    for rounds in pool.run(num_ranks, _replayed, window, case_of(word, num_ranks=num_ranks)):
        for eager, replayed in rounds:
            assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
