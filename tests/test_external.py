"""engine="external" and adopted memory: leases, holds, guard, growth and report for kernels that are not ours."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from movers import Mover, draw, layer_results, moe
from ranks import raised, size_of
from rounds import assert_same
from test_holds import Life
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epbuf
from epbuf.errors import CapacityError, CaptureError, ConfigError, LeaseError, PlanMismatchError, StaleGraphError

Spread = Callable[..., list[Any]]


def config_of(num_ranks: int, **changes: Any) -> epbuf.EpConfig:
    sizes: dict[str, Any] = {"num_experts": 2 * num_ranks, "num_topk": 2, "hidden": 4, "max_tokens_per_rank": 5}
    return epbuf.EpConfig(num_ranks=num_ranks, token_dtype="fp32", **{"timeout_s": 20.0, **sizes, **changes})


def plan_of(num_ranks: int, num_frames: int = 1, num_workspaces: int = 1, **changes: Any) -> epbuf.Plan:
    return epbuf.Plan.build(config_of(num_ranks, **changes), epbuf.Schedule(num_frames, num_workspaces))


def memory_of(plan: epbuf.Plan, past: int = 0) -> Tensor:
    """Allocate what an arena may adopt, `past` bytes past a multiple of 256, with junk in it."""
    room = torch.full((plan.total_bytes + 512,), 0xA5, dtype=torch.uint8)
    start = -room.data_ptr() % 256 + past
    return room[start : start + plan.total_bytes]


def open_arena(plan: epbuf.Plan, group: Any, how: str = "open") -> epbuf.Arena:
    if how == "adopt":
        return epbuf.Arena.adopt(plan, memory_of(plan), group)
    return epbuf.Arena.open(plan, group, engine="external")


@pytest.fixture(params=["open", "adopt"])
def arena(request: pytest.FixtureRequest) -> Iterator[epbuf.Arena]:
    with open_arena(plan_of(1), None, request.param) as arena:
        yield arena


def one_layer(arena: epbuf.Arena, mover: Mover, seed: int) -> None:
    """Run a layer forward and backward and compare it."""
    x, ids, weights, dy = draw(mover.config, seed)
    want = layer_results(x, ids, weights, dy)
    x.requires_grad_(), weights.requires_grad_()
    y = moe(arena, mover, x, ids, weights)
    got = (y.detach(), *torch.autograd.grad(y, [x, weights], dy))
    for name, mine, wanted in zip(("y", "dx", "dw"), got, want, strict=True):
        assert_same(mine, wanted, f"{name} of seed {seed}")


# What a user's own kernels move


def _rounds(rank: int, group: Any, how: str) -> dict[str, Any]:
    plan = plan_of(size_of(group))
    with open_arena(plan, group, how) as arena:
        mover = Mover(plan.config, group)
        for number in range(3):
            one_layer(arena, mover, 10 * number + rank)
        arena.check()
        return arena.report()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("how", ["open", "adopt"])
def test_rows_move_in_our_regions(spread: Spread, num_ranks: int, how: str) -> None:
    """Views are ordinary tensors: kernels of any origin fill and read them, in forward and backward."""
    for report in spread(num_ranks, _rounds, how):
        assert report["engine"] == "external"
        assert (report["num_frames_high_water"], report["claims"]) == (1, [])
        assert report["window"] == ("adopted" if how == "adopt" else report["window"])
        assert 0 < report["demand_peak_rows"] <= report["capacity_rows"]


def _captured(rank: int, group: Any, how: str) -> int:
    plan = plan_of(size_of(group))
    with open_arena(plan, group, how) as arena:
        mover = Mover(plan.config, group)

        def step(x: Tensor, ids: Tensor, weights: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
            y = moe(arena, mover, x, ids, weights)
            return y.detach(), *torch.autograd.grad(y, [x, weights], dy)

        captured = epbuf.CapturedStep.capture(arena, step, draw(plan.config, rank))
        message = raised(LeaseError, arena.close)
        assert "hold this memory" in message and "test_external.py" in message
        for number in range(20):
            inputs = draw(plan.config, 100 * number + rank)
            got = captured(*inputs)
            for name, mine, wanted in zip(("y", "dx", "dw"), got, layer_results(*inputs), strict=True):
                assert_same(mine, wanted, f"{name} of replay {number}")
        captured.check()
        graphs = arena.report()["graphs"]
        captured.close()
        return len(graphs)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("how", ["open", "adopt"])
def test_captured_step_is_replayed_with_other_routings(spread: Spread, num_ranks: int, how: str) -> None:
    """A captured step of the user's kernels holds the memory; close() is refused while it lives."""
    assert spread(num_ranks, _captured, how) == [1] * num_ranks


