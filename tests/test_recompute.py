"""recv_policy "recompute" and "stash": received rows come back for the experts' backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Pool, raised, virtual
from rounds import Inputs, draw_inputs
from routings import Case, named_case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import epbuf
from epbuf.errors import ConfigError, LeaseError

ROUTINGS = ("some_negative", "one_rank_without_tokens", "one_row_over", "num_tokens_int64", "no_tokens")
SEEN = [(2, "some_negative"), (2, "one_row_over"), (2, "num_tokens_int64")]  # some rows arrive, for certain
NUM_LAYERS = 3
POLICIES = ("recompute", "stash", ("stash", "keep", "recompute"), ("keep", "recompute", "stash"))
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p if isinstance(p, str) else "-".join(p))
Spread = Callable[..., list[Any]]


def open_arena(
    case: Case, group: Any, policy: Any, num_frames: int = NUM_LAYERS, *, device: str = "cpu", window: str = "auto"
) -> epbuf.Arena:  # fmt: skip
    plan = epbuf.Plan.build(case.config, epbuf.Schedule(num_frames), recv_policy=policy)
    return epbuf.Arena.open(plan, None if window == "local" else group, device=device, window=window)


def experts_of(arena: epbuf.Arena, layer: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * layer + arena.rank)
    shape = arena.plan.num_local_experts, arena.plan.config.hidden, arena.plan.config.hidden
    return torch.randint(-1, 2, shape, generator=generator).to(arena.device, arena.token_dtype).requires_grad_()


def run_layer(
    arena: epbuf.Arena, x: Tensor, inputs: Inputs, weights: Tensor, experts: Tensor, frame: int | None = None
) -> Tensor:  # fmt: skip
    """Run one layer on a lease of its own."""
    with arena.acquire(frame) as lease:
        return run_experts(lease, x, inputs, weights, experts)


def run_experts(lease: epbuf.Lease, x: Tensor, inputs: Inputs, weights: Tensor, experts: Tensor) -> Tensor:
    """Run one layer whose weight gradient reads received rows, zone by zone."""
    recv = epbuf.dispatch(lease, x, inputs.topk_idx, weights, num_tokens=inputs.num_tokens)
    row = torch.arange(len(recv.tokens), device=x.device)
    zone = torch.searchsorted(recv.offs, row, right=True).clamp(max=len(recv.offs) - 1)
    rows = recv.tokens.where(recv.row_mask()[:, None], 0.0)
    return epbuf.combine(lease, torch.einsum("ch,chi->ci", rows, experts[zone]), topk_weights=recv.topk_weights)


def gradients(
    rank: int, group: Any, case: Case, policy: Any, num_steps: int = 2, device: str = "cpu", window: str = "auto"
) -> list[Tensor]:  # fmt: skip
    """Return the results of the last of some steps of three layers that share one workspace."""
    inputs = draw_inputs(case, rank, True, device)
    with open_arena(case, group, policy, device=device, window=window) as arena:
        experts = [experts_of(arena, layer) for layer in range(NUM_LAYERS)]
        for _ in range(num_steps):
            x, weights = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone().requires_grad_()
            y = x
            for layer in range(NUM_LAYERS):
                y = run_layer(arena, y, inputs, weights, experts[layer], layer)
            found = torch.autograd.grad(y, [x, weights, *experts], inputs.dy)
        return [part.detach().cpu() for part in (y, *found)]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@each_policy
@pytest.mark.usefixtures("form")
def test_gradients_equal_those_of_kept_rows(policy: Any, num_ranks: int, routing: str) -> None:
    """Three layers over one workspace, two steps: y and every gradient, to the bit."""
    case = named_case(routing, num_ranks, 16, "fp32")
    kept = virtual(num_ranks, gradients, case, "keep")
    if (num_ranks, routing) in SEEN:
        assert all(any(rank[part].abs().sum() > 0 for rank in kept) for part in range(len(kept[0])))
    for got, want in zip(virtual(num_ranks, gradients, case, policy), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@each_policy
def test_gradients_on_processes(pool: Pool, policy: Any) -> None:
    """The same on four processes."""
    case = named_case("some_negative", 4, 16, "bf16")
    kept = pool.run(4, gradients, case, "keep")
    for got, want in zip(pool.run(4, gradients, case, policy), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_plan_has_one_receive_region_per_workspace() -> None:
    """Rows leave the frames: the window shrinks by them, and the fingerprint and the description say so."""
    config = named_case("balanced", 2, 16, "bf16").config
    kept = epbuf.Plan.build(config, epbuf.Schedule(NUM_LAYERS))
    plan = epbuf.Plan.build(config, epbuf.Schedule(NUM_LAYERS), recv_policy=["recompute"] * NUM_LAYERS)
    region = plan.region("recv_tokens")
    assert [r.lifetime for r in plan.regions if r.name == "recv_tokens"] == ["forward"]
    assert kept.total_bytes - plan.total_bytes == (NUM_LAYERS - 1) * region.nbytes
    assert plan.fingerprint != kept.fingerprint and "recompute" in str(plan)


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ("drop", {}, "recv_policy takes 'keep', 'stash' or 'recompute'"),
        ([], {}, "one of them per layer"),
        (None, {}, "one of them per layer, found None"),
        ({"keep", "stash"}, {}, "one of them per layer, found {"),
        (["keep", "recompute"], {}, r"2 word\(s\) and Schedule.sequential\(num_layers=1\) has 1 layer"),
        ("recompute", {"inference_only": True}, "inference_only=True plans none"),
        ("stash", {"inference_only": True}, "inference_only=True plans none"),
        (
            "stash",
            {"dispatch_payload": "mxfp8", "hidden": 32, "save_recv": False, "alias": (("recv_tokens", "expert_out"),)},
            "the experts overwrite them before",
        ),
    ],
)
def test_policies_that_cannot_be_planned(words: Any, options: dict[str, Any], message: str) -> None:
    config = named_case("balanced", 1, 16, "bf16", **options).config
    with pytest.raises(ConfigError, match=message):
        epbuf.Plan.build(config, recv_policy=words)


def test_acquire_names_the_policy_of_the_plan() -> None:
    """acquire(recv_policy=) takes the plan's word and refuses another, with both."""
    with open_arena(named_case("balanced", 1), None, "recompute") as arena:
        arena.acquire(recv_policy="recompute").release()
        with pytest.raises(ConfigError, match=r"'keep'.*'recompute'"):
            arena.acquire(recv_policy="keep")


