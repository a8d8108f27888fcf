"""Activation checkpoints of every kind: the gradients of a step without, and every frame free again."""

from __future__ import annotations

import functools
import gc
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Pool, raised, virtual
from rounds import Inputs, draw_inputs
from routings import Case, named_case
from test_compile import COMPILE_LIMIT_S
from test_recompute import NUM_LAYERS, experts_of, open_arena, run_experts, run_layer
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epbuf
from epbuf.errors import EpbufError, LeaseError
from epbuf.ops import COMBINE, DISPATCH, ROUTE

Layer = Callable[..., Tensor]


again = partial(checkpoint, preserve_rng_state=False)  # the generators of CUDA cannot be read in a capture


def saving(*ops: Any, layer: Layer = run_layer) -> Layer:
    """Checkpoint a layer and save what these ops give."""
    contexts = partial(create_selective_checkpoint_contexts, list(ops))
    return partial(again, layer, use_reentrant=False, context_fn=contexts)


MODES: dict[str, Layer] = {
    "without": run_layer,
    "reentrant": partial(again, run_layer, use_reentrant=True),
    "non_reentrant": partial(again, run_layer, use_reentrant=False),
    "selective": saving(ROUTE),
    "experts_only": saving(ROUTE, DISPATCH, COMBINE),
    "nothing_of_ours": saving(torch.ops.aten.where.self),
}
CLAIMS = {"without": 2, "reentrant": 4, "non_reentrant": 4, "selective": 2, "experts_only": 2, "nothing_of_ours": 4}
"""Claims that a layer makes in a step: a lease and a ticket for each time that it is routed."""


def steps(
    rank: int, group: Any, case: Case, mode: str, num_steps: int = 100, policy: str = "keep", device: str = "cpu",
    window: str = "auto",
) -> list[list[Tensor]]:  # fmt: skip
    """Run steps of three layers on three frames; return what each of them gave, with nothing left behind."""

    def forward(batch: Batch, experts: list[Tensor]) -> Tensor:
        y = batch.x
        for each in experts:
            y = MODES[mode](arena, y, batch.inputs, batch.weights, each)
        return y

    with open_arena(case, group, policy, NUM_LAYERS, device=device, window=window) as arena:
        results = _train(arena, forward, draw_inputs(case, rank, True, device), case, num_steps)
        assert arena.book.newest_serial() == CLAIMS[mode] * NUM_LAYERS * num_steps
    return results


class Batch:
    """What one step gets: a routing and values that are not those of the last one."""

    def __init__(self, inputs: Inputs, number: int, case: Case) -> None:
        ids = torch.where(inputs.topk_idx < 0, -1, (inputs.topk_idx + number) % case.config.num_experts)
        self.x = (inputs.x + number % 3).requires_grad_()
        self.weights = (inputs.topk_weights + number % 2).requires_grad_()
        self.inputs = Inputs(**{**vars(inputs), "topk_idx": ids})


def _train(
    arena: epbuf.Arena, forward: Callable[[Batch, list[Tensor]], Tensor], inputs: Inputs, case: Case, num_steps: int
) -> list[list[Tensor]]:
    """Run steps without the garbage collector; return copies of y and all gradients of each."""
    experts = [experts_of(arena, layer) for layer in range(NUM_LAYERS)]
    results = []
    gc.collect()
    gc.disable()
    try:
        for number in range(num_steps):
            batch = Batch(inputs, number, case)
            y = forward(batch, experts)
            leaves = [batch.x, batch.weights, *experts]
            for leaf in leaves:
                leaf.grad = None
            y.backward(inputs.dy)
            results.append([part.detach().clone().cpu() for part in (y, *(leaf.grad for leaf in leaves))])
            del batch, y, leaves
    finally:
        gc.enable()
    assert_nothing_claimed(arena)
    return results


def assert_nothing_claimed(arena: epbuf.Arena) -> None:
    """On CUDA the thread that ran a backward lets go of its last ticket a moment after."""
    deadline = time.monotonic() + 1
    while list(arena.book.claims()) and arena.device.type == "cuda" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(arena.book.claims()) == []


