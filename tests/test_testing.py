"""`epbuf.testing`: every assertion passes what is safe, and names the rule that something else breaks."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from routings import base_config
from torch import Tensor, nn

import epbuf
from epbuf import testing
from epbuf.errors import ConfigError
from epbuf.testing import UnsafeStepError, assert_capture_safe, assert_tail_unread, canary_rows, poison
from epbuf.testing.watch import foreign_pools

HIDDEN, TOKENS, TOPK = 16, 12, 3
Step = Callable[..., Any]


def open_arena(num_frames: int = 1, group: Any = None, num_ranks: int = 1) -> epbuf.Arena:
    config = base_config(num_ranks, token_dtype="fp32", expert_alignment=4)
    return epbuf.Arena.open(epbuf.Plan.build(config, epbuf.Schedule(num_frames)), group)


@pytest.fixture
def arena() -> Iterator[epbuf.Arena]:
    with open_arena(2) as arena:
        yield arena


def inputs_of(arena: epbuf.Arena) -> tuple[Tensor, Tensor]:
    ids = torch.rand(TOKENS, arena.plan.config.num_experts).topk(TOPK).indices
    return torch.randn(TOKENS, HIDDEN), ids


def vary(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return torch.randn_like(x), ids.roll(1, 0)


def echo(arena: epbuf.Arena, x: Tensor, ids: Tensor, frame: int | None = None) -> Tensor:
    with arena.acquire(frame) as lease, torch.no_grad():
        return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)


class Layer(nn.Module):
    """One MoE layer with a weight of its own."""

    def __init__(self, arena: epbuf.Arena) -> None:
        super().__init__()
        self.arena = [arena]
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with self.arena[0].acquire() as lease:
            recv = epbuf.dispatch(lease, x, ids)
            rows = torch.where(recv.row_mask()[:, None], recv.tokens, 0) @ self.weight
            return epbuf.combine(lease, rows)


def train_step(layer: Layer, optimizer: torch.optim.Optimizer, set_to_none: bool) -> Step:
    def step(x: Tensor, ids: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = layer(x, ids).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_safe_inference_step_passes(arena: epbuf.Arena) -> None:
    assert_capture_safe(lambda x, ids: echo(arena, x, ids), *inputs_of(arena), vary=vary, arenas=arena)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_safe_training_step_passes_and_is_put_back(arena: epbuf.Arena, set_to_none: bool) -> None:
    layer = Layer(arena)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    step = train_step(layer, optimizer, set_to_none)
    assert_capture_safe(step, *inputs_of(arena), vary=vary, arenas=[arena], restore=(layer, optimizer))
    assert torch.equal(layer.weight, before)


def test_safe_step_without_an_arena_passes() -> None:
    weight = torch.randn(4, 4)
    assert_capture_safe(lambda x: (x @ weight).tanh(), torch.randn(3, 4), vary=torch.randn_like)


def test_safe_step_with_dropout_passes() -> None:
    assert_capture_safe(lambda x: torch.dropout(x, 0.5, True), torch.randn(30, 4), vary=torch.randn_like)


def _one_rank(rank: int, group: Any, is_safe: bool) -> str:
    with open_arena(2, group, 2) as arena:
        x, ids = inputs_of(arena)
        try:
            if is_safe:
                assert_capture_safe(lambda x, ids: echo(arena, x, ids), x, ids, vary=vary, arenas=arena)
            else:
                frames = iter(range(1000))
                step = lambda x, ids: echo(arena, x, ids, next(frames) % 2)  # noqa: E731
                assert_capture_safe(step, x, ids, vary=vary, arenas=arena)
        except UnsafeStepError as error:
            return error.rule
        return ""


@pytest.mark.parametrize("is_safe", [True, False])
@pytest.mark.parametrize("kind", ["virtual_ranks", "rank_processes"])
def test_ranks_find_the_same(kind: str, is_safe: bool, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    assert run(2, _one_rank, is_safe) == ([""] * 2 if is_safe else ["addresses"] * 2)


def reads_an_element(arena: epbuf.Arena) -> Step:
    return lambda x, ids: echo(arena, x, ids) * float(x[0, 0])


def branches_on_a_value(arena: epbuf.Arena) -> Step:
    return lambda x, ids: echo(arena, x if (x > 0).any() else -x, ids)


def lists_its_ids(arena: epbuf.Arena) -> Step:
    return lambda x, ids: echo(arena, x, torch.tensor(ids.tolist()))


def copies_to_the_host(arena: epbuf.Arena) -> Step:
    return lambda x, ids: echo(arena, x, ids.cpu())


def indexes_with_a_mask(arena: epbuf.Arena) -> Step:
    return lambda x, ids: (echo(arena, x, ids), x[x > 0].sum())


def trains_with_host_counters(arena: epbuf.Arena) -> Step:
    layer = Layer(arena)
    return train_step(layer, torch.optim.Adam(layer.parameters()), set_to_none=False)


def keeps_every_result(arena: epbuf.Arena) -> Step:
    kept: list[Tensor] = []

    def step(x: Tensor, ids: Tensor) -> Tensor:
        kept.append(echo(arena, x, ids) + 1)
        return x * 2

    return step


def makes_gradients_of_others(arena: epbuf.Arena) -> Step:
    layer = Layer(arena)

    def step(x: Tensor, ids: Tensor) -> Tensor:
        layer.zero_grad(set_to_none=True)
        loss = layer(x, ids).sum()
        loss.backward()
        return loss.detach()

    return step


def opens_an_arena(arena: epbuf.Arena) -> Step:
    def step(x: Tensor, ids: Tensor) -> Tensor:
        with open_arena() as other:
            return echo(other, x, ids)

    return step


def reports(arena: epbuf.Arena) -> Step:
    return lambda x, ids: echo(arena, x + len(arena.report()), ids)


def keeps_its_lease(arena: epbuf.Arena) -> Step:
    leases: list[epbuf.Lease] = []

    def step(x: Tensor, ids: Tensor) -> Tensor:
        leases.clear()
        leases.append(arena.acquire())
        with torch.no_grad():
            return epbuf.combine(leases[0], epbuf.dispatch(leases[0], x, ids).tokens)

    return step


def counts_on_the_host(arena: epbuf.Arena) -> Step:
    numbers = iter(range(1000))
    return lambda x, ids: echo(arena, x * next(numbers), ids)


def does_more_each_time(arena: epbuf.Arena) -> Step:
    numbers = iter(range(1000))

    def step(x: Tensor, ids: Tensor) -> Tensor:
        for _ in range(next(numbers)):
            x = x + 1
        return echo(arena, x, ids)

    return step


def changes_a_tensor_unseen(arena: epbuf.Arena) -> Step:
    total = torch.zeros(())

    def step(x: Tensor, ids: Tensor) -> Tensor:
        total.add_(1)
        return echo(arena, x + total, ids)

    return step


def takes_turns_with_frames(arena: epbuf.Arena) -> Step:
    numbers = iter(range(1000))
    return lambda x, ids: echo(arena, x, ids, next(numbers) % 2)


def registers_memory(arena: epbuf.Arena) -> Step:
    def step(x: Tensor, ids: Tensor) -> Tensor:
        arena.window_allocations += 1
        return echo(arena, x, ids)

    return step


UNSAFE: list[tuple[str, Callable[[epbuf.Arena], Step], str]] = [
    ("host read", reads_an_element, r"_local_scalar_dense.* reads a device value.* at .*test_testing\.py:\d+"),
    ("host read", branches_on_a_value, r"_local_scalar_dense|is_nonzero"),
    ("host read", lists_its_ids, r"tolist reads.* at .*test_testing\.py:\d+"),
    ("host read", copies_to_the_host, r"cpu reads.* at .*test_testing\.py:\d+"),
    ("host read", indexes_with_a_mask, r"index\.Tensor reads.* at .*test_testing\.py:\d+"),
    ("host read", trains_with_host_counters, r"_local_scalar_dense"),
    ("left behind", keeps_every_result, r"1 new tensor.*\[12, 16\] torch\.float32 made by aten\.add.*test_testing\.py"),
    ("left behind", makes_gradients_of_others, r"\[16, 16\].*restore="),
    ("refused", opens_an_arena, r"Arena\.open at .*test_testing\.py:\d+"),
    ("refused", reports, r"report\(\)"),
    ("refused", keeps_its_lease, r"lease on frame 0 from .*test_testing\.py:\d+"),
    ("host state", counts_on_the_host, r"elements differ"),
    ("host state", does_more_each_time, r"op \d+ was"),
    ("host state", changes_a_tensor_unseen, r"elements differ"),
    ("addresses", takes_turns_with_frames, r"had byte \d+ of window 0"),
    ("allocations", registers_memory, r"\[1\] before, \[\d\] now"),
]


@pytest.mark.parametrize(("rule", "make", "says"), UNSAFE, ids=[make.__name__ for _, make, _ in UNSAFE])
def test_unsafe_step_breaks_the_rule_that_is_named(
    arena: epbuf.Arena, rule: str, make: Callable[[epbuf.Arena], Step], says: str
) -> None:
    with pytest.raises(UnsafeStepError, match=f"(?s){says}") as caught:
        assert_capture_safe(make(arena), *inputs_of(arena), vary=vary, arenas=arena)
    assert caught.value.rule == rule
    assert f'rule "{rule}"' in str(caught.value)
    assert "What to do" in str(caught.value)


def test_replay_that_differs_from_eager_is_found(arena: epbuf.Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CPU replays cannot get wrong by themselves: a static input that is not refreshed."""
    monkeypatch.setattr(epbuf.CapturedStep, "_take", lambda *_: None)
    with pytest.raises(UnsafeStepError, match="replay 0 differs from an eager run") as caught:
        assert_capture_safe(lambda x, ids: echo(arena, x, ids), *inputs_of(arena), vary=vary, arenas=arena)
    assert caught.value.rule == "values"


