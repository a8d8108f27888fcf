"""A captured step without an arena, for code that epbuf takes no part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from epbuf.capture import Snapshot


class PlainStep:
    """Like `CapturedStep`, over no arena: on CUDA one graph, on CPU the function again on the same static inputs."""

    def __init__(
        self, fn: Callable[..., Any], inputs: Sequence[Any], num_warm_ups: int, restore: Sequence[Any]
    ) -> None:
        self._fn = fn
        self._inputs = [copy_of(value) for value in inputs]
        is_on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
        self._graph = torch.cuda.CUDAGraph() if is_on_cuda else None
        before = Snapshot(restore)
        self._warm_up(num_warm_ups)
        before.put_back()
        self._outputs = self._record()
        if self._graph is None:
            before.put_back()

    def __call__(self, *inputs: Any) -> Any:
        """Copy `inputs` into the static ones, run, and return the static outputs."""
        with torch.no_grad():
            for static, given in zip(self._inputs, inputs, strict=True):
                _copy_into(static, given)
        if self._graph is not None:
            self._graph.replay()
        else:
            outputs = self._fn(*self._inputs)
            with torch.no_grad():
                tree_map(_copy_into, self._outputs, outputs)
        return self._outputs

    def check(self) -> None:
        """Find nothing: there is no arena."""

    def close(self) -> None:
        """Drop the graph. Synchronises on CUDA."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()

    def _warm_up(self, times: int) -> None:
        if self._graph is None:
            for _ in range(times):
                self._fn(*self._inputs)
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(times):
                self._fn(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self) -> Any:
        if self._graph is None:
            return self._fn(*self._inputs)
        with torch.cuda.graph(self._graph):
            return self._fn(*self._inputs)


def copy_of(value: Any) -> Any:
    """Return a copy of an input that is a tensor, needing a gradient if that does; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _copy_into(static: Any, given: Any) -> Any:
    if isinstance(static, torch.Tensor) and static is not given:
        static.copy_(given)
    return static
