"""Run pipeline schedules captured: 4 virtual stages, 8 micro-batches in flight, one graph for the whole step.

    python graphs/pipeline.py --ranks 2

Every rank runs all stages in one process; each stage has an arena of its own, with the frames that its schedule needs,
and its experts are spread over the ranks. Read these first:

    Stage.forward, Stage.backward   one pass of one stage; frames by `schedule.frame(layer, microbatch, chunk)`
    Pipeline.step                   what is captured: all passes of all stages, in their order
    compare                         the same model trains uncaptured, one micro-batch after the other

Both must find the same losses and the same gradients, to the bit, and a schedule must use the frames it asks
for, no more and no fewer. The exit status is 1 if not.

With `--schedule one_f_one_b_overlap` a forward and a backward of other micro-batches are open together: a pass is a
generator that pauses where its rows travel, and two passes take turns. (On a GPU each would have a stream of its own,
see graphs/microbatches.py.)
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from host_ranks import parse, run_on_ranks
from torch import Tensor

import epbuf

NUM_STAGES, NUM_MICROBATCHES, NUM_CHUNKS, NUM_LAYERS = 4, 8, 2, 2
NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS = 8, 2, 32, 16
LEARNING_RATE = 0.2
KINDS = ("sequential", "gpipe", "one_f_one_b", "one_f_one_b_overlap", "interleaved")

Pass = tuple[str, int, int]  # direction, micro-batch, chunk
Weights = list[Tensor]  # router [H, E] f32, up [L, H, 2H] and down [L, 2H, H] of this rank's experts


@dataclass
class Crossing:
    """One MoE layer between its forward and its backward. It keeps its frame busy while it lives.

    Attributes:
        ends: rows of the experts, and their weights: where autograd's graph of dispatch and experts ends.
        cut: the same without history, so that the backward of combine can run by itself.
    """

    x: Tensor
    ends: tuple[Tensor, Tensor]
    cut: list[Tensor]
    y: Tensor


class Stage:
    """One pipeline stage: the chunks of the model that it holds, and the arena that their layers share.

    A layer that stands in a chunk twice is repeated (multi-token prediction). Gradients of a layer are added up in the
    order of backwards.
    """

    def __init__(self, arena: epbuf.Arena, schedule: epbuf.Schedule, weights: list[list[Weights]]) -> None:
        self.arena = arena
        self.schedule = schedule
        distinct = {id(layer): layer for chunk in weights for layer in chunk}
        self._layers = {key: [w.to(arena.device).requires_grad_() for w in layer] for key, layer in distinct.items()}
        self._totals = {key: [torch.zeros_like(w) for w in layer] for key, layer in self._layers.items()}
        self.chunks = [[id(layer) for layer in chunk] for chunk in weights]
        self._crossings: dict[tuple[int, int, int], Crossing] = {}

    def forward(self, microbatch: int, chunk: int, x: Tensor) -> Iterator[Tensor | None]:
        """Run the layers of a chunk; pause after each dispatch, and yield the result last.

        Shapes: x and result [T, H] token dtype.
        """
        for layer, key in enumerate(self.chunks[chunk]):
            router, up, down = self._layers[key]
            x = x.detach().requires_grad_()
            scores, topk_idx = (x.float() @ router).topk(NUM_TOPK)
            with self.arena.acquire(self.frame(layer, microbatch, chunk)) as lease:
                recv = epbuf.dispatch(lease, x, topk_idx, scores.softmax(-1))
                yield None
                hidden = F.silu(torch._grouped_mm(recv.tokens, up.to(x.dtype), offs=recv.offs))
                rows = torch._grouped_mm(hidden, down.to(x.dtype), offs=recv.offs)
                ends = rows, recv.topk_weights
                cut = [end.detach().requires_grad_() for end in ends]
                y = epbuf.combine(lease, cut[0], topk_weights=cut[1])
            self._crossings[layer, microbatch, chunk] = Crossing(x, ends, cut, y)
            x = x + y
            del recv, hidden, rows, ends, cut, y  # what is left of the layer is its crossing
        yield x.detach()

    def backward(self, microbatch: int, chunk: int, dy: Tensor) -> Iterator[Tensor | None]:
        """Differentiate the layers of a chunk, the last one first; pause after each combine backward, yield dx last.

        Shapes: dy and dx [T, H] token dtype.
        """
        for layer, key in reversed(list(enumerate(self.chunks[chunk]))):
            at = self._crossings.pop((layer, microbatch, chunk))
            moved = torch.autograd.grad(at.y, at.cut, dy)
            yield None
            dx, *gradients = torch.autograd.grad(at.ends, [at.x, *self._layers[key]], moved)
            for total, gradient in zip(self._totals[key], gradients, strict=True):
                total += gradient
            dy = dy + dx
            del at, moved
        yield dy

    def frame(self, layer: int, microbatch: int, chunk: int) -> int:
        """Return the frame of one use; a sequential schedule counts the layers of all chunks."""
        if self.schedule.kind == "sequential":
            return self.schedule.frame(chunk * NUM_LAYERS + layer, microbatch)
        return self.schedule.frame(layer, microbatch, chunk)

    def all_weights(self) -> list[Tensor]:
        """Return the weights of all distinct layers."""
        return [weight for layer in self._layers.values() for weight in layer]

    def all_gradients(self) -> list[Tensor]:
        """Return their gradients."""
        return [total for layer in self._totals.values() for total in layer]


class Pipeline:
    """All stages in one process, and where their passes hand over.

    Attributes:
        orders: the passes of each stage, in its order.
        overlaps: whether a forward and the backward behind it run together, once the warm-up is over.
    """

    def __init__(self, stages: Sequence[Stage], orders: Sequence[Sequence[Pass]], *, overlaps: bool = False) -> None:
        self.stages = stages
        self.orders = orders
        self.overlaps = overlaps
        self._num_places = sum(len(stage.chunks) for stage in stages)

    def step(self, x: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run all passes; return the losses and every gradient.

        Stages take turns, each runs what is ready: all ranks find the same order, because it depends on nothing else.

        Shapes: x [M, T, H] token dtype, target [M, T, H] f32; losses [M] f32.
        """
        losses: list[Tensor] = [x.new_empty(())] * len(x)
        handed: dict[tuple[str, int, int], Tensor] = {("forward", m, 0): x[m] for m in range(len(x))}
        waiting = [deque(order) for order in self.orders]
        for gradient in self.all_gradients():
            gradient.zero_()
        while any(waiting):
            before = sum(map(len, waiting))
            for number, order in enumerate(waiting):
                self._advance(number, order, handed, (target, losses))
            assert sum(map(len, waiting)) < before, f"no pass is ready: {[order[0] for order in waiting if order]}"
        return torch.stack(losses), self.all_gradients()

    def train(self, x: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Make one step of plain gradient descent; return what `step` returns."""
        found = self.step(x, target)
        with torch.no_grad():
            for weight, gradient in zip(self.all_weights(), self.all_gradients(), strict=True):
                weight -= LEARNING_RATE * gradient
        return found

    def all_weights(self) -> list[Tensor]:
        """Return the weights of all stages."""
        return [weight for stage in self.stages for weight in stage.all_weights()]

    def all_gradients(self) -> list[Tensor]:
        """Return their gradients."""
        return [gradient for stage in self.stages for gradient in stage.all_gradients()]

    def _advance(
        self, number: int, order: deque[Pass], handed: dict[tuple[str, int, int], Tensor],
        goal: tuple[Tensor, list[Tensor]],
    ) -> None:  # fmt: skip
        """Run the passes of one stage that are ready, a forward with the backward behind it if both may overlap."""
        while order and self._place(number, order[0]) in handed:
            taken = [order[0]]
            is_pair = self.overlaps and [p[0] for p in list(order)[:2]] == ["forward", "backward"]
            if is_pair:
                if self._place(number, order[1]) not in handed:
                    return
                taken.append(order[1])
            for _ in taken:
                order.popleft()
            runs = [self._run(number, step, handed.pop(self._place(number, step))) for step in taken]
            for step, result in zip(taken, take_turns(runs), strict=True):
                self._hand_over(number, step, result, handed, goal)

    def _run(self, number: int, step: Pass, given: Tensor) -> Iterator[Tensor | None]:
        direction, microbatch, chunk = step
        stage = self.stages[number]
        return (stage.forward if direction == "forward" else stage.backward)(microbatch, chunk, given)

    def _hand_over(
        self, number: int, step: Pass, result: Tensor, handed: dict[tuple[str, int, int], Tensor],
        goal: tuple[Tensor, list[Tensor]],
    ) -> None:  # fmt: skip
        """Give the result of a pass to the stage that waits for it; behind the last stage stands the loss."""
        direction, microbatch, chunk = step
        place = chunk * len(self.stages) + number
        if direction == "backward":
            handed["backward", microbatch, place - 1] = result
        elif place + 1 < self._num_places:
            handed["forward", microbatch, place + 1] = result
        else:
            y, (target, losses) = result.float().requires_grad_(), goal
            loss = F.mse_loss(y, target[microbatch]) / len(target)
            losses[microbatch] = loss.detach()
            handed["backward", microbatch, place] = torch.autograd.grad(loss, y)[0].to(result.dtype)

    def _place(self, number: int, step: Pass) -> tuple[str, int, int]:
        direction, microbatch, chunk = step
        return direction, microbatch, chunk * len(self.stages) + number


def take_turns(runs: Sequence[Iterator[Tensor | None]]) -> list[Tensor]:
    """Advance generators in turns until each has yielded its result; return the results."""
    results: list[Tensor | None] = [None] * len(runs)
    while any(result is None for result in results):
        for number, run in enumerate(runs):
            if results[number] is None:
                results[number] = next(run)
    return [result for result in results if result is not None]


def make_schedule(kind: str, stage: int, num_chunks: int) -> epbuf.Schedule:
    """Return the schedule of one stage. `NUM_LAYERS` layers a chunk; a repeated one counts like any other."""
    if kind == "sequential":  # a microbatch has all chunks open at once
        return epbuf.Schedule.sequential(NUM_LAYERS * num_chunks)
    if kind == "gpipe":
        return epbuf.Schedule.gpipe(NUM_LAYERS, NUM_MICROBATCHES)
    if kind == "interleaved":
        return epbuf.Schedule.interleaved(NUM_LAYERS, NUM_STAGES, stage, NUM_MICROBATCHES, num_chunks)
    make = epbuf.Schedule.one_f_one_b if kind == "one_f_one_b" else epbuf.Schedule.one_f_one_b_overlap
    return make(NUM_LAYERS, NUM_STAGES, stage, NUM_MICROBATCHES)


def order_of(schedule: epbuf.Schedule, options: Options) -> list[Pass]:
    """Return the passes of one stage; a sequential one finishes each micro-batch before the next begins.

    GPipe's backwards begin with the last micro-batch, so what is compared with it must add up in that order, too.
    """
    if schedule.kind != "sequential":
        return list(schedule.passes)
    order: list[Pass] = []
    num_chunks, microbatches = options.num_chunks, range(NUM_MICROBATCHES)
    for microbatch in reversed(microbatches) if options.kind == "gpipe" else microbatches:
        order += [("forward", microbatch, chunk) for chunk in range(num_chunks)]
        order += [("backward", microbatch, chunk) for chunk in reversed(range(num_chunks))]
    return order


def make_plan(num_ranks: int, schedule: epbuf.Schedule, device: torch.device) -> epbuf.Plan:
    """Plan one stage."""
    config = epbuf.EpConfig(
        num_ranks=num_ranks,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        max_tokens_per_rank=NUM_TOKENS,
        token_dtype="bf16" if device.type == "cuda" else "fp32",  # torch._grouped_mm on CUDA takes bfloat16
        expert_alignment=16,
    )
    return epbuf.Plan.build(config, schedule)


def draw_weights(rank: int, num_ranks: int, num_places: int, *, repeats: bool) -> list[list[Weights]]:
    """Draw the layers of each of `num_places` chunks, in the order of the model; equal for all schedules.

    With `repeats` the layers of a chunk are one layer that runs again (multi-token prediction).
    """
    num_local = NUM_EXPERTS // num_ranks
    shapes = (HIDDEN, NUM_EXPERTS), (num_local, HIDDEN, 2 * HIDDEN), (num_local, 2 * HIDDEN, HIDDEN)
    generator = torch.Generator().manual_seed(rank)
    places = []
    for _ in range(num_places):
        layers = [[torch.randn(s, generator=generator) / HIDDEN**0.5 / 2 for s in shapes] for _ in range(NUM_LAYERS)]
        places.append([layers[0]] * NUM_LAYERS if repeats else layers)
    return places


def draw_batches(rank: int, count: int, arena: epbuf.Arena) -> list[tuple[Tensor, Tensor]]:
    """Draw tokens [M, T, H], and targets [M, T, H] f32 that are a fixed linear function of them."""
    generator = torch.Generator().manual_seed(100 + rank)
    right = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    drawn = [torch.randn(NUM_MICROBATCHES, NUM_TOKENS, HIDDEN, generator=generator) for _ in range(count)]
    return [(x.to(arena.device, arena.token_dtype), (x @ right).to(arena.device)) for x in drawn]


@dataclass
class Options:
    """What to run.

    Attributes:
        kind: name of the schedule's constructor.
        repeats: whether the layers of a chunk are one layer that runs again.
        num_steps: training steps.
        num_fewer: frames that every stage's plan lacks.
    """

    kind: str = "one_f_one_b"
    repeats: bool = False
    num_steps: int = 3
    num_fewer: int = 0

    @property
    def num_chunks(self) -> int:
        """Chunks of the model on each stage."""
        return NUM_CHUNKS if self.kind == "interleaved" else 1


def open_pipeline(
    stack: ExitStack, options: Options, kind: str, group: dist.ProcessGroup | None, device: torch.device
) -> Pipeline:  # fmt: skip
    """Open an arena for every stage and draw the model, for a schedule of its own or for that of the reference."""
    rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    chunks = range(options.num_chunks)
    places = draw_weights(rank, num_ranks, NUM_STAGES * len(chunks), repeats=options.repeats)
    stages = []
    for number in range(NUM_STAGES):
        schedule = planned = make_schedule(kind, number, len(chunks))
        if options.num_fewer:
            planned = epbuf.Schedule(schedule.num_frames - options.num_fewer, schedule.num_workspaces)
        arena = stack.enter_context(epbuf.Arena.open(make_plan(num_ranks, planned, device), group, device=device))
        stages.append(Stage(arena, schedule, [places[chunk * NUM_STAGES + number] for chunk in chunks]))
    orders = [order_of(stage.schedule, options) for stage in stages]
    return Pipeline(stages, orders, overlaps=kind == "one_f_one_b_overlap")


@dataclass
class Found:
    """What one rank found.

    Attributes:
        losses: of the captured run, one a step.
        difference: largest between captured and reference, over losses, gradients and weights.
        num_frames: of each stage: those that were used at once, and those that the schedule asked for.
    """

    losses: list[float]
    difference: float
    num_frames: list[tuple[int, int]]


def compare(options: Options, group: dist.ProcessGroup | None, device: torch.device) -> Found:
    """Train captured by the schedule, and uncaptured one micro-batch after the other."""
    with ExitStack() as stack:
        pipeline = open_pipeline(stack, options, options.kind, group, device)
        reference = open_pipeline(stack, dataclasses.replace(options, num_fewer=0), "sequential", group, device)
        batches = draw_batches(pipeline.stages[0].arena.rank, options.num_steps, pipeline.stages[0].arena)
        arenas = [stage.arena for stage in pipeline.stages]
        step = epbuf.CapturedStep.capture(arenas, pipeline.train, batches[0], restore=pipeline.all_weights())
        losses, differences = [], []
        for batch in batches:
            found, wanted = step(*batch), reference.train(*batch)
            losses.append(found[0].sum().item())
            pairs = zip(
                [found[0], *found[1], *pipeline.all_weights()],
                [wanted[0], *wanted[1], *reference.all_weights()],
                strict=True,
            )
            differences += [(one - other).abs().max().item() for one, other in pairs]
        step.check()
        step.close()
        used = [(s.arena.report()["num_frames_high_water"], s.schedule.num_frames) for s in pipeline.stages]
    return Found(losses, torch.tensor(differences).max().item(), used)  # Python's max would lose a NaN


def run_rank(device: torch.device, options: Options) -> Found:
    """Be one rank: compare."""
    return compare(options, dist.group.WORLD, device)


def run_ranks(num_ranks: int, options: Options, device_type: str) -> list[Found]:
    """Start the ranks, wait for them, and return what each of them found."""
    return run_on_ranks(run_rank, num_ranks, device_type, options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks; return 0 if a schedule changes nothing and uses the frames it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--schedule", choices=("all", *KINDS), default="all")
    parser.add_argument("--repeats", action="store_true", help="the layers of a chunk are one layer that runs again")
    arguments = parse(parser, argv)
    device_type = arguments.device
    is_right = True
    for kind in ("one_f_one_b", "interleaved") if arguments.schedule == "all" else (arguments.schedule,):
        options = Options(kind, arguments.repeats, arguments.steps)
        for rank, found in enumerate(run_ranks(arguments.ranks, options, device_type)):
            is_right &= found.difference == 0 and all(used == planned for used, planned in found.num_frames)
            print(
                f"{kind}, rank {rank}: loss {found.losses[0]:.3f} -> {found.losses[-1]:.3f}; captured and one by one "
                f"differ by {found.difference:g}; frames used and planned, by stage: {found.num_frames}"
            )
    print("captured schedules give the same as one micro-batch after the other" if is_right else "FAILED")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
