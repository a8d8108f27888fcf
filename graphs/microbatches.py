"""Overlap two micro-batches on two streams: one's dispatch and combine run beside the other's experts.

    python graphs/microbatches.py --ranks 2

Each micro-batch has its own stream and its own frame, and the plan has a workspace for each:
`Schedule(num_frames=2, num_workspaces=2)`. Read these first:

    Trainer.overlapped_step   the training step that is captured: fork, two micro-batches, join, update
    Trainer.sequential_step   the same step, one micro-batch after the other
    compare                   both train from the same weights on the same batches, and must find the same

What makes it safe:

- Every rank issues the same calls in the same order, whatever streams they go to; autograd's order is the same on all
  ranks, too.
- What crosses from one stream to the other lives in memory that nobody gives back meanwhile (static inputs, weights,
  the window), or is read only after the join. So no tensor needs `record_stream`.
- Each micro-batch differentiates its own aliases of the weights, so autograd has nothing to add up across streams, and
  the sum of gradients has one order.

On a GPU a step is one CUDA graph with two branches. A CPU has no streams: there the two leases are open together on one
thread, and the results must be equal to the bit. The exit status is 1 if the two steps differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from host_ranks import parse, run_on_ranks
from torch import Tensor

import epbuf

NUM_MICROBATCHES, NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS = 2, 8, 2, 64, 64
LEARNING_RATE = 0.5


class SideStream:
    """A stream beside the current one. A CPU has none: work stays where it is."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fork(self) -> None:
        """Begin behind what the current stream was given so far; during a capture this is what joins it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def use(self) -> AbstractContextManager[Any]:
        """Send the calls inside here."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let the current stream wait for this one. A capture must end with it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@dataclass
class Sent:
    """A micro-batch between its dispatch and its combine."""

    lease: epbuf.Lease
    recv: epbuf.Received
    weights: list[Tensor]  # aliases of the trainer's that belong to this micro-batch