def eager_and_replayed(
    rank: int, group: Any, case: Case, policy: Any, device: str = "cpu", window: str = "auto"
) -> list[tuple[list[Tensor], list[Tensor]]]:  # fmt: skip
    """Return, for three batches, what an eager step and a replay gave."""
    inputs = draw_inputs(case, rank, True, device)

    def step(x: Tensor, weights: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = x
        for layer in range(NUM_LAYERS):
            y = run_layer(arena, y, inputs, weights, experts[layer], layer)
        return [y.detach(), *torch.autograd.grad(y, [x, *experts], inputs.dy)]

    with open_arena(case, group, policy, device=device, window=window) as arena:
        experts = [experts_of(arena, layer) for layer in range(NUM_LAYERS)]
        batches = [(inputs.x * (1 + number), inputs.topk_weights + number) for number in range(3)]
        eager = [[part.cpu() for part in step(*batch)] for batch in batches]
        captured = epbuf.CapturedStep.capture(arena, step, batches[2])
        replayed = [[part.clone().cpu() for part in captured(*batch)] for batch in batches]
        assert arena.window_allocations == 1
        captured.close()
    return list(zip(eager, replayed, strict=True))


@each_policy
@pytest.mark.usefixtures("form")
def test_replays_equal_eager_steps(policy: Any) -> None:
    """Of rows that come back, and of rows that are kept."""
    case = named_case("some_negative", 2, 16, "fp32")
    kept = virtual(2, eager_and_replayed, case, "keep")
    for rounds, want in zip(virtual(2, eager_and_replayed, case, policy), kept, strict=True):
        for (eager, replayed), (wanted, _) in zip(rounds, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(replayed, wanted, strict=True))


def _checkpointed(rank: int, group: Any, case: Case, policy: Any, use_reentrant: bool) -> list[Tensor]:
    inputs = draw_inputs(case, rank, True)
    with open_arena(case, group, policy) as arena:
        experts = [experts_of(arena, layer) for layer in range(NUM_LAYERS)]
        y = x = inputs.x.clone().requires_grad_()
        for layer in range(NUM_LAYERS):
            y = checkpoint(
                run_layer, arena, y, inputs, inputs.topk_weights, experts[layer], layer, use_reentrant=use_reentrant
            )
        if use_reentrant:
            y.backward(inputs.dy)
            return [x.grad, *(each.grad for each in experts)]
        return list(torch.autograd.grad(y, [x, *experts], inputs.dy))


@pytest.mark.parametrize("policy", ["keep", "recompute", "stash", ("stash", "keep", "recompute")])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "plain"])
def test_with_activation_checkpointing(use_reentrant: bool, policy: Any) -> None:
    """Weighted layers that are checkpointed give the same gradients, whichever pass their frames come from."""
    case = named_case("some_negative", 2, 16, "fp32")
    kept = virtual(2, gradients, case, "keep", 1)
    for got, want in zip(virtual(2, _checkpointed, case, policy, use_reentrant), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, [want[1], *want[3:]], strict=True))