# Order of uses


def test_forward_workspace_lasts_from_begin_to_end(arena: epbuf.Arena) -> None:
    with arena.acquire() as lease:
        assert lease.recv_tokens.shape == (arena.capacity_rows, 4)
        assert "none now" in raised(LeaseError, lambda: lease.expert_out)
        lease.begin("forward")
        lease.expert_out.fill_(1)
        lease.end("forward")
        assert "none now" in raised(LeaseError, lambda: lease.expert_out)
        lease.begin("backward")
        lease.grad_recv_tokens.fill_(1)
        lease.end("backward")
        assert "none now" in raised(LeaseError, lambda: lease.grad_recv_tokens)


def test_ticket_keeps_the_frame_for_the_backward(arena: epbuf.Arena) -> None:
    """A frame whose backward is still to come cannot be taken, though its lease was released."""
    with arena.acquire() as lease:
        lease.begin()
        lease.end()
        ticket = lease.ticket
    assert "frame 0" in raised(LeaseError, arena.acquire)
    lease.begin("backward")
    lease.end("backward")
    assert "frame 0" in raised(LeaseError, arena.acquire)
    del ticket
    arena.acquire().release()


def test_backward_after_the_ticket_is_gone_is_refused(arena: epbuf.Arena) -> None:
    """What was in the frame may be somebody else's by then."""
    with arena.acquire() as lease:
        lease.begin()
        lease.end()
    assert "acquire another, or keep lease.ticket" in raised(LeaseError, lambda: lease.begin("backward"))
    with arena.acquire() as other:
        other.begin()
        assert "nothing left" in raised(LeaseError, lambda: lease.begin("backward"))
        assert "no such use has begun" in raised(LeaseError, lambda: lease.end("forward"))
        other.end()


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("begin forward, begin forward", "called before and not ended"),
        ("begin forward, end forward, begin forward", "one forward per lease"),
        ("end forward", "no such use has begun"),
        ("end frame", "no such use has begun"),
        ("begin backward", "has not begun, or its ticket is gone"),
        ("begin forward, end forward, end backward", "no such use has begun"),
        ("release, begin forward", "nothing left that keeps the frame"),
        ("begin forward, end forward, begin backward, begin backward", "called before and not ended"),
    ],
    ids=lambda value: value if "," in value or " " not in value else "",
)
def test_uses_out_of_order_are_refused(arena: epbuf.Arena, calls: str, message: str) -> None:
    """The last call raises; what was claimed before it is as it was."""
    lease = arena.acquire()
    *before, last = [call.split() for call in calls.split(", ")]

    def do(call: str, *use: Any) -> None:
        getattr(lease, call)(*use)

    for words in before:
        do(*words)
    frames = arena.report()["frames"]
    assert message in raised(LeaseError, lambda: do(*last))
    assert arena.report()["frames"] == frames
    if not lease.released:
        lease.release()


