"""Regions of the window as tensors, for engines that compute with torch."""

from __future__ import annotations

import torch

from epbuf.plan import Plan
from epbuf.windows import Window


class RegionTensors:
    """Makes an engine's own tensors over the regions of a plan; nobody else sees their version counters."""

    def __init__(self, plan: Plan, window: Window) -> None:
        self._plan, self._window = plan, window

    def one(self, name: str, index: int = 0) -> torch.Tensor:
        """Return one region, in the plan's shape and dtype.

        Raises:
            KeyError: the plan has no such region.
        """
        region = self._plan.region(name, index)
        memory = self._window.bytes_at(region.offset, region.nbytes)
        return memory.view(getattr(torch, region.dtype)).view(region.shape)

    def all(self, name: str) -> list[torch.Tensor]:
        """Return the regions of a name, by frame or workspace; none if the plan has none."""
        return [self.one(name, index) for index in sorted(r.index for r in self._plan.regions if r.name == name)]
