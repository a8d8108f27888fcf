"""Train Megatron-Core MoE layers over epbuf and over Megatron's own alltoall dispatcher; draw both losses.

    python graphs/megatron_moe.py --ranks 2 --steps 200

Routers, experts and layers are Megatron-Core's own; what differs is who moves the tokens. Read these first:

    build_over_epbuf        all that a program needs to say: install before the model is built
    Trainer.step            forward, backward, gradients of the routers added up over the ranks, optimiser
    train                   the same steps over each; on a GPU, or with --captured, epbuf's is one captured graph

On CPU both must find the same losses to the bit, or the exit status is 1. A captured step needs experts that read on
the device how many rows there are: `GroupedExperts`, which then stand in both models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from host_ranks import parse, run_on_ranks
from torch import Tensor

import epbuf
from epbuf.integrations import megatron

SEQUENCE, BATCH, HIDDEN = 32, 2, 32
LEARNING_RATE = 0.01
TOLERANCE = {"cpu": 0.0, "cuda": 0.02}  # of the loss; bfloat16 on CUDA, where other GEMMs may be taken in a capture

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        num_steps: training steps.
        captured: whether epbuf's step is one captured graph.
    """

    num_steps: int
    captured: bool


def config_options(device: torch.device) -> dict[str, Any]:
    """Return what both models have in their TransformerConfig."""
    import megatron_layers as layers  # Megatron-Core: only in the ranks

    return {**layers.dtype_options(device), "hidden_size": HIDDEN, "moe_router_topk": 2}


def build_stock(stack: ExitStack, group: dist.ProcessGroup, options: Options, device: torch.device) -> Any:
    """Build the model over Megatron-Core's alltoall dispatcher."""
    import megatron_layers as layers  # Megatron-Core: only in the ranks

    groups = layers.groups_of(group)
    config = layers.make_config(groups, **config_options(device), **layers.ALLTOALL)
    spec = layers.layer_spec(layers.GroupedExperts if options.captured else None)
    return layers.Layers(config, groups, spec).to(device)


def build_over_epbuf(stack: ExitStack, group: dist.ProcessGroup, options: Options, device: torch.device) -> Any:
    """Build the model over epbuf's windows."""
    import megatron_layers as layers

    groups = layers.groups_of(group)
    sizes = {"seq_length": SEQUENCE, "micro_batch_size": BATCH}
    if device.type == "cuda":
        sizes["expert_alignment"] = 16  # of torch._grouped_mm there; rows of padding change the order of sums
    stack.enter_context(megatron.install(sizes, device=device))
    flags = {**layers.FLEX, "moe_ncclep_static_shape": options.captured}
    config = layers.make_config(groups, **config_options(device), **flags)
    spec = layers.layer_spec(layers.GroupedExperts if options.captured else None)
    return layers.Layers(config, groups, spec).to(device)


class Trainer:
    """A model, its optimiser, and the group that adds up gradients."""

    def __init__(self, model: Any, group: dist.ProcessGroup) -> None:
        self.model = model
        self.group = group
        self.dense = [p for name, p in model.named_parameters() if "experts" not in name]
        on_gpu = self.dense[0].is_cuda
        self.optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, capturable=on_gpu)

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        """Make one update; return the loss, averaged over the ranks."""
        self.optimizer.zero_grad()
        loss = (self.model(x) - target).float().square().mean() / dist.get_world_size()
        loss.backward()
        for parameter in self.dense:
            dist.all_reduce(parameter.grad, group=self.group)
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


def draw_batches(count: int, device: torch.device, dtype: torch.dtype) -> list[Batch]:
    """Draw tokens [S, B, H] of this rank, and targets that are a fixed function of them."""
    right = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1)) / HIDDEN**0.5
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    drawn = torch.randn(count, SEQUENCE, BATCH, HIDDEN, generator=generator)
    return [(x.to(device, dtype), (x + torch.tanh(x @ right)).to(device, dtype)) for x in drawn]


def train(
    build: Callable[..., Any], group: dist.ProcessGroup, options: Options, device: torch.device
) -> list[float]:  # fmt: skip
    """Train a model; return its losses."""
    import megatron_layers as layers

    with ExitStack() as stack:
        stack.enter_context(layers.stand_ins())
        model = build(stack, group, options, device)
        trainer = Trainer(model, group)
        batches = draw_batches(options.num_steps, device, next(model.parameters()).dtype)
        step: Callable[..., Tensor] = trainer.step
        if options.captured and build is build_over_epbuf:
            arena = megatron.prepare(model)
            step = epbuf.CapturedStep.capture(arena, trainer.step, batches[0], restore=(model, trainer.optimizer))
            stack.callback(step.close)
        losses = [step(*batch).clone() for batch in batches]  # a captured step returns the same tensor each time
        return [loss.item() for loss in losses]


def run_rank(device: torch.device, options: Options) -> tuple[list[float], list[float]]:
    """Be one rank: train both.

    A captured step on CUDA needs NCCL's all-reduce, which takes a GPU a rank (or NCCL >= 2.30 in LD_PRELOAD).
    """
    group = dist.new_group(backend="nccl") if device.type == "cuda" else dist.group.WORLD
    return train(build_stock, group, options, device), train(build_over_epbuf, group, options, device)


def draw(path: Path, stock: Sequence[float], ours: Sequence[float]) -> None:
    """Draw both curves in one picture, the second one dashed over the first."""
    from matplotlib.figure import Figure  # here, so that the ranks need not load it

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(stock, label="Megatron-Core, alltoall", linewidth=3, alpha=0.5)
    axes.plot(ours, label="Megatron-Core over epbuf", linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="Two MoE layers of Megatron-Core")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> int:
    """Train on all ranks; return 0 if both models have the same losses, and they fall."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--captured", action="store_true", help="capture epbuf's step on CPU, too")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parse(parser, argv)
    options = Options(arguments.steps, arguments.captured or arguments.device == "cuda")
    stock, ours = run_on_ranks(run_rank, arguments.ranks, arguments.device, options)[0]
    picture = arguments.out / "megatron_moe.png"
    draw(picture, stock, ours)
    difference = torch.tensor([a - b for a, b in zip(stock, ours, strict=True)]).abs().max().item()
    print(f"alltoall: loss {stock[0]:.4f} -> {stock[-1]:.4f}; epbuf: {ours[0]:.4f} -> {ours[-1]:.4f}")
    print(f"largest difference of a loss {difference:g}; both curves are in {picture}")
    is_right = difference <= TOLERANCE[arguments.device] * stock[0] and ours[-1] < ours[0]
    print("both dispatchers train alike" if is_right else "FAILED")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