class Trainer:
    """One MoE layer, trained by plain gradient descent; each rank has a router and experts of its own.

    Attributes:
        weights: router [H, E] f32, up [L, H, 2H] and down [L, 2H, H] of this rank's experts.
    """

    def __init__(self, arena: epbuf.Arena) -> None:
        num_local = arena.plan.num_local_experts
        shapes = (HIDDEN, NUM_EXPERTS), (num_local, HIDDEN, 2 * HIDDEN), (num_local, 2 * HIDDEN, HIDDEN)
        generator = torch.Generator().manual_seed(arena.rank)
        drawn = [torch.randn(shape, generator=generator) / HIDDEN**0.5 for shape in shapes]
        self.arena = arena
        self.weights = [weight.to(arena.device) for weight in drawn]
        self.one = torch.ones((), device=arena.device)
        self.side = SideStream(arena.device)

    def overlapped_step(self, x: Tensor, target: Tensor) -> Tensor:
        """Make one update with both micro-batches in flight; return the loss.

        The side stream begins behind the first dispatch: the second one runs beside the first micro-batch's experts.

        Shapes: x and target [num_microbatches, T, H].
        """
        first = self.send(0, x[0])
        self.side.fork()
        with self.side.use():
            second = self.send(1, x[1])
        losses = [self.finish(first, target[0])]
        with self.side.use():
            losses.append(self.finish(second, target[1]))
        # One call for both: autograd runs each node on the stream of its forward, and issues both combine backwards
        # before either dispatch backward, so that each micro-batch takes a backward workspace of its own.
        gradients = torch.autograd.grad(losses, first.weights + second.weights, [self.one, self.one])
        self.side.join()
        return self.update(losses, [gradients[: len(self.weights)], gradients[len(self.weights) :]])

    def sequential_step(self, x: Tensor, target: Tensor) -> Tensor:
        """Make the same update, one micro-batch after the other."""
        losses, gradients = [], []
        for microbatch in range(NUM_MICROBATCHES):
            sent = self.send(microbatch, x[microbatch])
            losses.append(self.finish(sent, target[microbatch]))
            gradients.append(torch.autograd.grad(losses[-1], sent.weights, self.one))
        return self.update(losses, gradients)

    def send(self, microbatch: int, x: Tensor) -> Sent:
        """Route the tokens of a micro-batch and dispatch them into its frame."""
        weights = [weight.detach().requires_grad_() for weight in self.weights]
        scores, topk_idx = (x.float() @ weights[0]).topk(NUM_TOPK)
        lease = self.arena.acquire(frame=microbatch)
        return Sent(lease, epbuf.dispatch(lease, x, topk_idx, scores.softmax(-1)), weights)

    def finish(self, sent: Sent, target: Tensor) -> Tensor:
        """Run the experts, combine, and return this micro-batch's part of the loss."""
        recv, (_, up, down) = sent.recv, sent.weights
        hidden = F.silu(torch._grouped_mm(recv.tokens, up.to(recv.tokens.dtype), offs=recv.offs))
        rows = torch._grouped_mm(hidden, down.to(hidden.dtype), offs=recv.offs)
        with sent.lease:
            y = epbuf.combine(sent.lease, rows, topk_weights=recv.topk_weights)
        return F.mse_loss(y.float(), target) / NUM_MICROBATCHES

    def update(self, losses: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> Tensor:
        """Add the gradients up in the order of the micro-batches and descend; return the summed loss."""
        with torch.no_grad():
            for weight, *parts in zip(self.weights, *gradients, strict=True):
                weight -= LEARNING_RATE * torch.stack(parts).sum(0)
            return torch.stack([loss.detach() for loss in losses]).sum()


def compare(arena: epbuf.Arena, num_steps: int) -> tuple[float, float, float]:
    """Train with both steps, captured; return the first loss, the last, and the largest difference between the two."""
    one, other = Trainer(arena), Trainer(arena)
    batches = draw_batches(arena, num_steps)
    overlapped = epbuf.CapturedStep.capture(arena, one.overlapped_step, batches[0], restore=one.weights)
    sequential = epbuf.CapturedStep.capture(arena, other.sequential_step, batches[0], restore=other.weights)
    losses, differences = [], []
    for batch in batches:
        loss, expected = overlapped(*batch), sequential(*batch)
        losses.append(loss.item())
        pairs = zip([loss, *one.weights], [expected, *other.weights], strict=True)
        differences += [(found - right).abs().max().item() for found, right in pairs]
    overlapped.check()
    overlapped.close()
    sequential.close()
    return losses[0], losses[-1], torch.tensor(differences).max().item()  # Python's max would lose a NaN


def draw_batches(arena: epbuf.Arena, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Draw this rank's tokens and targets, which are a fixed linear function of the tokens.

    Shapes: x [num_microbatches, T, H] token dtype, target [num_microbatches, T, H] f32.
    """
    generator = torch.Generator().manual_seed(100 + arena.rank)
    right = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    drawn = [torch.randn(NUM_MICROBATCHES, NUM_TOKENS, HIDDEN, generator=generator) for _ in range(num_steps)]
    return [(x.to(arena.device, arena.token_dtype), (x @ right).to(arena.device)) for x in drawn]


def make_plan(num_ranks: int, device: torch.device) -> epbuf.Plan:
    """Plan for two dispatches that are open at once, and whose ops overlap."""
    config = epbuf.EpConfig(
        num_ranks=num_ranks,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        max_tokens_per_rank=NUM_TOKENS,
        token_dtype="bf16" if device.type == "cuda" else "fp32",  # torch._grouped_mm on CUDA takes bfloat16
        expert_alignment=16,
    )
    return epbuf.Plan.build(
        config, schedule=epbuf.Schedule(num_frames=NUM_MICROBATCHES, num_workspaces=NUM_MICROBATCHES)
    )


def run_rank(device: torch.device, num_steps: int) -> tuple[float, float, float]:
    """Be one rank: open the arena, compare."""
    with epbuf.Arena.open(make_plan(dist.get_world_size(), device), dist.group.WORLD, device=device) as arena:
        return compare(arena, num_steps)


def run_ranks(num_ranks: int, num_steps: int, device_type: str) -> list[tuple[float, float, float]]:
    """Start the ranks, wait for them, and return what each of them found."""
    return run_on_ranks(run_rank, num_ranks, device_type, num_steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks; return 0 if overlapping changed nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=2)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parse(parser, argv)
    device_type = arguments.device
    tolerance = 0.0 if device_type == "cpu" else 1e-3  # cuBLAS promises the same bits on one stream only
    is_right = True
    for rank, (first, last, difference) in enumerate(run_ranks(arguments.ranks, arguments.steps, device_type)):
        is_right &= difference <= tolerance  # a NaN is no match
        print(f"rank {rank}: loss {first:.3f} -> {last:.3f}; overlapped and sequential differ by {difference:g}")
    print("two micro-batches at once give the same as one by one" if is_right else "FAILED: the two steps differ")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