def _backward_meanwhile(rank: int, group: Any, case: Case, policy: str) -> str:
    inputs = draw_inputs(case, rank, True)
    with open_arena(case, group, policy, num_frames=2) as arena:
        x = inputs.x.clone().requires_grad_()
        y = run_layer(arena, x, inputs, inputs.topk_weights, experts_of(arena, 0))
        with arena.acquire() as lease:
            epbuf.dispatch(lease, inputs.x, case.topk_idx[rank])
            return raised(LeaseError, lambda: torch.autograd.grad(y, x, inputs.dy))


@pytest.mark.parametrize("policy", ["recompute", "stash"])
def test_a_workspace_that_another_frame_has_is_named(policy: str) -> None:
    """Rows can come back only where they came from: a backward between a dispatch and its combine says who is there."""
    for message in virtual(2, _backward_meanwhile, named_case("some_negative", 2, 16, "fp32"), policy):
        assert "frame 0 needs a forward workspace" in message and "by frame(s) [1]" in message


def _changed(rank: int, group: Any, case: Case) -> str:
    inputs = draw_inputs(case, rank, True)
    with open_arena(case, group, "recompute") as arena:
        x = inputs.x.clone()
        y = run_layer(arena, x, inputs, inputs.topk_weights, experts_of(arena, 0))
        x.add_(1)
        return raised(RuntimeError, lambda: y.backward(inputs.dy))


def test_tokens_that_changed_meanwhile_are_refused() -> None:
    """x is sent again in backward: autograd finds that it was changed in place."""
    for message in virtual(1, _changed, named_case("some_negative", 1, 16, "fp32")):
        assert "modified by an inplace operation" in message


def _compiled(rank: int, group: Any, case: Case, policy: str) -> str:
    inputs = draw_inputs(case, rank, True)
    with open_arena(case, group, policy, num_frames=1) as arena:

        def layer(lease: epbuf.Lease, x: Tensor) -> Tensor:
            recv = epbuf.dispatch(lease, x, case.topk_idx[rank])
            return epbuf.combine(lease, recv.tokens * 2)

        with arena.acquire() as lease:
            return raised(Exception, lambda: torch.compile(layer, fullgraph=True)(lease, inputs.x))


@pytest.mark.parametrize("policy", ["recompute", "stash"])
def test_compiled_layers_are_refused(pool: Pool, policy: str) -> None:
    """Compiled code would read the rows of the first dispatch, which are gone: it is told so while it is traced."""
    case = named_case("some_negative", 1, 16, "fp32")
    message = pool.run(1, _compiled, case, policy, limit_s=120)[0]
    assert f'recv_policy="{policy}" inside torch.compile' in message


def _scaled(rank: int, group: Any, case: Case, policy: str) -> list[Tensor]:
    inputs = draw_inputs(case, rank, True)
    x, weights = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone()
    with open_arena(case, group, policy) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, inputs.topk_idx, weights)
        recv.topk_weights.detach().mul_(2)  # the frame's own: a second dispatch must not bring the old ones back
        rows = recv.tokens.where(recv.row_mask()[:, None], 0.0) * recv.topk_weights.detach()[:, None]
        y = epbuf.combine(lease, rows)
        return [y.detach(), *torch.autograd.grad(y, x, inputs.dy), lease.recv_topk_weights.clone()]


