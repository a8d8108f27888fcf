"""A captured step without an arena, for code that epbuf takes no part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from epbuf.capture import Snapshot, copy_into, player_on, static_copy


class PlainStep:
    """Like `CapturedStep`, over no arena: on CUDA one graph, on CPU the function again on the same static inputs."""

    def __init__(
        self, fn: Callable[..., Any], inputs: Sequence[Any], num_warm_ups: int, restore: Sequence[Any],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._fn = fn
        self._inputs = [static_copy(value) for value in inputs]
        self._player = player_on(device, "global")
        before = Snapshot(restore)
        for _ in range(num_warm_ups):
            with self._player.warming():
                fn(*self._inputs)
        before.put_back()
        with self._player.recording():
            self._outputs = fn(*self._inputs)
        if self._player.record_runs:
            before.put_back()

    def __call__(self, *inputs: Any) -> Any:
        """Copy `inputs` into the static ones, run, and return the static outputs."""
        with torch.no_grad():
            for static, given in zip(self._inputs, inputs, strict=True):
                copy_into(static, given)
        if self._player.record_runs:
            outputs = self._fn(*self._inputs)
            with torch.no_grad():
                tree_map(copy_into, self._outputs, outputs)
        else:
            self._player.replay()
        return self._outputs

    def check(self) -> None:
        """Find nothing: there is no arena."""

    def close(self) -> None:
        """Drop the graph. Synchronises on CUDA."""
        self._player.close()