@pytest.mark.parametrize("step", ["enter", "open_frame"])
def test_begin_that_fails_leaves_nothing_behind(
    arena: epbuf.Arena, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:  # fmt: skip
    """Whatever the device said: the lease has had no forward, and may begin it."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with arena.acquire() as lease:
        frames = arena.report()["frames"]
        with monkeypatch.context() as patch:
            patch.setattr(arena.engine, step, fail)
            raised(ZeroDivisionError, lease.begin)
        assert arena.report()["frames"] == frames and lease.ticket is None
        lease.begin()
        lease.end()


@pytest.mark.parametrize("how", ["open", "adopt"])
@pytest.mark.parametrize("use", ["forward", "backward", "frame"])
@pytest.mark.parametrize("call", ["begin", "end"])
def test_marks_after_the_arena_is_closed_are_refused(how: str, use: Any, call: str) -> None:
    """The memory may be gone, or somebody else's; nothing is claimed in it."""
    arena = open_arena(plan_of(1), None, how)
    lease = arena.acquire()
    if use == "backward":
        lease.begin()
        lease.end()
    if call == "end":
        lease.begin(use)
    arena.close()
    claims = list(arena.book.claims())
    assert "arena that is closed" in raised(LeaseError, lambda: getattr(lease, call)(use))
    assert list(arena.book.claims()) == claims


def test_backward_may_begin_in_the_forward(arena: epbuf.Arena) -> None:
    """Kernels that want the memory of a gradient in the forward have the workspace from then on."""
    with arena.acquire() as lease:
        lease.begin("forward")
        lease.begin("backward")
        address = lease.grad_expert_out.data_ptr()
        lease.end("forward")
        ticket = lease.ticket
    assert lease.grad_expert_out.data_ptr() == address
    lease.end("backward")
    del ticket
    assert arena.report()["claims"] == []


def test_frame_use_needs_no_workspace() -> None:
    """A delayed weight gradient reads the frame while another frame has the workspace."""
    with open_arena(plan_of(1, num_frames=2), None) as arena, arena.acquire() as one, arena.acquire() as two:
        one.begin()
        one.end()
        two.begin()
        one.begin("frame")
        one.recv_tokens.sum()
        one.end("frame")
        message = raised(LeaseError, lambda: one.begin("forward"))
        assert "one forward per lease" in message
        two.end()


def test_busy_workspace_names_both_frames() -> None:
    with open_arena(plan_of(1, num_frames=2), None) as arena, arena.acquire() as one, arena.acquire() as two:
        one.begin()
        message = raised(LeaseError, lambda: two.begin())
        assert "frame 1 needs a forward workspace" in message and "by frame(s) [0]" in message
        one.end()
        two.begin()
        two.end()


def test_version_counters_see_a_frame_that_is_used_again(arena: epbuf.Arena) -> None:
    """Autograd refuses saved rows that a later forward may have overwritten, whoever wrote them."""
    weight = torch.ones(4, 4, requires_grad=True)
    with arena.acquire() as lease:
        lease.begin()
        lease.recv_tokens.fill_(1)
        rows = lease.recv_tokens @ weight
        lease.end()
    with arena.acquire() as lease:
        lease.begin()
        lease.end()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()


class Scaled(torch.autograd.Function):
    """Multiply rows through regions of a lease, which the backward finds by its ticket."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arena: epbuf.Arena) -> Tensor:
        with arena.acquire() as lease:
            lease.begin()
            lease.recv_tokens[: len(x)] = x
            y = lease.recv_tokens[: len(x)] ** 2
            lease.end()
            ctx.save_for_backward(lease.ticket)
        ctx.arena = arena
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (ticket,) = ctx.saved_tensors
        lease = ctx.arena.lease_of(ticket)
        lease.begin("backward")
        lease.grad_recv_tokens[: len(dy)] = 2 * dy * lease.recv_tokens[: len(dy)]
        dx = lease.grad_recv_tokens[: len(dy)].clone()
        lease.end("backward")
        return dx, None


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "plain": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
    },
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_repeat_the_forward_in_a_frame_of_its_own(arena: epbuf.Arena, kind: str) -> None:
    """Between the two passes nothing has the frame; the backward finds the second pass's by its ticket."""
    layers = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    results = [checkpoint(Scaled.apply, x, arena, **CHECKPOINTS[kind]) for x in layers]
    assert arena.report()["claims"] == []
    for x, y in zip(layers, results, strict=True):
        y.backward(torch.ones_like(y))
        assert x.grad is not None and torch.equal(x.grad, 2 * x)
    assert arena.report()["claims"] == []


def test_lease_of_a_ticket_claims_nothing(arena: epbuf.Arena) -> None:
    lease, ticket = forward(arena)
    found = arena.lease_of(ticket)
    assert found.released and found.frame == lease.frame
    assert found.recv_tokens.data_ptr() == lease.recv_tokens.data_ptr()
    assert "was released" in raised(LeaseError, found.begin)
    for wrong in (None, 3, torch.zeros(8, dtype=torch.uint8), torch.zeros(8), ticket[:4], ticket.to("meta")):
        assert "takes lease.ticket" in raised(ConfigError, lambda wrong=wrong: arena.lease_of(wrong))
    with open_arena(plan_of(1), None) as other:
        assert "of this arena" in raised(ConfigError, partial(other.lease_of, ticket))
    del ticket
    assert "nothing left" in raised(LeaseError, lambda: found.begin("backward"))
    arena.acquire().release()


# Holds, early reuse, guard


def forward(arena: epbuf.Arena) -> tuple[epbuf.Lease, Tensor]:
    with arena.acquire() as lease:
        lease.begin()
        lease.end()
        assert lease.ticket is not None
        return lease, lease.ticket


def backward(lease: epbuf.Lease) -> None:
    lease.begin("backward")
    lease.end("backward")


def test_marks_hold_and_reserve_like_our_own_ops(arena: epbuf.Arena) -> None:
    """A lease whose forward and backward are in two graphs reserves its frame for both until they die."""
    lives = [Life("forward"), Life("backward")]
    with arena.book.recording_into(lives[0].graph):
        lease, ticket = forward(arena)
    with arena.book.recording_into(lives[1].graph):
        backward(lease)
    del ticket
    assert [graph["where"] for graph in arena.report()["graphs"]] == ["forward.py:1", "backward.py:1"]
    assert "reserved" in raised(LeaseError, arena.acquire)
    assert "forward.py:1" in raised(LeaseError, arena.close)
    for life in lives:
        life.alive = False
    arena.acquire().release()


@pytest.mark.parametrize(("times", "count"), [(1, 0), (2, 1), (3, 2)])
def test_backward_graph_without_its_forward_counts_as_early_reuse(arena: epbuf.Arena, times: int, count: int) -> None:
    lives = [Life("forward"), Life("backward")]
    with arena.book.recording_into(lives[0].graph):
        lease, ticket = forward(arena)
    for _ in range(times):
        with arena.book.recording_into(lives[1].graph):
            backward(lease)
    del ticket
    for life in lives:
        life.alive = False
    assert arena.report()["num_early_reuses"] == count


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_step_that_reuses_a_frame_early_raises(arena: epbuf.Arena, warmup: int) -> None:
    """A step whose backward belongs to another graph's forward raises when it is replayed without that, and only then.

    Warm-up repeats it without, which is nobody's mistake.
    """
    kept: list[Any] = []

    def run_forward(x: Tensor) -> Tensor:
        lease = outside
        lease.begin()
        lease.end()
        kept[:] = [lease]
        return x + 1

    def run_backward(x: Tensor) -> Tensor:
        backward(kept[0])
        return x + 1

    x = torch.zeros(1)
    outside = arena.acquire()
    first = epbuf.CapturedStep.capture(arena, run_forward, (x,), warmup=warmup)
    second = epbuf.CapturedStep.capture(arena, run_backward, (x,), warmup=warmup)
    for _ in range(2):
        first(x)
        second(x)
        second.check()
    second(x)
    with pytest.raises(LeaseError, match="already been followed by its backward"):
        second.check()
    for step in (first, second):
        step.close()
    outside.release()


@pytest.mark.parametrize("call", ["open", "adopt", "grow", "close", "report", "check"])
def test_guard_refuses_what_cannot_be_captured(arena: epbuf.Arena, call: str) -> None:
    plan = plan_of(1, max_tokens_per_rank=9)
    calls: dict[str, Callable[[], Any]] = {
        "open": lambda: epbuf.Arena.open(plan, engine="external"),
        "adopt": lambda: epbuf.Arena.adopt(plan, memory_of(plan)),
        "grow": lambda: arena.grow(plan),
        "close": arena.close,
        "report": arena.report,
        "check": arena.check,
    }

    def step(x: Tensor) -> Tensor:
        calls[call]()
        return x

    with pytest.raises(CaptureError, match="cannot be captured"):
        epbuf.CapturedStep.capture(arena, step, (torch.zeros(1),), warmup=0)
    arena.acquire().release()


def test_claim_left_behind_by_a_step_is_named(arena: epbuf.Arena) -> None:
    kept: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        kept.append(forward(arena)[1])
        return x

    with pytest.raises(CaptureError, match=r"ticket on frame 0 from .*test_external\.py"):
        epbuf.CapturedStep.capture(arena, step, (torch.zeros(1),), warmup=0)


# Demand, overflow, growth


def test_demand_beyond_the_capacity_is_an_overflow(arena: epbuf.Arena) -> None:
    """What the caller's kernels say of their demand is counted, flagged, and what growth goes by."""
    demands = [arena.capacity_rows, arena.capacity_rows + 3, 2]

    def step(num_rows: Tensor) -> Tensor:
        with arena.acquire() as lease:
            lease.begin()
            lease.end(total_recv_tokens=num_rows)
            return lease.overflow.clone()

    captured = epbuf.CapturedStep.capture(arena, step, (torch.tensor([1]),), on_overflow="raise")
    flags = [float(captured(torch.tensor([rows]))) for rows in demands[:2]]
    assert flags == [0.0, 1.0] and float(captured.overflow) == 1.0
    with pytest.raises(CapacityError, match=f"up to {arena.capacity_rows + 3} rows"):
        captured(torch.tensor([demands[2]]))
    assert float(captured(torch.tensor([demands[2]]))) == 0.0
    report = arena.report()
    assert (report["demand_peak_rows"], report["num_overflows"]) == (arena.capacity_rows + 3, 1)
    captured.close()


@pytest.mark.parametrize(
    ("use", "num_rows", "message"),
    [
        ("forward", 3, "found int"),
        ("forward", torch.tensor(3), r"found \[\] torch.int64 on cpu"),
        ("forward", torch.tensor([3.0]), r"found \[1\] torch.float32"),
        ("forward", torch.empty(1, dtype=torch.int64, device="meta"), "on meta"),
        ("frame", torch.tensor([3]), r'total_recv_tokens is of end\("forward"\)'),
    ],
    ids=["int", "scalar", "float", "device", "use"],
)
def test_wrong_demand_is_refused_and_ends_nothing(arena: epbuf.Arena, use: Any, num_rows: Any, message: str) -> None:
    with arena.acquire() as lease:
        lease.begin(use)
        with pytest.raises(ConfigError, match=message):
            lease.end(use, total_recv_tokens=num_rows)
        lease.end(use)


def _grows(rank: int, group: Any, how: str) -> int:
    plan = plan_of(size_of(group), recv_capacity_per_rank=2)
    larger = plan_of(size_of(group), recv_capacity_per_rank=64)
    with open_arena(plan, group, how) as arena:
        mover = Mover(plan.config, group)
        x, ids, weights, _ = draw(plan.config, rank)

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                return moe(arena, mover, x, ids, weights)

        captured = epbuf.CapturedStep.capture(arena, step, (x,), on_overflow=lambda step: None)
        captured(x)
        assert float(captured.overflow) == (1.0 if int(mover.demand) > 2 else 0.0)
        stale = arena.grow(larger, memory_of(larger)) if how == "adopt" else arena.grow_to_peak()
        assert len(stale) == 1 and "test_external.py" in stale[0]
        assert "capture again" in raised(StaleGraphError, lambda: captured(x))
        captured.close()
        one_layer(arena, mover, rank)
        assert arena.report()["generation"] == 1
        return arena.capacity_rows


def test_opened_arena_grows_to_the_peak_of_all_ranks(spread: Spread) -> None:
    """It allocates its next memory itself; old graphs are stale."""
    (first, second) = spread(2, _grows, "open")
    assert first == second > 2


def test_adopted_arena_grows_into_memory_that_it_is_given(spread: Spread) -> None:
    assert spread(2, _grows, "adopt") == [64, 64]


def test_rows_that_are_asked_for_fit_the_alignment() -> None:
    """What the message says to plan can be planned."""
    plan = plan_of(1, expert_alignment=4)
    with epbuf.Arena.adopt(plan, memory_of(plan)) as arena:
        with arena.acquire() as lease:
            lease.begin()
            lease.end(total_recv_tokens=torch.tensor([997]))
        message = raised(ConfigError, arena.grow_to_peak)
        rows = int(re.findall(r"recv_capacity_per_rank=(\d+)", message)[0])
        larger = plan_of(1, expert_alignment=4, recv_capacity_per_rank=rows)
        arena.grow(larger, memory_of(larger))
        assert arena.grow_to_peak() == []


def test_growth_of_an_adopted_arena_asks_for_memory() -> None:
    plan, larger = plan_of(1), plan_of(1, max_tokens_per_rank=9)
    memory = memory_of(plan)
    with epbuf.Arena.adopt(plan, memory) as arena:
        assert "found NoneType" in raised(ConfigError, lambda: arena.grow(larger))
        assert "needs" in raised(ConfigError, lambda: arena.grow(larger, memory_of(plan)))
        with arena.acquire() as lease:
            lease.begin()
            lease.end(total_recv_tokens=torch.tensor([999]))
        assert "grow(plan, tensor)" in raised(ConfigError, arena.grow_to_peak)
        assert arena.generation == 0
        one_layer(arena, Mover(plan.config, None), 0)
    with open_arena(plan, None) as arena:
        assert "call grow(plan)" in raised(ConfigError, lambda: arena.grow(larger, memory_of(larger)))


def test_growing_and_rerun_need_our_dispatch(arena: epbuf.Arena) -> None:
    step = epbuf.CapturedStep.capture(arena, lambda x: x + 1, (torch.zeros(1),))
    assert "total_recv_tokens" in raised(ConfigError, lambda: arena.growing().__enter__())
    assert "total_recv_tokens" in raised(ConfigError, step.rerun)
    step.close()


# Adopted memory


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (lambda plan: [1, 2], "found list"),
        (lambda plan: memory_of(plan).view(torch.int8), "uint8, found .*int8"),
        (lambda plan: memory_of(plan).view(-1, 256), r"found \[\d+, 256\]"),
        (lambda plan: torch.zeros(2 * plan.total_bytes, dtype=torch.uint8)[::2], r"strides \(2,\)"),
        (lambda plan: memory_of(plan)[:-1], r"needs [\d,]+ bytes for the plan, found a tensor of [\d,]+"),
        (lambda plan: memory_of(plan, past=16), "16 past one"),
        (lambda plan: torch.empty(plan.total_bytes, dtype=torch.uint8, device="meta"), "found a tensor on meta"),
        (lambda plan: torch.zeros(plan.total_bytes, dtype=torch.uint8).to_sparse(), "torch.sparse_coo"),
    ],
    ids=["no_tensor", "dtype", "dimensions", "strides", "size", "alignment", "device", "layout"],
)
def test_memory_that_does_not_fit_is_refused(memory: Callable[[epbuf.Plan], Any], message: str) -> None:
    plan = plan_of(1)
    with pytest.raises(ConfigError, match=message):
        epbuf.Arena.adopt(plan, memory(plan))


