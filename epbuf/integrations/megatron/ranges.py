"""NVTX ranges named by op and layer, around the forward of an op and around its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Mark what runs inside for a profiler; nothing without CUDA."""
    if not torch.cuda.is_available():
        yield
        return
    _push(name)
    try:
        yield
    finally:
        _pop()


def name_backward(output: torch.Tensor, name: str) -> None:
    """Mark the backward of the op that made `output`; nothing without CUDA or without a backward."""
    node = output.grad_fn
    if node is None or not torch.cuda.is_available():
        return
    node.register_prehook(lambda grads: _push(name))
    node.register_hook(lambda inputs, grads: _pop())


def _push(name: str) -> None:
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]


def _pop() -> None:
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
