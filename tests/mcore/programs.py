"""Programs of ranks over Megatron-Core MoE layers: the same one with a stock dispatcher and with epbuf.

Imported by ranks only, since it imports Megatron-Core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron_layers import ALLTOALL, FLEX, Layers, groups_of, layer_spec, make_config, stand_ins
from torch import Tensor

from epbuf.integrations import megatron
from epbuf.integrations.megatron import Installation

SEQUENCE, BATCH, HIDDEN = 16, 2, 32
ROUTES = ("rebind", "spec", "replace")

Found = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What to run.

    Attributes:
        program: name of one of `PROGRAMS`.
        options: of TransformerConfig.
        plan: of plan_from_config, beyond the sizes.
        num_tensor: tensor-parallel ranks of an expert.
        lengths: tokens of a sequence on each rank, one after the other.
        route: how epbuf gets under the layers.
    """

    program: str = "one"
    options: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    num_tensor: int = 1
    lengths: tuple[int, ...] = (SEQUENCE,)
    route: str = "rebind"
    flags: dict[str, Any] = field(default_factory=dict)  # set on the config, of versions that have them
    plain_gate: bool = False  # Megatron-Core's own gate cannot reshape a batch without tokens
    seed: int = 0

    def recipe(self, num_tensor: int) -> dict[str, Any]:
        """Return what install takes: the longest sequence is that of all sequence-parallel ranks."""
        sizes = {"seq_length": max(SEQUENCE, *self.lengths) * num_tensor, "micro_batch_size": BATCH}
        return {**sizes, "num_microbatches": 3, **self.plan}

    def with_options(self, **options: Any) -> Case:
        """Return the same with more options of TransformerConfig."""
        return dataclasses.replace(self, options={**self.options, **options})


def draw_batches(rank: int, length: int, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Draw inputs that need a gradient, and targets, [S, B, H] float32."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    drawn = torch.randn(count, 2, length, BATCH, HIDDEN, generator=generator)
    return [(x.clone().requires_grad_(), target) for x, target in drawn]


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y * target).sum()


def _interleave(model: Layers, batches: Sequence[tuple[Tensor, Tensor]], order: str) -> list[Tensor]:
    """Run forwards and backwards of microbatches in an order such as "F0 F1 B0 B1"; return the outputs."""
    outputs: dict[int, Tensor] = {}
    losses: dict[int, Tensor] = {}
    for word in order.split():
        microbatch = int(word[1:])
        if word[0] == "F":
            y = model(batches[microbatch][0])
            losses[microbatch] = _loss(y, batches[microbatch][1])
            outputs[microbatch] = y.detach()
            del y
        else:
            losses.pop(microbatch).backward()
    return [outputs[number] for number in sorted(outputs)]


def _repeat(model: Layers, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Run one layer object three times in a microbatch, as repeats of multi-token prediction do."""
    x, target = batches[0]
    y = x
    for _ in range(3):
        y = y + model.layers[0](y)[0]
    _loss(y, target).backward()
    return [y.detach()]


def _validate_between(model: Layers, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Train, validate without gradients, train."""
    outputs = _interleave(model, batches, "F0 B0")
    model.eval()
    with torch.no_grad():
        outputs.append(model(batches[2][0]))
    model.train()
    return outputs + _interleave(model, batches, "F1 B1")


PROGRAMS: dict[str, Callable[[Layers, Sequence[tuple[Tensor, Tensor]]], list[Tensor]]] = {
    "one": lambda model, batches: _interleave(model, batches, "F0 B0"),
    "two in flight": lambda model, batches: _interleave(model, batches, "F0 F1 B0 F2 B1 B2"),
    "repeat": _repeat,
    "validation": _validate_between,
}


def run_program(model: Layers, case: Case, rank: int) -> Found:
    """Run the program; return outputs, gradients of inputs, and those of all weights."""
    for layer in model.layers if case.plain_gate else ():
        layer.router.gating = partial(F.linear, weight=layer.router.weight)
    length = case.lengths[rank % len(case.lengths)]
    batches = draw_batches(rank, length, 3, case.seed)
    outputs = PROGRAMS[case.program](model, batches)
    found = {f"y{number}": y for number, y in enumerate(outputs)}
    found |= {f"dx{number}": x.grad for number, (x, _) in enumerate(batches) if x.grad is not None}
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {name: grad for name, grad in grads.items() if grad is not None}


def stock(group: dist.ProcessGroup, case: Case) -> Found:
    """Run a case with Megatron-Core's alltoall dispatcher.

    Over tensor-parallel ranks with its allgather dispatcher: the other one gathers parts of unequal sizes there, which
    gloo cannot.
    """
    groups = groups_of(group, case.num_tensor)
    dispatcher = ALLTOALL if case.num_tensor == 1 else {"moe_token_dispatcher_type": "allgather"}
    if case.num_tensor > 1 and parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    model = Layers(make_config(groups, **{**case.options, **dispatcher}), groups)
    return run_program(model, case, dist.get_rank(group))


@contextmanager
def epbuf_model(group: dist.ProcessGroup, case: Case) -> Iterator[tuple[Layers, Installation]]:
    """Build the model with epbuf under it; close and undo behind it."""
    groups = groups_of(group, case.num_tensor)
    route = "rebind" if case.route == "rebind" else "spec"
    with megatron.install(case.recipe(case.num_tensor), route) as installation:
        config = make_config(groups, **{**case.options, **(FLEX if case.route == "rebind" else ALLTOALL)})
        for name, value in case.flags.items():
            setattr(config, name, value)
        model = Layers(config, groups, installation.swap(layer_spec()) if case.route == "spec" else None)
        if case.route == "replace":
            assert megatron.replace_dispatchers(model) == len(model.layers)
        yield model, installation


def largest_difference(one: Found, other: Found) -> float:
    """Return the largest difference of any element; NaN if there is one, and an error if names or shapes differ."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    differences = [0.0]
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape, (name, tensor.shape, other[name].shape)
        differences += [] if tensor.numel() == 0 else [(tensor - other[name]).abs().max().item()]
    return torch.tensor(differences).max().item()  # Python's max would lose a NaN


def compare(rank: int, group: dist.ProcessGroup, case: Case) -> tuple[float, float, dict[str, Any]]:
    """Run a case both ways; return the largest difference, the largest value, and the arena's report."""
    with stand_ins():
        wanted = stock(group, case)
        with epbuf_model(group, case) as (model, installation):
            found = run_program(model, case, rank)
            assert installation.arena is not None
            report = installation.arena.report()
        return largest_difference(found, wanted), max(t.abs().max().item() for t in found.values() if t.numel()), report