def _one_brings_less(rank: int, group: Any) -> str:
    plan = plan_of(size_of(group))
    memory = memory_of(plan)[: -1 if rank == 1 else None]
    return raised(ConfigError, lambda: epbuf.Arena.adopt(plan, memory, group))


def test_memory_of_one_rank_is_refused_on_all(spread: Spread) -> None:
    first, second = spread(2, _one_brings_less)
    assert first.startswith("rank 1 refuses Arena.adopt: adopt() needs")
    assert second.startswith("adopt() needs")


def _other_plan(rank: int, group: Any) -> str:
    plan = plan_of(size_of(group), max_tokens_per_rank=5 + rank)
    return raised(PlanMismatchError, lambda: epbuf.Arena.adopt(plan, memory_of(plan), group))


def test_other_plan_is_refused_on_all(spread: Spread) -> None:
    assert all("max_tokens_per_rank" in message for message in spread(2, _other_plan))


def _other_way(rank: int, group: Any, ways: tuple[str, str]) -> str:
    plan = plan_of(size_of(group))
    opened: dict[str, Callable[[], Any]] = {
        "native": lambda: epbuf.Arena.open(plan, group),
        "external": lambda: epbuf.Arena.open(plan, group, engine="external"),
        "adopted": lambda: epbuf.Arena.adopt(plan, memory_of(plan), group),
    }
    return raised(ConfigError, opened[ways[rank]])