def test_state_that_a_replay_does_not_update_is_found(arena: epbuf.Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    total = torch.zeros(())

    def step(x: Tensor, ids: Tensor) -> Tensor:
        if arena.book.recording is None or arena.book.recording.phase != "replay":
            total.add_(1)
        return echo(arena, x, ids)

    with pytest.raises(UnsafeStepError) as caught:
        assert_capture_safe(step, *inputs_of(arena), vary=vary, arenas=arena, restore=(total,))
    assert caught.value.rule in ("values", "host state")


def test_outputs_that_move_are_found(arena: epbuf.Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = epbuf.CapturedStep.__call__
    monkeypatch.setattr(epbuf.CapturedStep, "__call__", lambda step, *inputs: replay(step, *inputs).clone())
    with pytest.raises(UnsafeStepError, match="outputs lay at 0x") as caught:
        assert_capture_safe(lambda x, ids: echo(arena, x, ids), *inputs_of(arena), vary=vary, arenas=arena)
    assert caught.value.rule == "addresses"


def test_rtol_allows_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1000))

    def step(x: Tensor) -> Tensor:
        return x * (1 + 1e-4 * (next(numbers) % 2))

    x = torch.rand(4) + 1
    assert_capture_safe(step, x, vary=lambda x: x + 1, rtol=1e-3)
    with pytest.raises(UnsafeStepError, match="host state"):
        assert_capture_safe(step, x, vary=lambda x: x + 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        pytest.param(lambda x: x.clone(), "changed nothing", id="nothing"),
        pytest.param(lambda x: (x + 1, x), "returned 2 inputs and fn takes 1", id="too-many"),
    ],
)
def test_vary_that_tests_nothing_is_refused(vary: Callable[..., Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        assert_capture_safe(lambda x: x + 1, torch.randn(3), vary=vary)


def segment(address: int, pool: tuple[int, int]) -> dict[str, Any]:
    return {"address": address, "segment_pool_id": pool}


@pytest.mark.parametrize(
    ("after", "foreign"),
    [
        pytest.param([segment(3, (0, 7))], [], id="the-graphs-own"),
        pytest.param([segment(3, (0, 0))], [], id="another-threads"),
        pytest.param([segment(3, (0, 7)), segment(4, (2, 0))], [(2, 0)], id="a-users"),
        pytest.param([segment(3, (0, 7)), segment(4, (3, 0))], [(3, 0)], id="a-users-first"),
    ],
)
def test_pool_that_grew_inside_a_capture_is_found(after: list[dict[str, Any]], foreign: list[tuple[int, int]]) -> None:
    before = [segment(1, (0, 0)), segment(2, (2, 0))]
    assert foreign_pools(before, before + after) == foreign


def test_results_that_cannot_be_looked_into_are_refused() -> None:
    with pytest.raises(ConfigError, match="fn returned a set, in which no tensor can be found"):
        assert_capture_safe(lambda x: {x * 2}, torch.randn(3), vary=torch.randn_like)


OFFS = torch.tensor([3, 5, 5], dtype=torch.int32)


def grouped(rows: Tensor, offs: Tensor, weight: Tensor) -> Tensor:
    return torch._grouped_mm(rows, weight, offs=offs)


def test_tail_unread_by_grouped_mm() -> None:
    weight = torch.randn(3, 16, 16, requires_grad=True)
    assert_tail_unread(grouped, torch.randn(8, 16), OFFS, weight, parameters=[weight])


READERS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "sums": (lambda rows, offs, weight: rows.sum(0), "result 0"),
    "mixes": (lambda rows, offs, weight: rows - rows.mean(0), "result 0"),
    "takes-the-largest": (lambda rows, offs, weight: rows.amax(), "result 0"),
    "dense-weight-gradient": (lambda rows, offs, weight: rows @ weight[0], "the gradient of parameter 0"),
}


@pytest.mark.parametrize("reader", READERS)
def test_tail_that_is_read_is_found(reader: str) -> None:
    fn, what = READERS[reader]
    weight = torch.randn(3, 16, 16, requires_grad=True)
    with pytest.raises(AssertionError, match=rf"{what} depends on rows past offs\[-1\]=5.*instead of zeros"):
        assert_tail_unread(fn, torch.randn(8, 16), OFFS, weight, parameters=[weight])


def test_tail_that_is_read_into_one_buffer_is_found() -> None:
    """A result that lies where the last run's lay is not compared with itself."""
    buffer = torch.zeros(8, 16)

    def write(rows: Tensor, offs: Tensor) -> Tensor:
        return buffer.copy_(rows - rows.mean(0))

    with pytest.raises(AssertionError, match="result 0 depends"), torch.no_grad():
        assert_tail_unread(lambda rows, offs: write(rows.detach(), offs), torch.randn(8, 16), OFFS)


def test_tail_masked_against_nan_only_is_found() -> None:
    with pytest.raises(AssertionError, match="huge numbers"):
        assert_tail_unread(lambda rows, offs: rows.nan_to_num().sum(), torch.randn(8, 16), OFFS)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_tail_of_encoded_rows(dtype: torch.dtype) -> None:
    rows = torch.randint(0, 100, (8, 16), dtype=torch.uint8).view(dtype)
    assert_tail_unread(lambda rows, offs: rows.view(torch.uint8)[:5].sum(), rows, OFFS)
    with pytest.raises(AssertionError, match="result 0"):
        assert_tail_unread(lambda rows, offs: rows.view(torch.uint8).sum(), rows, OFFS)


def test_tail_must_exist() -> None:
    with pytest.raises(ValueError, match="no tail"):
        assert_tail_unread(lambda rows, offs: rows, torch.randn(5, 16), OFFS)


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_is_nan(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 2, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(4, 2, dtype=dtype)
    poison(tensor)
    assert bool(tensor.float().isnan().all())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_poison_of_integers_is_no_small_number(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    poison(tensor)
    assert tensor.view(torch.uint8).tolist() == [0xA5] * (3 * dtype.itemsize)


@pytest.mark.parametrize("shape", [(6, 4), (6,), (6, 2, 2)], ids=str)
def test_canary_rows(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    before = tensor[:4].clone()
    canaries = canary_rows(tensor, 4)
    tensor[3] = before[3] = 1.0
    canaries.check()
    assert torch.equal(tensor[:4], before)
    tensor[5] = 0
    with pytest.raises(AssertionError, match=r"1 of 2 canary rows set at .*test_testing\.py:\d+ were written.*row 5"):
        canaries.check()


def test_canaries_behind_the_last_zone_outlive_a_dispatch(arena: epbuf.Arena) -> None:
    x, ids = inputs_of(arena)
    with arena.acquire() as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, x, ids)
        end = int(recv.offs[-1])
    del recv
    with arena.acquire() as lease, torch.no_grad(), canary_rows(lease.recv_tokens, end):
        epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)
    with arena.acquire() as lease, torch.no_grad():
        canaries = canary_rows(lease.recv_tokens, end - 1)
        epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)
    with pytest.raises(AssertionError, match=f"row {end - 1}"):
        canaries.check()


def test_canary_rows_refuse_what_is_no_table_of_rows() -> None:
    with pytest.raises(ValueError, match="first_row=7"):
        canary_rows(torch.zeros(4, 4), 7)


def _late(rank: int, group: Any) -> float:
    late = testing.skew(rank=1, ms=80)
    with open_arena(1, group, 2) as arena:
        start = time.monotonic()
        late(arena)
        return time.monotonic() - start


def test_skew_makes_one_rank_late(virtual_ranks: Callable[..., list[float]]) -> None:
    first, second = virtual_ranks(2, _late)
    assert first < 0.08 <= second


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(AttributeError, match="assert_capture_safe"):
        testing.assert_safe  # noqa: B018


def test_every_public_name_loads() -> None:
    assert all(getattr(testing, name) is not None for name in testing.__all__)


def test_plugin_is_found_and_starts_without_torch(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import sys\n"
        "def test_no_torch(): assert 'torch' not in sys.modules\n"
        "def one_rank(rank, group, base): return base + rank\n"
        "def test_ranks(virtual_ranks): assert virtual_ranks(2, one_rank, 5) == [5, 6]\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_mine.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert re.search(r"^2 passed", found.stdout, re.M), found.stdout + found.stderr
