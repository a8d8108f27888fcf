"""The contract on CUDA: eager, captured and replayed with other routings, bit for bit what the reference says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from gpus import GpuPool, open_arena, places
from graphed import compare_eager, compare_replayed
from ranks import raised
from rounds import NAN, assert_rows_same, assert_same, draw_inputs, expected
from routings import BY_WIRE, NAMED, SHAPES, Case, base_config, named_case, shape_case
from torch import Tensor

import epbuf
from epbuf import reference
from epbuf.errors import CapacityError, ConfigError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

FEW = ("balanced", "one_expert", "different_t", "num_tokens_int64", "duplicates", "one_row_over")  # where rows are long
OTHERS = ("some_negative", "one_rank")  # what every graph is replayed with, besides its own routings


@dataclasses.dataclass(frozen=True)
class Sheet:
    """Routings to play on one group, window and shape."""

    num_ranks: int
    window: str
    alignment: int
    token_dtype: str
    hidden: int
    max_tokens: int = 12
    by_wire: bool = False

    @property
    def routings(self) -> list[str]:
        names = list(NAMED) if self.hidden < 1000 else list(FEW)
        return [name for name in names if not (name == "empty_rank" and self.num_ranks == 1)]

    def case(self, routing: str) -> Case:
        sizes = {"hidden": self.hidden, "max_tokens_per_rank": self.max_tokens}
        form = BY_WIRE if self.by_wire else {}
        return named_case(routing, self.num_ranks, self.alignment, self.token_dtype, **(sizes | form))

    def __str__(self) -> str:
        words = f"R{self.num_ranks}-{self.window}-A{self.alignment}-{self.token_dtype}-H{self.hidden}"
        return f"{words}-by_wire" if self.by_wire else words


SHEETS = [
    Sheet(1, "local", 1, "bf16", 8),
    Sheet(1, "local", 16, "fp16", 2880),
    Sheet(1, "local", 128, "fp32", 72, max_tokens=300),
    Sheet(1, "local", 16, "bf16", 7168),
    Sheet(2, "torch_symm", 1, "fp32", 8),
    Sheet(2, "torch_symm", 16, "bf16", 2880, max_tokens=5),
    Sheet(2, "torch_symm", 128, "fp16", 72, max_tokens=300),
    Sheet(2, "nccl", 1, "fp16", 7168, max_tokens=5),
    Sheet(2, "nccl", 16, "fp32", 72),
    Sheet(4, "torch_symm", 1, "bf16", 7168, max_tokens=5),
    Sheet(4, "torch_symm", 16, "fp16", 8),
    Sheet(4, "torch_symm", 128, "fp32", 72),
    Sheet(4, "nccl", 16, "bf16", 72),
    Sheet(8, "torch_symm", 1, "fp16", 72),
    Sheet(8, "torch_symm", 16, "fp32", 2880, max_tokens=5),
    Sheet(8, "torch_symm", 128, "bf16", 8),
    Sheet(8, "nccl", 128, "bf16", 72),
    Sheet(8, "nccl", 1, "fp32", 8),
    Sheet(1, "local", 16, "bf16", 72, by_wire=True),
    Sheet(2, "torch_symm", 16, "bf16", 2880, max_tokens=5, by_wire=True),
    Sheet(2, "torch_symm", 128, "fp32", 72, max_tokens=300, by_wire=True),
    Sheet(2, "nccl", 1, "fp16", 72, by_wire=True),
    Sheet(4, "torch_symm", 1, "bf16", 7168, max_tokens=5, by_wire=True),
    Sheet(8, "torch_symm", 128, "bf16", 8, by_wire=True),
]


def _by_config(cases: Iterable[Case]) -> list[list[Case]]:
    """Sort cases by configuration, so that each needs one arena."""
    sorted_: dict[str, list[Case]] = {}
    for case in cases:
        sorted_.setdefault(case.config.model_dump_json(), []).append(case)
    return list(sorted_.values())


def _sheet(rank: int, group: Any, sheet: Sheet) -> int:
    num_rounds = 0
    for cases in _by_config(sheet.case(routing) for routing in sheet.routings):
        config = cases[0].config
        others = [dataclasses.replace(sheet.case(routing), config=config) for routing in OTHERS]
        with open_arena(group, sheet.window, config) as arena:
            num_rounds += compare_eager(arena, rank, cases) + compare_replayed(arena, rank, [*cases, *others])
            arena.check()
        expected.cache_clear()
    return num_rounds


@pytest.mark.parametrize("sheet", SHEETS, ids=str)
def test_every_routing(pool: GpuPool, sheet: Sheet) -> None:
    """Rules 1 to 11, 20, 21: forward, backward and weighted, over poison, in eager calls, a capture and its replays."""
    played = pool.run(sheet.num_ranks, _sheet, sheet, limit_s=120)
    assert played == [played[0]] * sheet.num_ranks and played[0] >= 5 * len(sheet.routings)


def _shapes(rank: int, group: Any, window: str, num_ranks: int) -> int:
    num_rounds = 0
    for case in (shape_case(shape, num_ranks) for shape in SHAPES):
        with open_arena(group, window, case.config) as arena:
            num_rounds += compare_eager(arena, rank, [case]) + compare_replayed(arena, rank, [case])
            arena.check()
        expected.cache_clear()
    return num_rounds


@places((1, "local"), (2, "torch_symm"), (4, "torch_symm"))
def test_every_shape(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 11: experts per rank, top-k above L and E and up to 64, row sizes, one token, several chunks of tokens."""
    assert pool.run(num_ranks, _shapes, window, num_ranks, limit_s=120) == [7 * len(SHAPES)] * num_ranks