@pytest.mark.parametrize(
    "ways",
    [("native", "external"), ("external", "native"), ("adopted", "external"), ("native", "adopted")],
    ids="-".join,
)
def test_ranks_that_open_in_another_way_are_named_on_all(spread: Spread, ways: tuple[str, str]) -> None:
    """Kernels of two kinds would wait for each other's signals until the time-out."""
    said = {
        "native": 'Arena.open(engine="native"',
        "external": 'Arena.open(engine="external"',
        "adopted": "Arena.adopt",
    }
    for message in spread(2, _other_way, ways):
        assert f"rank 0 asks for {said[ways[0]]}" in message and f"rank 1 for {said[ways[1]]}" in message


def test_memory_of_an_open_arena_is_not_adopted_twice() -> None:
    plan, larger = plan_of(1), plan_of(1, max_tokens_per_rank=9)
    memory = memory_of(larger)
    with epbuf.Arena.adopt(plan, memory) as arena:
        message = raised(ConfigError, lambda: epbuf.Arena.adopt(plan, memory[-plan.total_bytes // 256 * 256 :]))
        assert "test_external.py" in message and "close that one first" in message
        assert "close that one first" in raised(ConfigError, lambda: arena.grow(larger, memory))
        assert arena.generation == 0
    epbuf.Arena.adopt(plan, memory).close()


def test_adopted_memory_is_the_owners() -> None:
    """Regions lie in the tensor, junk in it is gone, and neither close() nor death frees or keeps it."""
    plan = plan_of(1)
    room = torch.full((plan.total_bytes + 512,), 0xA5, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    memory = room[start:]
    arena = epbuf.Arena.adopt(plan, memory)
    assert int(room[start : start + plan.total_bytes].sum()) == 0
    assert bool((room[start + plan.total_bytes :] == 0xA5).all())
    with arena.acquire() as lease:
        lease.recv_tokens.fill_(1)
        region = plan.region("recv_tokens")
        assert lease.recv_tokens.data_ptr() == memory.data_ptr() + region.offset
        assert lease.window_of("recv_tokens") == (memory, region.offset)
    arena.close()
    assert bool((memory[region.offset : region.end].view(torch.float32) == 1).all())
    storage, gone = weakref.ref(room.untyped_storage()), []
    weakref.finalize(memory, gone.append, True)
    del arena, lease, memory, room
    gc.collect()
    assert gone == [True] and storage() is None


def test_view_keeps_adopted_memory_alive() -> None:
    plan = plan_of(1)
    memory = memory_of(plan)
    gone: list[bool] = []
    weakref.finalize(memory, gone.append, True)
    arena = epbuf.Arena.adopt(plan, memory)
    lease = arena.acquire()
    view = lease.recv_tokens
    view.fill_(3)
    lease.release()
    arena.close()
    del memory, arena, lease
    gc.collect()
    assert gone == [] and bool((view == 3).all())
    del view
    gc.collect()
    assert gone == [True]


def test_registration_comes_back_with_the_offset() -> None:
    plan, handle = plan_of(1), object()
    with epbuf.Arena.adopt(plan, memory_of(plan), registration=handle) as arena, arena.acquire() as lease:
        assert lease.window_of("recv_tokens") == (handle, plan.region("recv_tokens").offset)
        larger = plan_of(1, max_tokens_per_rank=9)
        other = object()
        lease.release()
        arena.grow(larger, memory_of(larger), registration=other)
        with arena.acquire() as grown:
            assert grown.window_of("recv_tokens") == (other, larger.region("recv_tokens").offset)


def test_packed_view_lies_in_adopted_memory() -> None:
    plan = plan_of(1, hidden=64, dispatch_payload="mxfp8", expert_alignment=128)
    memory = memory_of(plan)
    with epbuf.Arena.adopt(plan, memory) as arena, arena.acquire() as lease:
        packed = lease.packed("recv_tokens")
        assert packed.data_ptr() == memory.data_ptr() + plan.region("recv_tokens").offset
        assert packed.nbytes == plan.region("recv_tokens").nbytes + plan.region("recv_scales").nbytes


# What does not go together


def test_our_ops_are_refused(arena: epbuf.Arena) -> None:
    """dispatch and combine say what to do instead, and claim nothing."""
    x, ids, _, _ = draw(arena.plan.config, 0)
    with arena.acquire() as lease:
        assert 'engine="external"' in raised(ConfigError, lambda: epbuf.dispatch(lease, x, ids))
        assert 'engine="external"' in raised(ConfigError, lambda: epbuf.combine(lease, lease.recv_tokens))
        lease.begin()
        lease.end()


def test_marks_are_refused_on_our_engine() -> None:
    with epbuf.Arena.open(plan_of(1)) as arena, arena.acquire() as lease:
        assert "call those" in raised(ConfigError, lambda: lease.begin())
        assert "call those" in raised(ConfigError, lambda: lease.end())


def test_unknown_words_are_refused(arena: epbuf.Arena) -> None:
    with arena.acquire() as lease:
        assert "found 'both'" in raised(ConfigError, lambda: lease.begin("both"))  # type: ignore[arg-type]
    message = raised(ConfigError, lambda: epbuf.Arena.open(plan_of(1), engine="extern"))
    assert message == 'engine="extern" does not exist; found engines: "native", "nccl_ep", "external"'


def test_inference_plan_has_no_backward() -> None:
    with open_arena(plan_of(1, inference_only=True), None) as arena, arena.acquire() as lease:
        lease.begin()
        lease.end()
        assert "inference_only" in raised(ConfigError, lambda: lease.begin("backward"))


def test_marks_are_refused_in_compiled_code(arena: epbuf.Arena) -> None:
    def step(x: Tensor, lease: epbuf.Lease) -> Tensor:
        lease.begin()
        return x + 1

    with (
        arena.acquire() as lease,
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"begin\(\) inside torch\.compile"),
    ):
        torch.compile(step, backend="eager", fullgraph=True)(torch.zeros(1), lease)


@pytest.mark.parametrize("writes_offs", [False, True])
def test_debug_mode_looks_behind_the_zones_that_are_known(writes_offs: bool) -> None:
    """Kernels need not write offs; where they do, rows past the last zone are canaries as for our own engine."""
    with epbuf.Arena.open(plan_of(1), engine="external", debug=True) as arena:
        with arena.acquire() as lease:
            assert bool(lease.recv_tokens.isnan().all())
            lease.begin()
            lease.recv_tokens.fill_(1)
            if writes_offs:
                lease.offs.fill_(3)
            lease.end()
        if writes_offs:
            assert "past the last zone" in raised(Exception, arena.acquire)
        else:
            arena.acquire().release()


def test_abandoned_external_arena_leaves_nobody_waiting() -> None:
    plan = plan_of(1)
    with pytest.raises(ZeroDivisionError), pytest.warns(ResourceWarning), open_arena(plan, None):
        raise ZeroDivisionError


MOVES: dict[str, Callable[[Tensor], object]] = {
    "shared": lambda memory: memory.share_memory_(),
    "freed": lambda memory: memory.untyped_storage().resize_(0),
    "larger": lambda memory: memory.untyped_storage().resize_(1 << 24),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("call", ["acquire", "begin", "end", "window_of", "step", "report", "check", "grow"])
def test_adopted_memory_that_moves_is_refused(move: str, call: str) -> None:
    """Regions would be addresses of memory that was given back; close() still ends the arena."""
    plan, number = plan_of(1, num_frames=2), torch.zeros(1)
    memory = memory_of(plan)
    arena = epbuf.Arena.adopt(plan, memory)
    step = epbuf.CapturedStep.capture(arena, lambda number: number + 1, (number,))
    lease = arena.acquire()
    if call == "end":
        lease.begin()
    MOVES[move](memory)
    calls: dict[str, Callable[[], object]] = {
        "acquire": arena.acquire,
        "begin": lease.begin,
        "end": lease.end,
        "window_of": lambda: lease.window_of("recv_tokens"),
        "step": lambda: step(number),
        "report": arena.report,
        "check": arena.check,
        "grow": lambda: arena.grow(plan_of(1, 3), memory_of(plan_of(1, 3))),
    }
    assert "adopted memory is gone" in raised(LeaseError, calls[call])
    step.close()
    arena.close()


def test_tensor_that_gets_other_memory_leaves_the_arena_its_own() -> None:
    """The arena keeps the storage, whatever becomes of the tensor that brought it."""
    plan = plan_of(1)
    memory = memory_of(plan)
    with epbuf.Arena.adopt(plan, memory) as arena:
        memory.data = torch.zeros(3, dtype=torch.uint8)
        gc.collect()
        with arena.acquire() as lease:
            lease.begin()
            lease.recv_tokens.fill_(7)
            assert bool((lease.packed("recv_tokens").view(torch.float32) == 7).all())
            lease.end()


@pytest.mark.parametrize("policy", ["stash", "recompute"])
def test_rows_that_our_backward_would_bring_back_are_refused(policy: Any) -> None:
    plan = epbuf.Plan.build(plan_of(1).config, recv_policy=policy)
    memory = torch.empty(plan.total_bytes + 256, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 256 :]
    for opened in (lambda: epbuf.Arena.open(plan, engine="external"), lambda: epbuf.Arena.adopt(plan, memory)):
        assert f"recv_policy='{policy}'" in raised(ConfigError, opened)
