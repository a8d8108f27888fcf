"""Megatron-Core's own rerun runner over a small model. Imported by ranks only, since it imports Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.moe import paged_stash
from megatron_layers import Layers
from torch import Tensor, nn


class Chunk(nn.Module):
    """A model chunk with the names that the runner looks for."""

    mtp_process = False

    def __init__(self, model: Layers, config: Any) -> None:
        super().__init__()
        self.config = config
        self.whole = model
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList()
        for layer in model.layers:
            block = nn.Module()
            block.mlp = layer
            self.decoder.layers.append(block)

    def zero_grad_buffer(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


class Schedule:
    """What stands for Megatron-Core's forward_backward_func: one microbatch, forward and unless asked not to backward.

    Attributes:
        demands: at the end of each call, the largest demand that each layer has noted so far.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.demands: list[list[int]] = []

    def __call__(self, *, data_iterator: Any, forward_only: bool, **_: Any) -> Tensor:
        x, target = next(data_iterator[0])
        with torch.set_grad_enabled(not forward_only):
            y = self.chunk.whole(x)
            if not forward_only:
                (y * target).sum().backward()
        managers = [layer.token_dispatcher._comm_manager for layer in self.chunk.whole.layers]
        self.demands.append([int(manager.required_recv) for manager in managers])
        return y.detach()


@contextmanager
def rerun_runner(model: Layers, config: Any) -> Iterator[tuple[Any, Schedule]]:
    """Make the runner of a model; its flags lie on the CPU here."""
    none = torch.zeros(1, dtype=torch.bool)
    chunk = Chunk(model, config)
    schedule = Schedule(chunk)
    manager = SimpleNamespace(overflow=None, host_spill=None, release_stash_buffers=lambda: None)
    with (
        mock.patch.object(paged_stash, "check_paged_stash_overflow", lambda: none),
        mock.patch.object(paged_stash, "check_paged_stash_host_spill", lambda: none),
        mock.patch.object(paged_stash.PagedStashManager, "get_instance", classmethod(lambda cls: manager)),
    ):
        yield paged_stash.PagedStashRunner(config, False, [chunk], None, schedule), schedule


def step(runner: Any, batch: tuple[Tensor, Tensor], forward_only: bool = False) -> Tensor:
    """Run one step as Megatron-Core's training loop calls it."""
    result: Tensor = runner(
        model=[runner.model[0]], data_iterator=[iter([batch])], num_microbatches=1, seq_length=1,
        forward_only=forward_only,
    )  # fmt: skip
    return result