def _few_sms(rank: int, group: Any, window: str, num_ranks: int) -> int:
    case = named_case("duplicates", num_ranks, 16, "bf16", hidden=512, max_num_sms=1, max_tokens_per_rank=100)
    with open_arena(group, window, case.config) as arena:
        return compare_eager(arena, rank, [case]) + compare_replayed(arena, rank, [case])


@places((2, "torch_symm"))
def test_one_multiprocessor_is_enough(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 11: with max_num_sms=1 every kernel takes its rows in turns, and results are the same."""
    assert pool.run(num_ranks, _few_sms, window, num_ranks) == [7] * num_ranks


def _far_rows(rank: int, group: Any) -> tuple[float, float]:
    config = base_config(
        1, num_experts=2, num_topk=2, hidden=16384, max_tokens_per_rank=1, token_dtype="fp32",
        expert_alignment=32768, recv_capacity_per_rank=65536, inference_only=True,
    )  # fmt: skip
    x = torch.randn(1, 16384, device="cuda")
    with open_arena(None, "local", config) as arena, arena.acquire() as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, x, torch.tensor([[0, 1]], device="cuda"))
        assert recv.tokens[32768].data_ptr() - recv.tokens.data_ptr() == 2**31
        lease.expert_out[0], lease.expert_out[32768] = x[0] * 2, x[0] * 4
        y = epbuf.combine(lease, lease.expert_out)
        found = float((recv.tokens[32768] - x[0]).abs().max()), float((y - x * 6).abs().max())
    torch.cuda.empty_cache()
    return found


def test_rows_beyond_two_gigabytes(pool: GpuPool) -> None:
    """Rule 11: a row that begins 2^31 bytes into its region is written and read at the right place."""
    assert pool.run(1, _far_rows) == [(0, 0)]


PAIR = ("some_negative", 2, 16)


def _widened(rows: Tensor) -> Tensor:
    wide = torch.full((len(rows), rows.shape[1] + 8), NAN, dtype=rows.dtype, device=rows.device)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def _strided(rank: int, group: Any, window: str) -> None:
    case = named_case(*PAIR)
    inputs = draw_inputs(case, rank, True, "cuda")
    wide = {name: _widened(getattr(inputs, name)) for name in ("x", "expert_out", "dy", "grad_recv_tokens")}
    with open_arena(group, window, case.config) as arena, arena.acquire() as lease:
        x, expert_out = wide["x"].requires_grad_(), wide["expert_out"].requires_grad_()
        recv = epbuf.dispatch(lease, x, inputs.topk_idx)
        y = epbuf.combine(lease, expert_out)
        grad = torch.autograd.grad(y, expert_out, wide["dy"])[0].clone()
        dx = torch.autograd.grad(recv.tokens, x, wide["grad_recv_tokens"])[0]
        want = expected(case, False, True)[rank]
        assert_same(y.detach().cpu(), want["y"], "y")
        assert_same(dx.cpu(), want["dx"], "dx")
        assert_rows_same(recv.tokens.detach().cpu(), want["recv_tokens"], int(recv.offs[-1]), "recv_tokens")
        assert_rows_same(grad.cpu(), want["grad_expert_out"], int(recv.offs[-1]), "grad_expert_out")


def _plain_sum(rank: int, group: Any, window: str) -> None:
    """y.sum().backward() hands over a gradient with strides (0, 0)."""
    case = named_case("balanced", 2)
    inputs = draw_inputs(case, rank, True, "cuda")
    x, weights = inputs.x.requires_grad_(), torch.ones(12, 3, device="cuda", requires_grad=True)
    with open_arena(group, window, case.config) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, inputs.topk_idx, weights)
        epbuf.combine(lease, recv.tokens, topk_weights=recv.topk_weights).sum().backward()
    assert x.grad is not None and weights.grad is not None
    assert_same(x.grad, torch.full_like(x, 3), "dx")
    assert_same(weights.grad, x.detach().float().sum(1, keepdim=True).expand(12, 3), "dw")


def _missing_gradients(rank: int, group: Any, window: str) -> None:
    """Rank 0 has no gradient for weights and rank 1 none for tokens; both take part all the same."""
    case = named_case("balanced", 2)
    all_inputs = [draw_inputs(case, other, True) for other in range(2)]
    rows = [all_inputs[0].grad_recv_tokens, torch.zeros_like(all_inputs[1].grad_recv_tokens)]
    weights = [torch.zeros_like(all_inputs[0].grad_recv_topk_weights), all_inputs[1].grad_recv_topk_weights]
    routing = reference.route(case.config, len(rows[0]), case.topk_idx)
    want_x, want_w = reference.dispatch_backward(case.config, routing, rows, weights)
    inputs = draw_inputs(case, rank, True, "cuda")
    x, w = inputs.x.requires_grad_(), inputs.topk_weights.requires_grad_()
    with open_arena(group, window, case.config) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, inputs.topk_idx, w)
        out, grad = (recv.tokens, rows[0]) if rank == 0 else (recv.topk_weights, weights[1])
        dx, dw = torch.autograd.grad(out, [x, w], grad.cuda(), allow_unused=True)
        assert_same(torch.zeros_like(x).cpu() if dx is None else dx.cpu(), want_x[rank], "dx")
        assert_same(torch.zeros_like(w).cpu() if dw is None else dw.cpu(), want_w[rank], "dw")


def _frozen_on_one_rank(rank: int, group: Any, window: str) -> None:
    """A rank whose input needs no gradient takes part in the backward of the other, several times."""
    case = named_case("balanced", 2)
    inputs = draw_inputs(case, rank, True, "cuda")
    x, scale = inputs.x.requires_grad_(rank == 1), torch.tensor(2.0, dtype=inputs.x.dtype, device="cuda")
    with open_arena(group, window, case.config) as arena:
        for _ in range(3):
            x.grad = None
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, inputs.topk_idx)
                epbuf.combine(lease, recv.tokens * scale.requires_grad_()).backward(inputs.dy)
                del recv
            assert (x.grad is None) == (rank == 0)
            if x.grad is not None:
                assert_same(x.grad, inputs.dy * 6, "dx")
        arena.check()


def _own_rows(rank: int, group: Any, window: str) -> None:
    """What experts write into the window is not staged, and cannot be weighted there; anything else is, by its rows."""
    case = named_case("balanced", 2)
    inputs = draw_inputs(case, rank, True, "cuda")
    staged, want = 0, expected(case, False, True)[rank]
    with open_arena(group, window, case.config) as arena, torch.no_grad():
        for own in (True, False):
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
                lease.expert_out.copy_(recv.tokens)
                y = epbuf.combine(lease, lease.expert_out if own else recv.tokens)
                assert_same(y, inputs.x * 3, f"y, own rows {own}")
                del recv
            staged += 0 if own else int(want["offs"][-1]) * 16 * 2
            assert arena.report()["staged_bytes"] == staged
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
            raised(ConfigError, lambda: epbuf.combine(lease, lease.expert_out, topk_weights=recv.topk_weights))
        arena.check()  # every rank refused, and each has raised its own


def _trimmed(rank: int, group: Any, window: str) -> None:
    case = named_case(*PAIR)
    inputs = draw_inputs(case, rank, True, "cuda")
    kept = (inputs.topk_idx >= 0).sum(1, keepdim=True)
    with open_arena(group, window, case.config) as arena, arena.acquire() as lease, torch.no_grad():
        lease.recv_tokens.fill_(NAN)
        recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
        trimmed = recv.trim()
        masked = torch.where(recv.row_mask()[:, None], recv.tokens, 0).float().sum(0)
        assert_same(trimmed.tokens.float().sum(0), masked, "sum of trimmed rows")
        assert trimmed.tokens.data_ptr() == recv.tokens.data_ptr() and len(trimmed.tokens) < len(recv.tokens)
        assert_same(epbuf.combine(lease, trimmed.tokens * 2), (inputs.x * 2 * kept).to(inputs.x.dtype), "y")


def _inference(rank: int, group: Any, window: str) -> None:
    """Two frames and one workspace without memory for backward; received rows in the frame, then in the workspace."""
    case = named_case("one_row_over", 2, 16)
    inputs, want = draw_inputs(case, rank, False, "cuda"), expected(case, False, False)[rank]
    for save_recv in (True, False):
        fields = case.config.model_dump(exclude_defaults=True) | {"inference_only": True, "save_recv": save_recv}
        with open_arena(group, window, epbuf.EpConfig(**fields), num_frames=2) as arena, torch.no_grad():
            for number in range(3):
                with arena.acquire(number % 2) as lease:
                    recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx, inputs.topk_weights)
                    end = int(recv.offs[-1])
                    assert_rows_same(recv.tokens.cpu(), want["recv_tokens"], end, f"recv_tokens {number}")
                    recv.tokens.fill_(NAN)
                    assert_same(epbuf.combine(lease, inputs.expert_out).cpu(), want["y"], f"y {number}")
                    del recv


@places((2, "torch_symm"), (2, "nccl"))
@pytest.mark.parametrize(
    "play",
    [_strided, _plain_sum, _missing_gradients, _frozen_on_one_rank, _own_rows, _trimmed, _inference],
    ids=lambda play: play.__name__.strip("_"),
)
def test_inputs_of_other_kinds(pool: GpuPool, num_ranks: int, window: str, play: Any) -> None:
    """Rules 3, 6, 7, 11: strides, expanded and missing gradients, frozen inputs, own rows, trim(), inference."""
    pool.run(num_ranks, play, window)


def _policies(rank: int, group: Any, window: str, num_ranks: int) -> dict[str, str]:
    """Overflow and a bad id of an eager dispatch raise at that very call, on every rank, and the arena goes on."""
    tight = named_case("one_row_over", num_ranks)
    config = base_config(
        num_ranks, overflow_policy="error", validate_ids=True,
        recv_capacity_per_rank=tight.config.recv_capacity_per_rank,
    )  # fmt: skip
    x = draw_inputs(tight, rank, True, "cuda").x
    over, good = tight.topk_idx[rank].cuda(), torch.full((12, 3), -1, device="cuda")
    good[:, 0] = torch.arange(12) % config.num_experts
    bad = good.clone()
    if rank == num_ranks - 1:
        bad[3, 1] = 2**40 + 5
    found: dict[str, str] = {}
    calls = (("over", over, CapacityError), ("bad", bad, ConfigError), ("over", over, CapacityError))
    with open_arena(group, window, config) as arena:
        for _ in range(3):
            for name, ids, kind in calls:
                with arena.acquire() as lease:
                    found[name] = raised(kind, lambda: epbuf.dispatch(lease, x, ids))  # noqa: B023
            with arena.acquire() as lease, torch.no_grad():
                assert_same(epbuf.combine(lease, epbuf.dispatch(lease, x, good).tokens), x, "y of a good round")
        arena.check()
        return found | {"num_bad_ids": str(arena.report()["num_bad_ids"])}


@places((1, "local"), (4, "torch_symm"), (2, "nccl"))
def test_policies_raise_at_the_call(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rules 4 and 10: overflow_policy="error" and validate_ids read the host once per eager dispatch and raise."""
    capacity = named_case("one_row_over", num_ranks).config.recv_capacity_per_rank
    for found in pool.run(num_ranks, _policies, window, num_ranks):
        assert str(capacity) in found["over"] and str(capacity + 1) in found["over"]
        assert f"rank {num_ranks - 1}" in found["bad"] and "token 3" in found["bad"] and str(2**40 + 5) in found["bad"]
        assert found["num_bad_ids"] == "3"
