"""Test four steps with `epbuf.testing`: one is safe to capture, three are not, and the message says why.

    python graphs/capture_tests.py

In a test of one's own the assertion stands alone: `assert_capture_safe(step, *inputs, vary=vary, arenas=arena)`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import epbuf
from epbuf.testing import assert_capture_safe, assert_tail_unread

NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS = 4, 2, 32, 16

Step = Callable[[Tensor, Tensor], Tensor]


def safe(arena: epbuf.Arena) -> Step:
    """Send rows to their experts, which double them, and bring them back."""

    def step(x: Tensor, topk_idx: Tensor) -> Tensor:
        with torch.no_grad(), arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, topk_idx)
            return epbuf.combine(lease, recv.tokens * 2)

    return step


def reads_a_value(arena: epbuf.Arena) -> Step:
    """Decide on the host, by a value that only the device knows."""
    inner = safe(arena)

    def step(x: Tensor, topk_idx: Tensor) -> Tensor:
        scale = 0.5 if x.abs().max() > 3 else 1.0
        return inner(x * scale, topk_idx)

    return step


def makes_a_new_tensor(arena: epbuf.Arena) -> Step:
    """Keep each result in a tensor of its own, beside what is returned."""
    inner = safe(arena)
    history: list[Tensor] = []

    def step(x: Tensor, topk_idx: Tensor) -> Tensor:
        y = inner(x, topk_idx)
        history.append(y.mean(0))
        return y

    return step


def centred_experts(rows: Tensor, offs: Tensor) -> Tensor:
    """Subtract the mean of all C rows, those that belong to nobody included."""
    return rows - rows.mean(0)


def vary(x: Tensor, topk_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Draw other tokens and route them elsewhere."""
    return torch.randn_like(x), (topk_idx + 1) % NUM_EXPERTS


def report(name: str, check: Callable[[], object]) -> bool:
    """Run an assertion and print what it says; return whether it passed."""
    try:
        check()
    except AssertionError as error:
        print(f"{name}:\n{error}\n")
        return False
    print(f"{name}: safe\n")
    return True


def main() -> int:
    """Return 0 if exactly the first step passed."""
    config = epbuf.EpConfig(
        num_ranks=1,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        max_tokens_per_rank=NUM_TOKENS,
        token_dtype="fp32",
    )
    inputs = torch.randn(NUM_TOKENS, HIDDEN), torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(NUM_TOPK).indices
    with epbuf.Arena.open(epbuf.Plan.build(config)) as arena:
        passed = []
        for make in (safe, reads_a_value, makes_a_new_tensor):
            check = functools.partial(assert_capture_safe, make(arena), *inputs, vary=vary, arenas=arena)
            passed.append(report(make.__name__, check))
    rows, offs = torch.randn(12, HIDDEN), torch.tensor([3, 5, 5, 9], dtype=torch.int32)
    passed.append(report("centred_experts", lambda: assert_tail_unread(centred_experts, rows, offs)))
    return 0 if passed == [True, False, False, False] else 1


if __name__ == "__main__":
    sys.exit(main())
