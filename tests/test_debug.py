"""Debug mode: poison before a frame is handed out, canaries, tags; and nothing at all without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from rounds import assert_round, expected, play_round
from rounds import draw_inputs as draw_case
from routings import base_config, named_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import epbuf
from epbuf.errors import LeaseError, NativeError
from epbuf.lease import Lease

HIDDEN, TOKENS, TOPK = 16, 12, 3


def open_arena(*, debug: bool = True, num_frames: int = 2, **config: Any) -> epbuf.Arena:
    sizes = base_config(1, **{"token_dtype": "fp32", "expert_alignment": 4, **config})
    return epbuf.Arena.open(epbuf.Plan.build(sizes, epbuf.Schedule(num_frames)), debug=debug)


@pytest.fixture
def arena() -> Iterator[epbuf.Arena]:
    with open_arena() as arena:
        yield arena


def draw(arena: epbuf.Arena) -> tuple[Tensor, Tensor]:
    ids = torch.rand(TOKENS, arena.plan.config.num_experts).topk(TOPK).indices
    return torch.randn(TOKENS, HIDDEN).to(arena.token_dtype), ids


def echo(arena: epbuf.Arena, x: Tensor, ids: Tensor, spoil: Callable[[Lease, int], object] | None = None) -> Tensor:
    with arena.acquire(0) as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, x, ids)
        y = epbuf.combine(lease, recv.tokens)
        if spoil is not None:
            spoil(lease, int(recv.offs[-1]))
        return y


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_frame_is_poisoned_with_the_tag_of_its_lease(dtype: str) -> None:
    with open_arena(token_dtype=dtype) as arena:
        first, second = arena.acquire(), arena.acquire()
        for lease in (first, second):
            assert bool(lease.recv_tokens.isnan().all()) and bool(lease.recv_topk_weights.isnan().all())
            assert bool((lease.offs < 0).all()) and bool((lease.counts < 0).all())
            assert arena.debug is not None
            found = arena.debug.source_of(lease.recv_tokens)
            assert found is not None and (found.frame, found.serial) == (lease.frame, lease.serial)
            assert "test_debug.py" in found.where
        first.release()
        second.release()


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.full((3,), -torch.nan), torch.zeros(3, dtype=torch.int32)])
def test_other_values_are_nobodys_poison(arena: epbuf.Arena, tensor: Tensor) -> None:
    arena.acquire().release()
    assert arena.debug is not None
    assert arena.debug.source_of(tensor) is None


@pytest.mark.parametrize("payload", ["same", "mxfp8", "nvfp4"])
def test_rounds_over_poison_stay_right(payload: str) -> None:
    """Values equal those of an arena without debug mode, round after round."""
    config = {"dispatch_payload": payload, "hidden": 32}
    ids = torch.rand(TOKENS, 8).topk(TOPK).indices
    results = []
    for debug in (True, False):
        with open_arena(debug=debug, **config) as arena:
            generator = torch.Generator().manual_seed(3)
            ys = []
            for number in range(4):
                x = torch.randn(TOKENS, 32, generator=generator)
                with arena.acquire(0) as lease, torch.no_grad():
                    recv = epbuf.dispatch(lease, x, ids.roll(number, 0) % arena.plan.config.num_experts)
                    rows = torch.where(recv.row_mask()[:, None], recv.dequantize(), 0)
                    ys.append(epbuf.combine(lease, rows))
                del recv
            results.append(torch.stack(ys))
    assert torch.equal(results[0], results[1])


def test_forward_and_backward_equal_the_reference() -> None:
    """One round: the test's own poison would be found by the next acquire."""
    case = named_case("balanced", 1, 1, "fp32")
    (want,) = expected(case, True, True)
    with epbuf.Arena.open(epbuf.Plan.build(case.config), debug=True) as arena:
        assert_round(play_round(arena, draw_case(case, 0, True), True), want, "a round over poison")


def _several_ranks(rank: int, group: Any) -> list[Tensor]:
    """Train-like rounds on two frames, forward and backward, in debug mode."""
    config = base_config(2, token_dtype="fp32", expert_alignment=4)
    plan = epbuf.Plan.build(config, epbuf.Schedule(2))
    generator = torch.Generator().manual_seed(rank)
    found = []
    with epbuf.Arena.open(plan, group, debug=True) as arena:
        for _ in range(4):
            x = torch.randint(-3, 4, (TOKENS, HIDDEN), generator=generator).float().requires_grad_()
            ids = torch.rand(TOKENS, config.num_experts, generator=generator).topk(TOPK).indices
            with arena.acquire() as first, arena.acquire() as second:
                y = epbuf.combine(first, epbuf.dispatch(first, x, ids).tokens)
                z = epbuf.combine(second, epbuf.dispatch(second, y, ids).tokens)
            z.sum().backward()
            found += [z.detach() - x.detach() * TOPK**2, x.grad - TOPK**2]
            del y, z
        arena.check()
    return found


def test_ranks_on_two_frames_with_backward(spread: Callable[..., list[Any]]) -> None:
    for differences in spread(2, _several_ranks):
        assert [bool(difference.any()) for difference in differences] == [False] * 8


def write_past_the_end(lease: Lease, end: int) -> None:
    lease.recv_tokens[end, 3] = 1.0


def write_weights_past_the_end(lease: Lease, end: int) -> None:
    lease.recv_topk_weights[end + 1] = 0.0


def write_between_regions(lease: Lease, end: int) -> None:
    window, start = lease.window_of("offs")  # [L] int32, padded to 256 bytes
    window.bytes_at(start + lease.offs.nbytes, 4).zero_()  # type: ignore[attr-defined]