def assert_equal_steps(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    """Compare what all steps of a rank gave, bit by bit."""
    for number, (mine, plain) in enumerate(zip(got, want, strict=True)):
        for part, (a, b) in enumerate(zip(mine, plain, strict=True)):
            assert torch.equal(a, b), f"result {part} of step {number}"


@functools.cache
def without(num_ranks: int) -> tuple[Case, list[list[list[Tensor]]]]:
    """Return a case and what a hundred steps without checkpoints give."""
    case = named_case("some_negative", num_ranks, 16, "fp32")
    return case, virtual(num_ranks, steps, case, "without")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "without"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hundred_steps_on_a_frame_per_layer(num_ranks: int, mode: str) -> None:
    """Every result of every step equals to the bit that of a step without checkpoints, and no claim is left."""
    case, plain = without(num_ranks)
    for got, want in zip(virtual(num_ranks, steps, case, mode), plain, strict=True):
        assert_equal_steps(got, want)


@pytest.mark.parametrize("policy", ["recompute", "stash"])
@pytest.mark.parametrize("mode", ["selective", "nothing_of_ours"])
def test_rows_that_are_not_kept_come_back(mode: str, policy: str) -> None:
    """Rows that the experts' backward reads come back, whichever pass they came from."""
    case, plain = without(2)
    for got, want in zip(virtual(2, steps, case, mode, 3, policy), plain, strict=True):
        assert_equal_steps(got, want[:3])


def _of_policy(
    arena: epbuf.Arena, policy: Any, x: Tensor, inputs: Inputs, weights: Tensor, experts: Tensor
) -> Tensor:  # fmt: skip
    with arena.acquire(recv_policy=policy) as lease:
        y = run_experts(lease, x, inputs, weights, experts)
        assert arena.policies[lease.frame] == policy
        return y


def _mixed(rank: int, group: Any, case: Case, layer: Layer) -> list[list[Tensor]]:
    policies = ("keep", "recompute", "stash")

    def forward(batch: Batch, experts: list[Tensor]) -> Tensor:
        y = batch.x
        for policy, each in zip(policies, experts, strict=True):
            y = layer(arena, policy, y, batch.inputs, batch.weights, each)
        return y

    with open_arena(case, group, policies) as arena:
        return _train(arena, forward, draw_inputs(case, rank, True), case, 3)


@pytest.mark.parametrize("saved", [ROUTE, torch.ops.aten.where.self], ids=["route", "nothing_of_ours"])
def test_both_passes_take_frames_of_the_policy(saved: Any) -> None:
    """Where layers differ the second pass has a frame of the policy that was asked for, its own or the saved one."""
    case, plain = without(2)
    for got, want in zip(virtual(2, _mixed, case, saving(saved, layer=_of_policy)), plain, strict=True):
        assert_equal_steps(got, want[:3])


def _pages(rank: int, group: Any, case: Case, layer: Layer) -> int:
    def forward(batch: Batch, experts: list[Tensor]) -> Tensor:
        y = batch.x
        for each in experts:
            y = layer(arena, y, batch.inputs, batch.weights, each)
        return y

    with open_arena(case, group, "stash") as arena:
        _train(arena, forward, draw_inputs(case, rank, True), case, 3)
        assert int(arena.region("stash_counters")[1]) == 0  # the backward has given all pages back
        return arena.stash_peak_rows()


def test_second_pass_takes_the_pages_of_the_first() -> None:
    """A dispatch that is repeated wants no more pages than one that is not."""
    case = named_case("some_negative", 2, 16, "fp32")
    peaks = virtual(2, _pages, case, run_layer)
    assert min(peaks) > 0
    assert virtual(2, _pages, case, saving(ROUTE)) == peaks


def _refused(rank: int, group: Any, case: Case, layer: Layer, policy: str) -> str:
    with open_arena(case, group, policy) as arena:
        batch, experts = Batch(draw_inputs(case, rank, True), 0, case), experts_of(arena, 0)
        y = layer(arena, batch.x, batch.inputs, batch.weights, experts)
        message = raised(LeaseError, y.sum().backward)
        del y
        assert list(arena.book.claims()) == []
        return message


@pytest.mark.parametrize(
    ("saved", "policy", "says"),
    [
        pytest.param((ROUTE, DISPATCH, COMBINE), "recompute", "ROUTE alone", id="rows_are_gone"),
        pytest.param((ROUTE, DISPATCH, COMBINE), "stash", "ROUTE alone", id="rows_are_stashed"),
        pytest.param((ROUTE, COMBINE), "stash", "the combine and not its dispatch", id="stash_is_not_filled"),
        pytest.param((ROUTE, DISPATCH), "keep", "save all three ops", id="combine_is_not_saved"),
        pytest.param((DISPATCH, COMBINE), "keep", "the dispatch and not its route", id="route_is_not_saved"),
        pytest.param((ROUTE, COMBINE), "keep", "the combine and not its dispatch", id="dispatch_is_not_saved"),
    ],
)
def test_what_cannot_be_saved_alone_is_refused(saved: tuple[Any, ...], policy: str, says: str) -> None:
    """The second pass raises on every rank and says what to save, and nothing stays claimed."""
    case = named_case("some_negative", 2, 16, "fp32")
    for message in virtual(2, _refused, case, saving(*saved), policy):
        assert re.search(says, message)


def _outside(rank: int, group: Any, case: Case) -> list[list[Tensor]]:
    """Give each layer a lease that is acquired and released around its checkpoint, and kept as an object."""
    layer, kept = saving(ROUTE, layer=run_experts), []

    def forward(batch: Batch, experts: list[Tensor]) -> Tensor:
        y = batch.x
        for index, each in enumerate(experts):
            with arena.acquire(index) as lease:
                y = layer(lease, y, batch.inputs, batch.weights, each)
            kept.append(lease)
        return y

    with open_arena(case, group, "keep", NUM_LAYERS) as arena:
        return _train(arena, forward, draw_inputs(case, rank, True), case, 5)


def test_lease_acquired_around_a_selective_checkpoint() -> None:
    """A saved route needs no other lease; the one that it came from keeps no frame once it is released."""
    case, plain = without(2)
    for got, want in zip(virtual(2, _outside, case), plain, strict=True):
        assert_equal_steps(got, want[:5])


def _reads_region(
    name: str, arena: epbuf.Arena, x: Tensor, inputs: Inputs, weights: Tensor, experts: Tensor
) -> Tensor:  # fmt: skip
    with arena.acquire() as lease:
        assert getattr(lease, name).shape == arena.region(name).shape
        return run_experts(lease, x, inputs, weights, experts)


@pytest.mark.parametrize("name", ["recv_tokens", "offs"])
def test_second_pass_has_regions_after_dispatch_only(name: str) -> None:
    """Which frame a lease has is known when the saved route comes; regions say so before."""
    case = named_case("some_negative", 1, 16, "fp32")
    (message,) = virtual(1, _refused, case, saving(ROUTE, layer=partial(_reads_region, name)), "keep")
    assert name in message and "after dispatch" in message


def _squared(arena: epbuf.Arena, x: Tensor, inputs: Inputs, weights: Tensor, experts: Tensor) -> Tensor:
    """Go on after combine, in a way whose backward needs y."""
    return run_layer(arena, x, inputs, weights, experts).square()


def _gradient_of_square(rank: int, group: Any, case: Case, layer: Layer) -> Tensor:
    with open_arena(case, group, "keep") as arena:
        batch, experts = Batch(draw_inputs(case, rank, True), 0, case), experts_of(arena, 0)
        y = layer(arena, batch.x, batch.inputs, batch.weights, experts)
        return torch.autograd.grad(y, batch.x, batch.inputs.dy)[0]


def test_saved_combine_gives_nan_to_what_needs_it_again() -> None:
    """Nothing has saved y: a backward that needs it must not read memory as it comes. Without COMBINE it is right."""
    case = named_case("some_negative", 2, 16, "fp32")
    plain = virtual(2, _gradient_of_square, case, _squared)
    for got, want in zip(virtual(2, _gradient_of_square, case, saving(ROUTE, layer=_squared)), plain, strict=True):
        assert torch.equal(got, want) and got.any()
    for got in virtual(2, _gradient_of_square, case, saving(ROUTE, DISPATCH, COMBINE, layer=_squared)):
        assert got.isnan().any()


def captured_steps(
    rank: int, group: Any, case: Case, mode: str, device: str = "cpu", window: str = "auto", policy: str = "keep"
) -> list[list[Tensor]]:  # fmt: skip
    """Replay a captured step of three layers on the batches of `steps`."""
    inputs = draw_inputs(case, rank, True, device)

    def step(x: Tensor, weights: Tensor, ids: Tensor) -> list[Tensor]:
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        y, batch = x, Inputs(**{**vars(inputs), "topk_idx": ids})
        for each in experts:
            y = MODES[mode](arena, y, batch, weights, each)
        return [y.detach(), *torch.autograd.grad(y, [x, weights, *experts], inputs.dy)]

    with open_arena(case, group, policy, NUM_LAYERS, device=device, window=window) as arena:
        experts = [experts_of(arena, layer) for layer in range(NUM_LAYERS)]
        batches = [Batch(inputs, number, case) for number in range(5)]
        values = [(batch.x.detach(), batch.weights.detach(), batch.inputs.topk_idx) for batch in batches]
        captured = epbuf.CapturedStep.capture(arena, step, values[-1])
        results = [[part.clone().cpu() for part in captured(*each)] for each in values]
        captured.close()
        return results


@pytest.mark.parametrize("mode", ["non_reentrant", "selective", "experts_only"])
def test_captured_checkpoints(mode: str) -> None:
    """Replays of a step with checkpoints equal an eager step without, to the bit."""
    case, plain = without(2)
    for got, want in zip(virtual(2, captured_steps, case, mode), plain, strict=True):
        assert_equal_steps(got, want[:5])


def test_captured_checkpoints_that_stash() -> None:
    """The same of rows that the second pass has stashed."""
    case, plain = without(2)
    for got, want in zip(virtual(2, partial(captured_steps, policy="stash"), case, "selective"), plain, strict=True):
        assert_equal_steps(got, want[:5])


def compiled_steps(
    rank: int, group: Any, case: Case, num_steps: int = 100, device: str = "cpu", window: str = "auto"
) -> list[list[Tensor]]:  # fmt: skip
    """Run steps whose layers are checkpoints inside one compiled graph; leases are acquired around it."""
    layer = saving(ROUTE, DISPATCH, COMBINE, layer=run_experts)

    def stack(leases: list[epbuf.Lease], y: Tensor, inputs: Inputs, weights: Tensor, experts: list[Tensor]) -> Tensor:
        for lease, each in zip(leases, experts, strict=True):
            y = layer(lease, y, inputs, weights, each)
        return y

    compiled = torch.compile(stack, fullgraph=True, backend="inductor")

    def forward(batch: Batch, experts: list[Tensor]) -> Tensor:
        with ExitStack() as open_leases:
            leases = [open_leases.enter_context(arena.acquire()) for _ in experts]
            return compiled(leases, batch.x, batch.inputs, batch.weights, experts)

    with (
        torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True),
        open_arena(case, group, "keep", NUM_LAYERS, device=device, window=window) as arena,
    ):
        return _train(arena, forward, draw_inputs(case, rank, True, device), case, num_steps)


