"""Time and memory of Megatron-Core MoE layers over epbuf and over its own alltoall dispatcher, in one run.

    python graphs/bench/moe_layers.py --ranks 4 --tokens 4096 --hidden 4096 --experts 32 --topk 8

Forward and backward of all layers, divided by their number; medians over rounds in which the variants take turns, each
of the slowest rank. Experts are two grouped GEMMs in all variants. Memory is the peak that torch allocated during a
step beyond what lay there before it, and the window, which torch does not count. All models have the same weights;
outputs and gradients that differ from alltoall's by more than bfloat16 explains end the run with status 1. Ranks that
share a GPU need NCCL >= 2.30 for alltoall (LD_PRELOAD); without, the last line says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent))

from host_ranks import parse, run_on_ranks

import epbuf
from epbuf.integrations import megatron

WARMUP = 3
TOLERANCE = 0.02  # of the largest value of a tensor: sums in another order, each rounded to bfloat16


@dataclass(frozen=True)
class Shape:
    """What is run.

    Attributes:
        num_layers: MoE layers, one after the other.
        num_tokens: of each rank.
        hidden: elements of a token, and of an expert's inner row.
        num_experts: of one layer over all ranks.
        num_topk: experts of a token.
        num_rounds: how often each variant is timed.
    """

    num_layers: int
    num_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    num_rounds: int


@dataclass
class Variant:
    """One way to move tokens: a step, and what it has cost.

    Attributes:
        step: forward and backward of all layers.
        window_bytes: of the arena, which torch does not count.
        torch_bytes: most that torch allocated during a step.
        difference: from alltoall's outputs and gradients, the largest of all; a share of the tensor's largest value.
        micros: microseconds of a layer, one number a round.
    """

    name: str
    step: Callable[[], Sequence[Tensor]]
    window_bytes: int = 0
    torch_bytes: int = 0
    difference: float = 0.0
    micros: list[float] = field(default_factory=list)


class Result(NamedTuple):
    """What a rank says of a variant; the words are those of `Variant`."""

    name: str
    micros: list[float]
    torch_bytes: int
    window_bytes: int
    difference: float


def config_options(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Return what all models have in their TransformerConfig."""
    import megatron_layers as layers

    sizes = {"num_layers": shape.num_layers, "hidden_size": shape.hidden, "ffn_hidden_size": shape.hidden}
    experts = {"num_moe_experts": shape.num_experts, "moe_router_topk": shape.num_topk}
    return {**layers.dtype_options(device), **sizes, **experts}


def step_of(model: Any) -> Callable[[Tensor], list[Tensor]]:
    """Return forward and backward of a model."""
    weights = list(model.parameters())

    def step(rows: Tensor) -> list[Tensor]:
        y = model(rows)
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), weights)]

    return step


def make_variants(stack: ExitStack, shape: Shape, device: torch.device) -> tuple[list[Variant], str]:
    """Build the variants; return them, and why alltoall is not among them if it is not."""
    import megatron_layers as layers

    x = torch.randn(shape.num_tokens, 1, shape.hidden, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = x.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    options, spec = config_options(shape, device), layers.layer_spec(layers.GroupedExperts)
    groups = layers.groups_of(dist.group.WORLD)
    sizes = {"seq_length": shape.num_tokens, "micro_batch_size": 1, "expert_alignment": 16}
    installation = stack.enter_context(megatron.install(sizes, device=device))
    flags = {**layers.FLEX, "moe_ncclep_static_shape": True}
    model = layers.Layers(layers.make_config(groups, **options, **flags), groups, spec).to(device)
    arena, ours = megatron.prepare(model), step_of(model)
    captured = epbuf.CapturedStep.capture(arena, ours, (x,))
    stack.callback(captured.close)
    assert installation.arena is arena
    variants = [
        Variant("epbuf, eager", lambda: ours(x), arena.plan.total_bytes),
        Variant("epbuf, captured", lambda: captured(x), arena.plan.total_bytes),
    ]
    try:
        group = groups if device.type == "cpu" else layers.groups_of(dist.new_group(backend="nccl"))
        stock = layers.Layers(layers.make_config(group, **options, **layers.ALLTOALL), group, spec).to(device)
        stock.load_state_dict(model.state_dict())
        theirs = step_of(stock)
        wanted = theirs(x)
    except RuntimeError as error:
        return variants, f"alltoall could not run: {str(error).splitlines()[0]}"
    for variant in variants:
        variant.difference = max(share_off(*pair) for pair in zip(variant.step(), wanted, strict=True))
    return [Variant("Megatron-Core, alltoall", lambda: theirs(x)), *variants], ""


def share_off(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def microseconds(step: Callable[[], object], device: torch.device) -> float:
    """Time one step on this rank."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e6


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the most that torch allocated during a step beyond what lay there; 0 on CPU, which it does not count."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def run_rank(device: torch.device, shape: Shape) -> tuple[list[Result], str]:
    """Be one rank: measure all variants in turns."""
    import megatron_layers as layers

    with ExitStack() as stack:
        stack.enter_context(layers.stand_ins())
        variants, trouble = make_variants(stack, shape, device)
        for variant in variants:
            for _ in range(WARMUP):
                variant.step()
            variant.torch_bytes = peak_bytes(variant.step, device)
        for _ in range(shape.num_rounds):
            for variant in variants:
                dist.barrier()
                variant.micros.append(microseconds(variant.step, device) / shape.num_layers)
        return [Result(v.name, v.micros, v.torch_bytes, v.window_bytes, v.difference) for v in variants], trouble


def table(shape: Shape, by_rank: Sequence[Sequence[Result]]) -> list[str]:
    """Return the rows of the table: times and differences of the worst rank, memory of the first."""
    lines = [
        "| dispatcher | us per layer | torch MiB per layer | window MiB per layer | off alltoall's values by |",
        "|---|---|---|---|---|",
    ]
    for results in zip(*by_rank, strict=True):
        slowest = statistics.median(max(samples) for samples in zip(*(result.micros for result in results), strict=True))
        mib = [nbytes / 2**20 / shape.num_layers for nbytes in (results[0].torch_bytes, results[0].window_bytes)]
        off = max(result.difference for result in results)
        lines.append(f"| {results[0].name} | {slowest:.0f} | {mib[0]:.1f} | {mib[1]:.1f} | {off:.2%} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on all ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"ranks": 2, "layers": 2, "tokens": 2048, "hidden": 2048, "experts": 16, "topk": 4, "steps": 30}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parse(parser, argv)
    sizes = (arguments.tokens, arguments.hidden, arguments.experts, arguments.topk)
    shape = Shape(arguments.layers, *sizes, num_rounds=arguments.steps)
    found = run_on_ranks(run_rank, arguments.ranks, arguments.device, shape)
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {arguments.ranks} ranks, {shape}")
    print("\n".join(table(shape, [rows for rows, _ in found])))
    troubles = {trouble for _, trouble in found if trouble}
    print("\n".join(sorted(troubles)) or "all variants in one run, in turns")
    return int(any(result.difference > TOLERANCE for rows, _ in found for result in rows))


if __name__ == "__main__":
    sys.exit(main())