SPOILS = [
    pytest.param(write_past_the_end, r"1 row\(s\) past the last zone, row {end} among them", id="row"),
    pytest.param(write_weights_past_the_end, r"1 row\(s\) past the last zone", id="weights"),
    pytest.param(write_between_regions, r"4 byte\(s\) between its regions", id="gap"),
]


@pytest.mark.parametrize(("spoil", "says"), SPOILS)
def test_dead_canary_is_found_at_the_next_acquire(
    arena: epbuf.Arena, spoil: Callable[[Lease, int], object], says: str
) -> None:
    """The error names the frame, what was written, and the lease; the frame is free and usable afterwards."""
    x, ids = draw(arena)
    ends: list[int] = []
    echo(arena, x, ids, lambda lease, end: (ends.append(end), spoil(lease, end)))
    with pytest.raises(NativeError, match=rf"frame 0.*{says.format(end=ends[0])}.*test_debug\.py:\d+"):
        arena.acquire(0)
    assert torch.equal(echo(arena, x, ids), x * TOPK)
    assert torch.equal(echo(arena, x, ids), x * TOPK)


def test_clean_rounds_find_nothing(arena: epbuf.Arena) -> None:
    for _ in range(4):
        x, ids = draw(arena)
        assert torch.equal(echo(arena, x, ids), x * TOPK)
    with arena.acquire(0):  # and no dispatch
        pass
    arena.acquire(0).release()
    arena.check()


def test_writes_into_a_frame_without_a_dispatch_are_found(arena: epbuf.Arena) -> None:
    with arena.acquire(1) as lease:
        lease.recv_tokens[0] = 0
    with pytest.raises(NativeError, match=r"frame 1.*row 0"):
        arena.acquire(1)


def test_captured_step_finds_dead_canaries_in_replays(arena: epbuf.Arena) -> None:
    x, ids = draw(arena)
    spoils: list[Callable[[Lease, int], object]] = []

    def step(x: Tensor, ids: Tensor) -> Tensor:
        return echo(arena, x, ids, spoils[0] if spoils else None)

    captured = epbuf.CapturedStep.capture(arena, step, (x, ids))
    for number in range(3):
        assert torch.equal(captured(x + number, ids.roll(number, 0)), (x + number) * TOPK)
        echo(arena, x, ids)  # an eager step in between, with another tag
    spoils.append(write_past_the_end)
    captured(x, ids)
    with pytest.raises(NativeError, match="past the last zone"):
        captured(x, ids)
    captured.close()


def test_what_a_capture_cannot_raise_is_raised_by_check(arena: epbuf.Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where a captured acquire counts on the device."""
    x, ids = draw(arena)
    echo(arena, x, ids, write_past_the_end)
    monkeypatch.setattr(arena.engine, "capture_key", lambda: 1)
    arena.acquire(0).release()
    monkeypatch.undo()
    with pytest.raises(NativeError, match="frame 0"):
        arena.check()
    arena.check()


class Count(TorchDispatchMode):
    """Lists every op that reaches the dispatcher: each is a launch on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_of(call: Callable[[], object]) -> list[str]:
    with Count() as count:
        call()
    return count.ops


def test_without_debug_mode_acquire_launches_what_a_bare_lease_does() -> None:
    with open_arena(debug=False) as arena:
        assert arena.debug is None
        bare = ops_of(lambda: Lease(arena, arena.book, None).release())
        assert ops_of(lambda: arena.acquire().release()) == bare
        assert [op for op in bare if "fill" in op or "copy" in op] == []
    with open_arena() as arena:
        assert len(ops_of(lambda: arena.acquire().release())) > len(bare)


def test_debug_mode_changes_no_other_launch() -> None:
    """dispatch and combine issue the same ops, and the engine the same calls, with debug mode and without."""
    seen = []
    for debug in (False, True):
        calls: list[str] = []
        with open_arena(debug=debug) as arena:
            for name in ("route", "dispatch", "combine"):
                call = getattr(arena.engine, name)

                def spy(*args: Any, name: str = name, call: Any = call, to: list[str] = calls, **options: Any) -> Any:
                    to.append(name)
                    return call(*args, **options)

                setattr(arena.engine, name, spy)
            x, ids = draw(arena)
            with arena.acquire() as lease, torch.no_grad(), Count() as count:
                epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)
        seen.append((calls, count.ops))
    assert seen[0] == seen[1]
    assert seen[0][0] == ["route", "dispatch", "combine"]


def test_busy_frame_is_not_poisoned(arena: epbuf.Arena) -> None:
    x, ids = draw(arena)
    with arena.acquire(0) as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, x, ids)
        with pytest.raises(LeaseError):
            arena.acquire(0)
        assert torch.equal(epbuf.combine(lease, recv.tokens), x * TOPK)


def test_memory_of_a_growth_is_debugged_too() -> None:
    """The frame that a growing dispatch goes on in is poisoned and watched like the one it was acquired in."""
    with open_arena(recv_capacity_per_rank=4) as arena:
        x, ids = draw(arena)
        with arena.growing():
            y = echo(arena, x, ids)
        assert arena.generation == 1 and torch.equal(y, x * TOPK)
        assert arena.debug is not None and [out.frame for out in arena.debug.hand_outs] == [0]
        echo(arena, x[:4], ids[:4], lambda lease, end: lease.recv_tokens[end:].zero_())
        with pytest.raises(NativeError, match="past"):
            echo(arena, x, ids)
