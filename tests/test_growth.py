"""Overflow, growth, generations of memory, and the report: what a run does that needs more rows than it planned."""

from __future__ import annotations

import gc
import io
import json
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import raised, size_of, virtual
from rich.console import Console
from rounds import assert_round, assert_same, draw_inputs, expected, play_round
from routings import base_config, named_case
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

import epbuf
from epbuf import _C, cli, growth
from epbuf.errors import (
    CapacityError,
    CaptureError,
    ConfigError,
    LeaseError,
    NativeError,
    PeerTimeoutError,
    PlanMismatchError,
    StaleGraphError,
)

Spread = Callable[..., list[Any]]
HIDDEN, TOKENS, TOPK, FEW = 16, 12, 3, 6


def tight_rows(num_ranks: int) -> int:
    """Return a capacity that FEW tokens a rank always fit: every row on one rank, and padding of four zones."""
    return -(-(num_ranks * FEW * TOPK + 4 * 3) // 4) * 4


def plan_of(
    num_ranks: int, rows: int | None = None, num_frames: int = 2, recv_policy: Any = "keep", **changes: Any
) -> epbuf.Plan:
    config = base_config(
        num_ranks, token_dtype="fp32", expert_alignment=4, **{"recv_capacity_per_rank": rows} | changes
    )
    return epbuf.Plan.build(config, schedule=epbuf.Schedule(num_frames), recv_policy=recv_policy)


def open_arena(
    group: Any = None, tight: bool = True, *, device: str = "cpu", window: str = "auto", **changes: Any
) -> epbuf.Arena:
    num_ranks = size_of(group)
    plan = plan_of(num_ranks, tight_rows(num_ranks) if tight else None, **changes)
    return epbuf.Arena.open(plan, None if window == "local" else group, device=device, window=window)


class Model(nn.Module):
    """Two MoE layers on two frames; `live` and `steer` decide how many rows each layer sends, and where."""

    def __init__(self, arena: epbuf.Arena, rank: int, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.checkpoints = checkpoints  # reentrant or not; None: no layer is run again in its backward
        generator = torch.Generator().manual_seed(rank)
        config = arena.plan.config
        self.routers = nn.ParameterList(torch.randn(HIDDEN, config.num_experts, generator=generator) for _ in range(2))
        self.experts = nn.ParameterList(
            torch.randn(config.num_local_experts, HIDDEN, HIDDEN, generator=generator) / 4 for _ in range(2)
        )
        self.arena = [arena]
        self.to(arena.device)

    def forward(self, x: Tensor, live: Tensor, steer: Tensor) -> Tensor:
        for layer in range(2):
            if self.checkpoints is None:
                x = self.layer(layer, x, live, steer)
            else:
                x = checkpoint(self.layer, layer, x, live, steer, use_reentrant=self.checkpoints)
        return x

    def layer(self, layer: int, x: Tensor, live: Tensor, steer: Tensor) -> Tensor:
        experts = self.experts[layer]
        weights, ids = torch.softmax(x @ self.routers[layer] + steer[layer], dim=1).topk(TOPK, dim=1)
        with self.arena[0].acquire(layer) as lease:
            recv = epbuf.dispatch(lease, x, ids, weights, num_tokens=live[layer : layer + 1])
            mask = recv.row_mask()[:, None]
            row = torch.arange(len(mask), device=x.device)
            expert = torch.searchsorted(recv.offs, row, right=True).clamp(max=len(experts) - 1)
            rows = torch.bmm(torch.where(mask, recv.tokens, 0)[:, None], experts[expert])[:, 0].tanh()
            return x + epbuf.combine(lease, torch.where(mask, rows, 0), topk_weights=recv.topk_weights)


class Training:
    """A model, its fused optimiser, and the two steps that are captured."""

    def __init__(self, arena: epbuf.Arena, rank: int, checkpoints: bool | None = None) -> None:
        self.arena, self.model = arena, Model(arena, rank, checkpoints)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-2, fused=True, capturable=arena.device.type == "cuda"
        )

    def step(self, x: Tensor, target: Tensor, live: Tensor, steer: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        x = x.clone().requires_grad_()  # what a reentrant checkpoint takes for a reason to run backward at all
        loss = (self.model(x, live, steer) - target).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def validate(self, x: Tensor, target: Tensor, live: Tensor, steer: Tensor) -> Tensor:
        with torch.no_grad():
            return (self.model(x, live, steer) - target).square().mean()

    def capture(self, batch: tuple[Tensor, ...], on_overflow: Any = "skip") -> epbuf.CapturedStep:
        restore = (self.model, self.optimizer)
        return epbuf.CapturedStep.capture(self.arena, self.step, batch, restore=restore, on_overflow=on_overflow)

    def state(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [tensor.detach().cpu().clone() for tensor in (*self.model.parameters(), *states)]


def batch_of(
    rank: int, num_ranks: int, number: int, hard: bool = False, device: str = "cpu"
) -> tuple[Tensor, ...]:  # fmt: skip
    """Draw a batch of FEW live tokens; a hard one sends all tokens of layer 2 to experts of rank 0."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    x, target = torch.randn(2, TOKENS, HIDDEN, generator=generator)
    live, steer = torch.tensor([FEW, TOKENS if hard else FEW]), torch.zeros(2, 4 * num_ranks)
    if hard:
        steer[1, :4] = 100.0
    return x.to(device), target.to(device), live.to(device), steer.to(device)


NUM_STEPS, HARD = 6, 2


def trained(
    rank: int, group: Any, tight: bool, device: str = "cpu", window: str = "auto"
) -> dict[str, Any]:  # fmt: skip
    """Train; where a step overflows, see that it was skipped, run it again, and capture again."""
    num_ranks = size_of(group)
    found: dict[str, Any] = {"losses": [], "reruns": [], "skipped": [], "peaks": []}
    with open_arena(group, tight, device=device, window=window) as arena:
        training = Training(arena, rank)
        step = training.capture(batch_of(rank, num_ranks, 99, device=device))
        for number in range(NUM_STEPS):
            batch, before = batch_of(rank, num_ranks, number, number == HARD, device), training.state()
            loss = step(*batch)
            if step.overflow:
                after = training.state()
                found["skipped"].append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
                found["peaks"] = arena.demand_peaks()
                loss = step.rerun()
                found["reruns"].append(number)
                found["stale"] = raised(StaleGraphError, lambda step=step, batch=batch: step(*batch))
                step.close()
                step = training.capture(batch)
            found["losses"].append(loss.cpu().clone())
        step.check()
        step.close()
        report = arena.report()
        found |= {"state": training.state(), "capacity": arena.capacity_rows, "generation": arena.generation}
        found |= {"kept": [part["generation"] for part in report["generations"]], "found_inf": vars(training.optimizer)}
        found["found_inf"] = "found_inf" in found["found_inf"]
        assert json.loads(json.dumps(report)) == report
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_overflow_is_flagged_skipped_rerun_grown_and_recaptured(num_ranks: int, spread: Spread) -> None:
    """A step that overflows on layer 2 only changes no weight; run again it grows the arena, and training goes on to
    the bit as with the capacity from the start.
    """
    wide = spread(num_ranks, trained, False)
    for rank, (found, want) in enumerate(zip(spread(num_ranks, trained, True), wide, strict=True)):
        assert want["reruns"] == [] and want["generation"] == 0
        assert found["reruns"] == [HARD] and found["skipped"] == [True], rank
        first, second = found["peaks"]
        assert first <= tight_rows(num_ranks) < second
        assert found["capacity"] == second and (found["generation"], found["kept"]) == (1, [1])
        assert str(tight_rows(num_ranks)) in found["stale"] and "test_growth.py" in found["stale"]
        assert not found["found_inf"]
        for number, (loss, wanted) in enumerate(zip(found["losses"], want["losses"], strict=True)):
            assert_same(loss, wanted, f"loss {number} of rank {rank}")
        for tensor, wanted in zip(found["state"], want["state"], strict=True):
            assert_same(tensor, wanted, f"state of rank {rank}")


def _grown_in_mid_step(rank: int, group: Any, tight: bool, policy: str = "keep") -> list[Tensor]:
    """Train eagerly: layer 1 in one generation and layer 2 in the next, and both backwards after that."""
    num_ranks = size_of(group)
    with open_arena(group, tight, recv_policy=policy) as arena:
        training = Training(arena, rank)
        with arena.growing():
            losses = [training.step(*batch_of(rank, num_ranks, number, hard=number == 1)) for number in range(3)]
        assert arena.generation == int(tight)
        assert len(arena.report()["generations"]) == 1
        return [*losses, *training.state()]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_growth_between_the_layers_of_a_step_keeps_its_gradients(num_ranks: int, spread: Spread) -> None:
    """A backward that goes from new memory into old is that of an arena with room from the start, to the bit."""
    wide = spread(num_ranks, _grown_in_mid_step, False)
    for found, want in zip(spread(num_ranks, _grown_in_mid_step, True), wide, strict=True):
        for tensor, wanted in zip(found, want, strict=True):
            assert_same(tensor, wanted, "loss or state")


def test_rows_that_are_dispatched_again_come_from_the_memory_they_were_in() -> None:
    """A backward that recomputes received rows does it in old memory for one layer and in new for the next."""
    wide = virtual(2, _grown_in_mid_step, False)
    for found, want in zip(virtual(2, _grown_in_mid_step, True, "recompute"), wide, strict=True):
        for tensor, wanted in zip(found, want, strict=True):
            assert_same(tensor, wanted, "loss or state")


def _checkpointed(rank: int, group: Any, reentrant: bool, tight: bool, by_hand: bool) -> list[Tensor]:
    """Train one step that overflows in layer 2, whose layers are checkpoints."""
    hard = batch_of(rank, size_of(group), 1, hard=True)
    with open_arena(group, tight) as arena:
        training = Training(arena, rank, reentrant)
        if by_hand:
            with arena.growing():
                if tight and not reentrant:
                    message = raised(CheckpointError, lambda: training.step(*hard))
                    assert "32" in message or "48" in message
                    assert_same(training.state()[0], Training(arena, rank).state()[0], "weight of a step that failed")
                return [training.step(*hard), *training.state()]
        captured = training.capture(hard)
        loss = captured(*hard)
        if captured.overflow:
            loss = captured.rerun()
        captured.close()
        return [loss.clone(), *training.state()]


@pytest.mark.parametrize("by_hand", [False, True], ids=["rerun", "growing"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_growth_under_checkpoints(reentrant: bool, by_hand: bool) -> None:
    """A re-run has room before it begins, so both passes see the same rows. A growth in mid-step is something that
    torch's own check of a non-reentrant checkpoint refuses: the step fails, and works when it is run again.
    """
    wide = virtual(2, _checkpointed, reentrant, False, by_hand)
    for found, want in zip(virtual(2, _checkpointed, reentrant, True, by_hand), wide, strict=True):
        for tensor, wanted in zip(found, want, strict=True):
            assert_same(tensor, wanted, "loss or state")


def validated(
    rank: int, group: Any, overflows: bool, device: str = "cpu", window: str = "auto"
) -> dict[str, Any]:  # fmt: skip
    num_ranks, called = size_of(group), []
    with open_arena(group, device=device, window=window) as arena:
        training = Training(arena, rank)
        example = batch_of(rank, num_ranks, 99, device=device)
        train = training.capture(example, on_overflow=lambda _: called.append("train"))
        check = epbuf.CapturedStep.capture(
            arena, training.validate, example, on_overflow=lambda _: called.append("check")
        )
        losses = []
        for number in range(4):
            losses.append(train(*batch_of(rank, num_ranks, number, device=device)).cpu().clone())
            check(*batch_of(rank, num_ranks, 50, overflows, device))
            assert float(check.overflow) == float(overflows) and float(train.overflow) == 0
        train.check()
        check.check()
        train.close()
        check.close()
        return {"losses": losses, "called": called, "state": training.state()}


def test_validation_overflow_does_not_disturb_the_training_graph(spread: Spread) -> None:
    """Each step reacts to its own overflows only, and the training's values stay what they are without."""
    calm = spread(2, validated, False)
    for found, want in zip(spread(2, validated, True), calm, strict=True):
        assert want["called"] == [] and found["called"] == ["check"] * 4
        for tensor, wanted in zip(found["losses"] + found["state"], want["losses"] + want["state"], strict=True):
            assert_same(tensor, wanted, "training")


def _rounds(rank: int, group: Any, routing: str, policy: str) -> tuple[dict[str, Tensor], list[int]]:
    case = named_case(routing, size_of(group), 4, "fp32")
    rows = {"recv_capacity_per_rank": 8, "overflow_policy": policy}
    config = epbuf.EpConfig(**{**dict(case.config), **rows})
    inputs = draw_inputs(case, rank, True)
    capacity = epbuf.Plan.build(case.config).capacity_rows
    with epbuf.Arena.open(epbuf.Plan.build(config), group) as arena:
        with arena.growing(), arena.acquire() as lease, torch.no_grad():
            old = lease.recv_tokens.fill_(-5.0)
            recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx, inputs.topk_weights)
            epbuf.combine(lease, recv.tokens)
            assert float(recv.overflow) == 0 and bool((old == -5.0).all()), "a row moved before the arena grew"
            del recv
        grown = arena.capacity_rows
        generations = [part["generation"] for part in arena.report()["generations"]]
        if capacity > grown:
            arena.grow(growth.grown_plan(arena.plan, capacity))
        got = play_round(arena, inputs, True)
    return got, [grown, *generations]


@pytest.mark.parametrize("policy", ["drop", "error"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_eager_dispatch_grows_before_any_row_moves(num_ranks: int, policy: str) -> None:
    """The arena has then exactly the rows that the fullest rank needs, and rounds are the reference's to the bit."""
    case = named_case("balanced", num_ranks, 4, "fp32")
    want = expected(case, True, True)
    needed = max(int(mine["total_recv_tokens"]) for mine in want)
    for rank, (got, found) in enumerate(virtual(num_ranks, _rounds, "balanced", policy)):
        assert found == [needed, 1], "capacity, and the generations that are left"
        assert_round(got, want[rank], f"rank {rank}")


def x_and_ids(arena: epbuf.Arena, one_rank: bool = False) -> tuple[Tensor, Tensor]:
    x = draw_inputs(named_case("balanced", 1, 1, "fp32"), 0, True).x
    ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % (4 if one_rank else arena.plan.config.num_experts)
    return x, ids


def echo(arena: epbuf.Arena) -> Callable[[Tensor, Tensor], Tensor]:
    """Make a step whose y is three times x."""

    def step(x: Tensor, ids: Tensor) -> Tensor:
        with arena.acquire() as lease, torch.no_grad():
            return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)

    return step


def _memory_goes(rank: int, group: Any) -> list[tuple[list[int], bool]]:
    """Grow with a live graph, an autograd graph and a lease on the old memory; end one after the other."""
    seen = []
    num_ranks = size_of(group)
    with open_arena(group) as arena:
        segment = weakref.ref(arena.window._segments[rank])  # its death unmaps this rank's memory
        x, ids = (tensor[:FEW] for tensor in x_and_ids(arena))
        captured = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        leaf = x.clone().requires_grad_()
        with arena.acquire() as lease:
            y = epbuf.combine(lease, epbuf.dispatch(lease, leaf, ids).tokens * 2.0)
        held = arena.acquire(1)
        [stale] = arena.grow(plan_of(num_ranks, 96))
        assert "test_growth.py" in stale and arena.window_allocations == 2

        def look() -> None:
            report = arena.report()
            seen.append(([part["generation"] for part in report["generations"]], segment() is not None))

        look()
        captured.close()
        look()
        y.backward(torch.ones_like(y))
        assert leaf.grad is not None
        assert_same(leaf.grad, torch.full_like(x, 6.0), "dx through the old memory")
        del y, lease
        look()
        held.release()
        arena.report()
        arena.barrier()  # ranks of one process share each other's mappings
        look()
        assert_same(echo(arena)(x, ids), x * 3, "y in the new memory")
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_old_memory_lives_until_its_last_graph_and_claim_end(num_ranks: int, spread: Spread) -> None:
    """It serves the backward of what was dispatched in it, and is unmapped when a lease was the last that kept it."""
    for seen in spread(num_ranks, _memory_goes):
        assert seen == [([0, 1], True)] * 3 + [([1], False)]


def test_stale_graph_says_where_to_capture_again() -> None:
    """A replay in old memory is refused with both capacities; close() is refused while it lives; another works."""
    with open_arena() as arena:
        x, ids = x_and_ids(arena)
        captured = epbuf.CapturedStep.capture(arena, echo(arena), (x[:FEW], ids[:FEW]))
        arena.grow(plan_of(1, 48))
        with pytest.raises(StaleGraphError, match=r"(?s)test_growth\.py:\d+.*=32\).*test_growth\.py:\d+.*1 \(48\)"):
            captured(x[:FEW], ids[:FEW])
        captured.check()
        [graph] = arena.report()["graphs"]
        assert graph["is_stale"] and graph["generation"] == 0 and "test_growth.py" in graph["where"]
        with pytest.raises(LeaseError, match=r"(?s)close\(\).*test_growth\.py"):
            arena.close()
        captured.close()
        again = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        assert_same(again(x, ids), x * 3, "y of the new graph")
        assert [graph["is_stale"] for graph in arena.report()["graphs"]] == [False]
        again.close()


def test_dropping_one_graph_keeps_what_another_uses() -> None:
    """Two graphs over one frame: the second replays on when the first is gone, in old memory as well as in new."""
    with open_arena() as arena:
        x, ids = (tensor[:FEW] for tensor in x_and_ids(arena))
        first, second = (epbuf.CapturedStep.capture(arena, echo(arena), (x, ids)) for _ in range(2))
        first.close()
        assert_same(second(x + 1, ids), (x + 1) * 3, "y of the second graph")
        third = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        arena.grow(plan_of(1, 48))
        del second
        assert [part["generation"] for part in arena.report()["generations"]] == [0, 1]
        del third
        gc.collect()
        assert [part["generation"] for part in arena.report()["generations"]] == [1]


def _fails_to_grow(rank: int, group: Any) -> tuple[str, bool]:
    with open_arena(group) as arena:
        x, ids = (tensor[:FEW] for tensor in x_and_ids(arena))
        captured = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        before, plan = arena.report(), arena.plan
        message = raised(NativeError, lambda: arena.grow(plan_of(size_of(group), 4096)))
        assert arena.plan is plan
        same = arena.report() == before
        assert_same(captured(x, ids), x * 3, "y of a replay after the failure")
        captured.close()
    return message, same


def test_failed_growth_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for the new plan every rank raises, and plan, generation, report and graphs are as before."""
    real = epbuf.generation._WINDOWS["local"]

    def window(nbytes: int, *rest: Any) -> Any:
        if nbytes >= plan_of(2, 4096).total_bytes:
            raise NativeError("no room")
        return real(nbytes, *rest)

    monkeypatch.setitem(epbuf.generation._WINDOWS, "local", window)
    assert virtual(2, _fails_to_grow) == [("no room", True)] * 2


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        pytest.param(plan_of(1, 48, num_experts=8), r"num_experts=4 .*plan 8", id="experts"),
        pytest.param(plan_of(1, 48, num_topk=2), r"num_topk=3 .*plan 2", id="topk"),
        pytest.param(plan_of(1, 48, hidden=32), r"hidden=16 .*plan 32", id="hidden"),
        pytest.param(plan_of(1, 48, save_recv=False, inference_only=True), r"save_recv=True .*plan False", id="save"),
        pytest.param(
            plan_of(1, 48, recv_policy="recompute"),
            r"recv_policy='keep' .*plan 'recompute'",
            id="recv_policy",
        ),
        pytest.param(plan_of(1, 28), r"recv_capacity_per_rank=32 .*plan 28", id="capacity"),
        pytest.param(plan_of(1, 48, num_frames=1), r"num_frames=2 .*plan 1", id="frames"),
        pytest.param(plan_of(1, 48, max_tokens_per_rank=8), r"max_tokens_per_rank=12 .*plan 8", id="tokens"),
        pytest.param(plan_of(1, 32), r"plan that the arena has.*=32", id="same"),
        pytest.param(48, r"Plan, found int", id="no_plan"),
    ],
)
def test_growth_to_another_layer_is_refused(plan: Any, says: str) -> None:
    """The message names the field and both values, and nothing has changed."""
    with open_arena() as arena:
        with pytest.raises(ConfigError, match=says):
            arena.grow(plan)
        assert arena.generation == 0
        x, ids = x_and_ids(arena)
        assert_same(echo(arena)(x[:FEW], ids[:FEW]), x[:FEW] * 3, "y afterwards")


def _disagree(rank: int, group: Any, other: Any) -> tuple[str, int]:
    kind = ConfigError if other is None else PlanMismatchError
    with open_arena(group) as arena:
        plan = plan_of(2, 64) if rank == 0 else other
        return raised(kind, lambda: arena.grow(plan)), arena.generation


def test_ranks_with_different_plans_all_raise(spread: Spread) -> None:
    """Whatever the plans are: one that no rank could take is still a mismatch for all."""
    for other, words in ((plan_of(2, 68), ("64", "68")), (plan_of(2, 64, num_topk=2), ("num_topk", "3", "2"))):
        for message, generation in spread(2, _disagree, other):
            assert all(word in message for word in words) and generation == 0
    (first, _), (second, _) = spread(2, _disagree, None)
    assert "found NoneType" in second and f"rank 1 refuses grow(): {second}" == first


def test_growth_takes_more_frames_and_longer_batches() -> None:
    """A plan may add frames and tokens; frames of leases opened before are those of the old memory."""
    with open_arena() as arena:
        held = arena.acquire(0)
        arena.grow(plan_of(1, 96, num_frames=3, max_tokens_per_rank=24))
        leases = [arena.acquire() for _ in range(3)]
        assert [lease.frame for lease in leases] == [0, 1, 2]
        for lease in (*leases[1:], held):
            lease.release()
        x, ids = x_and_ids(arena)
        x, ids = torch.cat((x, x)), torch.cat((ids, ids))
        assert_same(echo(arena)(x, ids), x * 3, "y of a longer batch")
        leases[0].release()


def test_leases_from_before_the_growth_follow_it_or_stay() -> None:
    """A lease whose dispatch needs room goes on in the newest memory; one whose rows fit stays where it is."""
    with open_arena(num_frames=3) as arena, arena.growing(), torch.no_grad():
        x, ids = x_and_ids(arena)
        leases = [arena.acquire() for _ in range(3)]
        ys = []
        for lease, rows in zip(leases, (TOKENS, TOKENS, FEW), strict=True):
            ys.append(epbuf.combine(lease, epbuf.dispatch(lease, x[:rows], ids[:rows]).tokens) / 3)
        assert [lease.arena.number for lease in leases] == [1, 1, 0]
        assert [lease.frame for lease in leases] == [0, 1, 2]
        for y in ys:
            assert_same(y, x[: len(y)], "y")
        for lease in leases:
            lease.release()
        assert arena.generation == 1


def test_one_block_grows_as_often_as_it_must() -> None:
    """New memory grows like the old, and what is watched after the growth finds the lease in its new place."""
    with open_arena() as arena, arena.growing(), torch.no_grad():
        x, ids = x_and_ids(arena)
        for generation, rows in enumerate((FEW, 11, TOKENS)):
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x[:rows], ids[:rows])
                with Watching():
                    y = epbuf.combine(lease, recv.tokens)
                del recv
            assert_same(y, x[:rows] * 3, f"y of {rows} tokens")
            assert arena.generation == generation


def test_growing_ends_with_its_block() -> None:
    """After the block dispatches drop rows and flag it, as before, in whatever generation."""
    with open_arena() as arena:
        x, ids = x_and_ids(arena)
        with arena.growing():
            pass
        with torch.no_grad(), arena.acquire() as lease:
            assert float(epbuf.dispatch(lease, x, ids).overflow) == 1
        with arena.growing():
            assert_same(echo(arena)(x, ids), x * 3, "y")
        assert arena.generation == 1 and arena.memory.grower is None


def test_growing_blocks_overlap_and_growth_ends_with_the_last() -> None:
    with open_arena() as arena:
        x, ids = x_and_ids(arena)
        first, second = arena.growing(), arena.growing()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert_same(echo(arena)(x, ids), x * 3, "y")
        second.__exit__(None, None, None)
        assert arena.generation == 1 and arena.memory.grower is None


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_watched_dispatch_cannot_grow() -> None:
    """Where the ops themselves run, as in compiled code, an overflow in growing() raises; the arena stays usable."""
    with open_arena() as arena:
        x, ids = x_and_ids(arena)
        with arena.growing(), pytest.raises(CapacityError, match=r"(?s)48 rows.*32.*eager"), Watching():
            echo(arena)(x, ids)
        assert arena.generation == 0
        assert_same(echo(arena)(x[:FEW], ids[:FEW]), x[:FEW] * 3, "y afterwards")


def _encoded(rank: int, group: Any, rows: int | None, save_recv: bool) -> list[Tensor]:
    """Run a round of mxfp8 rows both ways; the decoded rows below offs[-1], y and dx."""
    config = base_config(
        2, hidden=32, expert_alignment=4, recv_capacity_per_rank=rows, dispatch_payload="mxfp8",
        combine_grad_payload="mxfp8", save_recv=save_recv,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, 32, generator=generator).bfloat16().requires_grad_()
    ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % 4
    with epbuf.Arena.open(epbuf.Plan.build(config), group) as arena:
        with arena.growing(), arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, ids)
            decoded = torch.where(recv.row_mask()[:, None], recv.dequantize(), 0)
            y = epbuf.combine(lease, decoded * 2)
            found = [decoded[: int(recv.offs[-1])].detach().clone(), y.detach()]
        assert arena.generation == int(rows is not None)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        return [*found, x.grad]


@pytest.mark.parametrize("save_recv", [True, False], ids=["in_frame", "in_workspace"])
def test_encoded_rows_grow(save_recv: bool) -> None:
    """Data and scales of the new memory are those of an arena with room from the start, wherever they lie."""
    wide = virtual(2, _encoded, None, save_recv)
    assert len(wide[0][0]) > 16
    for found, want in zip(virtual(2, _encoded, 16, save_recv), wide, strict=True):
        for tensor, wanted in zip(found, want, strict=True):
            assert_same(tensor, wanted, "rows, y or dx")


def test_dispatch_in_inference_mode_may_grow() -> None:
    """What is then made is fit for training: the memory's tensors are none of inference mode."""
    with open_arena() as arena:
        x, ids = x_and_ids(arena)
        with arena.growing(), torch.inference_mode():
            echo(arena)(x, ids)
        assert arena.generation == 1 and not arena.region("recv_tokens").is_inference()
        leaf = x.clone().requires_grad_()
        with arena.acquire() as lease:
            y = epbuf.combine(lease, epbuf.dispatch(lease, leaf, ids).tokens)
        y.backward(torch.ones_like(y))
        assert leaf.grad is not None
        assert_same(leaf.grad, torch.full_like(x, 3.0), "dx")


def test_many_growths_leave_nothing_behind() -> None:
    """Handles, file descriptors and generations are as many after twenty growths as after one."""

    def count() -> tuple[int, int, int]:
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return len(_C.handle_objects()), descriptors, len(arena.report()["generations"])

    with open_arena() as arena:
        x, ids = (tensor[:FEW] for tensor in x_and_ids(arena))
        arena.grow(plan_of(1, 36))
        before = count()
        for number in range(20):
            echo(arena)(x, ids)
            arena.grow(plan_of(1, 40 + 4 * number))
        assert count() == before and arena.generation == arena.window_allocations - 1 == 21


def test_close_ends_every_generation() -> None:
    """Old memory that a lease still keeps is closed with the arena, and its views are dead."""
    with open_arena() as arena:
        held = arena.acquire()
        arena.grow(plan_of(1, 48))
        segment = weakref.ref(arena._older[0].window._segments[0])
    with pytest.raises(LeaseError, match="closed"):
        _ = held.recv_tokens
    gc.collect()
    assert segment() is None


def _leaves(rank: int, group: Any) -> str:
    """Grow with a lease on the old memory; rank 1 leaves by an exception, and rank 0 waits for it there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            with open_arena(group) as arena:
                held = arena.acquire()
                arena.grow(plan_of(2, 64))
                if rank == 1:
                    raise KeyError("rank 1")
                x, ids = x_and_ids(arena)
                with pytest.raises(PeerTimeoutError, match="rank 1 abandoned"):
                    epbuf.dispatch(held, x[:FEW], ids[:FEW])
                assert arena.poisoned
                held.release()
    except KeyError:
        return "left"
    return "closed"


def test_rank_that_leaves_a_grown_arena_is_named() -> None:
    assert virtual(2, _leaves) == ["closed", "left"]


def test_step_over_two_arenas_names_the_one_that_overflowed() -> None:
    """Its own replays only, and the capacity of the arena that was too small."""
    with open_arena() as first, open_arena(tight=False) as second:
        x, ids = x_and_ids(first)
        few = torch.where(torch.arange(TOKENS)[:, None] < FEW, ids, -1)

        def step(x: Tensor, ids: Tensor) -> Tensor:
            return echo(first)(x, ids) + echo(second)(x, ids)

        captured = epbuf.CapturedStep.capture((first, second), step, (x, few), on_overflow="raise")
        with torch.no_grad(), second.acquire(1) as lease:
            epbuf.dispatch(lease, x, ids)
        captured(x, ids)
        assert float(captured.overflow) == 1
        with pytest.raises(CapacityError, match=r"1 replay\(s\).*48 rows on a rank and recv_capacity_per_rank is 32:"):
            captured(x, few)
        assert_same(captured(x, few)[:FEW], x[:FEW] * 6, "y of the next replay")
        assert float(captured.overflow) == 0
        captured.check()
        assert_same(captured(x, ids).clone() * 0, x * 0, "y of an overflow that is run again")
        assert_same(captured.rerun(), x * 6, "y of the run in arenas with room")
        assert (first.generation, second.generation) == (1, 0)
        captured.close()


@pytest.mark.parametrize("call", ["grow", "growing", "save_capacity", "rerun", "report_table"])
def test_growth_is_refused_while_capturing(call: str, tmp_path: Path) -> None:
    """Nothing of it can be captured: CaptureError, with the place of the capture, and the arena is as it was."""
    with open_arena() as arena:
        x, ids = (tensor[:FEW] for tensor in x_and_ids(arena))
        other = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        calls: dict[str, Callable[[], object]] = {
            "grow": lambda: arena.grow(plan_of(1, 48)),
            "growing": lambda: arena.growing().__enter__(),
            "save_capacity": lambda: arena.save_capacity(tmp_path / "capacity.json"),
            "rerun": other.rerun,
            "report_table": arena.report_table,
        }

        def step(x: Tensor, ids: Tensor) -> Tensor:
            y = echo(arena)(x, ids)
            calls[call]()
            return y

        with pytest.raises(CaptureError, match=rf"(?s)(report|{call}).*test_growth\.py:\d+"):
            epbuf.CapturedStep.capture(arena, step, (x, ids))
        assert arena.generation == 0 and arena.memory.grower is None and list(tmp_path.iterdir()) == []
        assert_same(other(x, ids), x * 3, "y of a replay afterwards")
        other.close()


def test_growth_of_a_closed_arena_is_refused() -> None:
    with open_arena() as arena:
        pass
    for call in (lambda: arena.grow(plan_of(1, 48)), lambda: arena.growing().__enter__()):
        with pytest.raises(LeaseError, match="closed"):
            call()


def test_closed_step_is_not_run_again() -> None:
    with open_arena() as arena:
        x, ids = (tensor[:FEW] for tensor in x_and_ids(arena))
        captured = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        captured.close()
        with pytest.raises(CaptureError, match=r"(?s)test_growth\.py.*closed"):
            captured.rerun()


def test_skip_needs_optimisers_that_take_found_inf() -> None:
    """One that would change weights all the same is refused, and so is one whose found_inf is the caller's."""
    with open_arena() as arena:
        x, ids = (tensor[:FEW] for tensor in x_and_ids(arena))
        plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        owned = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, fused=True)
        owned.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        for optimizer, says in ((plain, "SGD without.*fused=True"), (owned, "found_inf.*SGD has one of yours")):
            with pytest.raises(ConfigError, match=says):
                epbuf.CapturedStep.capture(arena, echo(arena), (x, ids), restore=(optimizer,), on_overflow="skip")


def test_callback_may_run_the_step_again() -> None:
    """A callback that reruns makes the next call say that the graph is stale; values are those of the wide arena."""
    outputs, generations = [], []

    def step(x: Tensor, ids: Tensor) -> Tensor:
        generations.append(arena.generation)
        return echo(arena)(x, ids)

    with open_arena() as arena:
        x, ids = x_and_ids(arena)
        few = torch.where(torch.arange(TOKENS)[:, None] < FEW, ids, -1)
        captured = epbuf.CapturedStep.capture(
            arena, step, (x, few), on_overflow=lambda step: outputs.append(step.rerun())
        )
        captured(x, ids)
        with pytest.raises(StaleGraphError):
            captured(x, few)
        captured.close()
        assert arena.capacity_rows == arena.demand_peak_rows() == 48
    [y] = outputs
    assert generations == [0, 0, 0, 0, 1], "the arena grew to the known demand before the step ran again"
    assert_same(y, x * 3, "y of the callback's run")


def test_report_is_plain_data_about_every_byte_and_claim() -> None:
    """Bytes of the classes add up to the window; claims, holders and peaks stand with their frames."""
    with open_arena() as arena:
        x, ids = (tensor[:FEW] for tensor in x_and_ids(arena))
        captured = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        captured(x, ids)
        lease = arena.acquire(1)
        report = arena.report()
        assert json.loads(json.dumps(report)) == report
        assert sum(report["bytes_by_class"].values()) == report["window_bytes"] == arena.plan.total_bytes
        assert set(report["bytes_by_class"]) == {"arena", "frame", "forward", "backward"}
        first, second = report["frames"]
        assert (len(first["held_by"]), first["claims"], first["demand_peak_rows"]) == (1, [], 24)
        assert [claim["kind"] for claim in second["claims"]] == ["lease"] and second["held_by"] == []
        assert "test_growth.py" in second["claims"][0]["where"]
        assert report["staged_bytes"] == 4 * 24 * HIDDEN * 4, "two warm-ups, the capture and a replay stage 24 rows"
        arena.grow(plan_of(1, 48))
        after = arena.report()
        assert [after[name] for name in ("staged_bytes", "demand_peak_rows")] == [report["staged_bytes"], 24]
        assert [part["capacity_rows"] for part in after["generations"]] == [32, 48]
        captured.close()
        lease.release()
        last = arena.report()
        assert len(last["generations"]) == 1
        assert [last[name] for name in ("staged_bytes", "demand_peak_rows")] == [report["staged_bytes"], 24]


def test_report_table_names_every_user() -> None:
    """What is printed has the places of claims and captures, unbroken in a wide console, and says what is stale."""
    with open_arena() as arena:
        x, ids = (tensor[:FEW] for tensor in x_and_ids(arena))
        captured = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        lease = arena.acquire(1)
        arena.grow(plan_of(1, 48))
        console = Console(width=400, file=io.StringIO())
        console.print(arena.report_table())
        text = console.file.getvalue()  # type: ignore[attr-defined]
        for part in ("lease since", "held by the graph captured at", "stale", "arena", "backward", "48"):
            assert part in text, part
        assert text.count("test_growth.py") >= 5
        captured.close()
        lease.release()


def test_command_line_shows_a_saved_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables of a file with a report in it; any other file is one message and status 2."""
    path = tmp_path / "report.json"
    with open_arena() as arena, arena.acquire(1):
        path.write_text(json.dumps(arena.report()))
    for text, status in ((path.read_text(), 0), ("{}", 2), ("[", 2), ("3", 2)):
        path.write_text(text)
        with pytest.raises(SystemExit) as caught:
            cli.main(["report", str(path)])
        assert int(caught.value.code or 0) == status
        output = capsys.readouterr()
        assert ("lease since" in output.out) == (status == 0) and ("report.json" in output.err) == (status == 2)


def test_capacity_is_saved_and_loaded(tmp_path: Path) -> None:
    """What one run has grown to is what the next one begins with."""
    path = tmp_path / "capacity.json"
    with open_arena() as arena:
        x, ids = x_and_ids(arena)
        with arena.growing():
            echo(arena)(x, ids)
        arena.save_capacity(path)
        grown, config = arena.capacity_rows, plan_of(1, 32).config
    assert [file.name for file in tmp_path.iterdir()] == ["capacity.json"]
    assert json.loads(path.read_text())["demand_peak_rows"] == grown == 48
    plan = epbuf.Plan.build(growth.load_capacity(path, config))
    assert plan.capacity_rows == 48 and plan.config.hidden == HIDDEN
    assert growth.load_capacity(path, plan_of(1, capacity_factor=2.0).config).capacity_factor is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "no capacity file.*delete", id="empty"),
        pytest.param('{"format": "epbuf cap', "no capacity file.*delete", id="cut"),
        pytest.param("[1, 2]", "found format 'list'.*'epbuf capacity 1'", id="list"),
        pytest.param('{"model": "x"}', "found format None", id="foreign"),
        pytest.param('{"format": "epbuf capacity 2"}', "found format 'epbuf capacity 2'", id="newer"),
        pytest.param('{"format": "epbuf capacity 1", "capacity_rows": 48}', "damaged.*learned_for=None", id="half"),
        pytest.param(
            '{"format": "epbuf capacity 1", "capacity_rows": 48, "learned_for": {}}',
            "demand_peak_rows=None",
            id="demand",
        ),
        pytest.param("[" * 100_000, "no capacity file.*delete", id="deep"),
        pytest.param(
            '{"format": "epbuf capacity 1", "capacity_rows": "48", "learned_for": {}}', "damaged.*'48'", id="kind"
        ),
    ],
)
def test_foreign_or_damaged_capacity_file(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "capacity.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)capacity\.json.*{says}"):
        growth.load_capacity(path, plan_of(1, 32).config)


def test_demand_that_was_not_grown_to_is_loaded(tmp_path: Path) -> None:
    """Steps that skipped an overflow have learned, too."""
    path = tmp_path / "capacity.json"
    with open_arena() as arena:
        x, ids = x_and_ids(arena)
        with torch.no_grad(), arena.acquire() as lease:
            assert float(epbuf.dispatch(lease, x, ids).overflow) == 1
        arena.save_capacity(path)
        assert arena.capacity_rows < 48
    assert growth.load_capacity(path, plan_of(1, 32).config).recv_capacity_per_rank == 48


def test_capacity_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the path, and nothing is left beside it."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "none" / "c.json"):
        with pytest.raises(ConfigError, match=rf"{path} cannot be written"):
            growth.save_capacity(path, plan_of(1, 32), 32)
    assert [file.name for file in tmp_path.rglob("*")] == ["folder"]


def test_capacity_too_large_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    growth.save_capacity(path, plan_of(1, 32), 2**40)
    with pytest.raises(ConfigError, match=r"c\.json has a capacity that no config takes: .*recv_capacity_per_rank"):
        growth.load_capacity(path, plan_of(1, 32).config)


def test_capacity_of_other_sizes_is_refused(tmp_path: Path) -> None:
    growth.save_capacity(tmp_path / "c.json", plan_of(2, 64), 64)
    with pytest.raises(ConfigError, match=r"num_ranks=2 and the config has 1"):
        growth.load_capacity(tmp_path / "c.json", plan_of(1, 32).config)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no capacity file"):
        growth.load_capacity(tmp_path / "bytes.json", plan_of(1, 32).config)
    with pytest.raises(FileNotFoundError):
        growth.load_capacity(tmp_path / "none.json", plan_of(1, 32).config)