@pytest.mark.parametrize("policy", ["recompute", "stash"])
def test_weights_that_the_user_changed_stay_changed(policy: str) -> None:
    case = named_case("some_negative", 2, 16, "fp32")
    kept = virtual(2, _scaled, case, "keep")
    for got, want in zip(virtual(2, _scaled, case, policy), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True))
        assert torch.equal(got[2].nan_to_num(), want[2].nan_to_num())


def _early_loss(rank: int, group: Any, case: Case, policy: str) -> list[Tensor]:
    inputs = draw_inputs(case, rank, True)
    x = inputs.x.clone().requires_grad_()
    with open_arena(case, group, policy) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, inputs.topk_idx)
        (dx,) = torch.autograd.grad(recv.tokens, x, inputs.grad_recv_tokens, retain_graph=True)
        return [dx, epbuf.combine(lease, recv.tokens.detach() * 2).detach()]


@pytest.mark.parametrize("policy", ["recompute", "stash"])
def test_a_backward_before_combine_leaves_the_workspace(policy: str) -> None:
    """A loss on received rows runs dispatch's backward first: combine still finds its workspace."""
    case = named_case("some_negative", 2, 16, "fp32")
    kept = virtual(2, _early_loss, case, "keep")
    for got, want in zip(virtual(2, _early_loss, case, policy), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _refused(rank: int, group: Any, case: Case, policy: str) -> tuple[str, list[Tensor]]:
    inputs = draw_inputs(case, rank, True)
    with open_arena(case, group, policy) as arena:
        experts, x = experts_of(arena, 0), inputs.x.clone().requires_grad_()
        y = run_layer(arena, x, inputs, inputs.topk_weights, experts)
        if rank == 1:
            arena.book.claim_workspace(2, "forward", 0)
        message = raised(LeaseError, lambda: torch.autograd.grad(y, [x, experts], inputs.dy, retain_graph=True))
        if rank == 1:
            arena.book.end_workspace(2, "forward")
        return message, list(torch.autograd.grad(y, [x, experts], inputs.dy))


@pytest.mark.parametrize("policy", ["recompute", "stash"])
@pytest.mark.usefixtures("form")
def test_a_backward_that_is_refused_may_be_tried_again(policy: str) -> None:
    """One rank's workspace is taken: all ranks raise and name it, nobody waits, and the retry gives the gradients."""
    case = named_case("some_negative", 2, 16, "fp32")
    kept = virtual(2, _once, case, "keep")
    for (message, got), want in zip(virtual(2, _refused, case, policy), kept, strict=True):
        assert "rank 1" in message or "forward workspace" in message
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _once(rank: int, group: Any, case: Case, policy: str) -> list[Tensor]:
    inputs = draw_inputs(case, rank, True)
    with open_arena(case, group, policy) as arena:
        experts, x = experts_of(arena, 0), inputs.x.clone().requires_grad_()
        y = run_layer(arena, x, inputs, inputs.topk_weights, experts)
        return list(torch.autograd.grad(y, [x, experts], inputs.dy))


def _versions(rank: int, group: Any, case: Case, policy: str) -> tuple[int, int, int]:
    inputs = draw_inputs(case, rank, True)
    with open_arena(case, group, policy) as arena:
        experts, region = experts_of(arena, 0), arena.region("recv_tokens")

        def forward(frame: int) -> tuple[Tensor, Tensor, int]:
            x = inputs.x.clone().requires_grad_()
            return x, run_layer(arena, x, inputs, inputs.topk_weights, experts, frame), region._version

        (x, y, _), (other_x, other_y, latest) = forward(0), forward(1)
        torch.autograd.grad(y, [x, experts], inputs.dy)
        restored = region._version
        *_, fresh = forward(0)
        torch.autograd.grad(other_y, [other_x, experts], inputs.dy)
        return restored, latest, fresh


@pytest.mark.parametrize("policy", ["recompute", "stash"])
def test_no_version_is_given_twice(policy: str) -> None:
    """Rows that come back set the region's version back; the next dispatch gets one above all that were saved."""
    for restored, latest, fresh in virtual(2, _versions, named_case("some_negative", 2, 16, "fp32"), policy):
        assert restored < latest < fresh
