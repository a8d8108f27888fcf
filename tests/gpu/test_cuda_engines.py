"""The CUDA engine against the CPU engine, bit for bit, special values included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpus import GpuPool, open_arena, places
from rounds import Inputs, draw_inputs, play_round
from routings import Case, named_case
from torch import Tensor

import epbuf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SPECIAL = ("nan", "inf", "-inf", "0", "-0", "3e38", "-6e4", "1e-39", "-3e-8", "65519")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sprinkled(inputs: Inputs, seed: int) -> Inputs:
    """Put special values into a quarter of each tensor of floats."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([float(word) for word in SPECIAL], dtype=torch.float64)

    def sprinkle(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        chosen = values[torch.randint(0, len(values), tensor.shape, generator=generator)].to(tensor.dtype)
        return torch.where(torch.rand(tensor.shape, generator=generator) < 0.25, chosen, tensor)

    return inputs.map(sprinkle)


def _same_bits(mine: Tensor, other: Tensor) -> Tensor:
    kind = BITS[mine.element_size()]
    return (mine.view(kind) == other.view(kind)) | (mine.isnan() & other.isnan())


def _on_both(rank: int, group: Any, window: str, case: Case, weighted: bool) -> list[str]:
    """Play the same round on both devices; list what differs."""
    inputs = _sprinkled(draw_inputs(case, rank, False), rank)
    plan = epbuf.Plan.build(case.config)
    with epbuf.Arena.open(plan, None if window == "local" else group, device="cpu") as host:
        want = play_round(host, inputs, weighted)
    with open_arena(group, window, case.config) as arena:
        got = play_round(arena, inputs.map(lambda tensor: tensor.cuda()), weighted)
        got = {name: value.cpu() for name, value in got.items()}
    got.pop("grad_weights", None)  # the order of their sums over H is the engine's
    end = int(want["offs"][-1])
    different = []
    for name, mine in got.items():
        rows = slice(end if name == "grad_expert_out" else None)
        same = _same_bits(mine[rows], want[name][rows])
        if not bool(same.all()):
            where = tuple((~same).nonzero()[0].tolist())
            different.append(f"{name}{list(where)}: {mine[where].item()} on CUDA, {want[name][where].item()} on CPU")
    return different


@places((1, "local"), (2, "torch_symm"), (4, "torch_symm"))
@pytest.mark.parametrize("token_dtype", ["bf16", "fp16", "fp32"])
def test_same_bits_on_cpu(pool: GpuPool, num_ranks: int, window: str, token_dtype: str) -> None:
    """Section 4: one contract on both devices: the same bits, signs of zeros included, NaN for NaN."""
    for routing in ("some_negative", "duplicates", "one_row_over"):
        case = named_case(routing, num_ranks, 16, token_dtype, hidden=264)
        for weighted in (False, True):
            assert pool.run(num_ranks, _on_both, window, case, weighted) == [[]] * num_ranks