def patient(num_ranks: int) -> Case:
    """Return the case for ranks that compile for longer than one another."""
    return named_case("some_negative", num_ranks, 16, "fp32", timeout_s=COMPILE_LIMIT_S)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hundred_compiled_steps_on_a_frame_per_layer(num_ranks: int, pool: Pool) -> None:
    """Checkpoints inside torch.compile that save the three ops: the experts alone are computed again."""
    case, plain = patient(num_ranks), without(num_ranks)[1]
    for got, want in zip(pool.run(num_ranks, compiled_steps, case, limit_s=COMPILE_LIMIT_S), plain, strict=True):
        assert_equal_steps(got, want)


COMPILED = {
    "plain": (partial(again, run_experts, use_reentrant=False), LeaseError, "save all three ops"),
    "route": (saving(ROUTE, layer=run_experts), EpbufError, "DISPATCH|save all three ops"),
}


def _refused_when_compiled(rank: int, group: Any, case: Case, kind: str) -> str:
    layer, error, _ = COMPILED[kind]
    with (
        torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True),
        open_arena(case, group, "keep", 1) as arena,
    ):
        batch, experts = Batch(draw_inputs(case, rank, True), 0, case), experts_of(arena, 0)
        with arena.acquire() as lease:
            y = torch.compile(layer, fullgraph=True)(lease, batch.x, batch.inputs, batch.weights, experts)
        return raised(error, y.sum().backward)


@pytest.mark.parametrize("kind", list(COMPILED))
def test_compiled_code_does_not_repeat_a_dispatch(kind: str, pool: Pool) -> None:
    """The second pass would work on copies of regions: it is refused on every rank, with what to save."""
    case = patient(2)
    for message in pool.run(2, _refused_when_compiled, case, kind, limit_s=COMPILE_LIMIT_S):
        assert re.search(COMPILED[kind][2], message), message
