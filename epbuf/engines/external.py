"""An engine for kernels that are not ours: it moves nothing, and keeps the order of who uses which memory."""

from __future__ import annotations

from typing import NoReturn

import torch

from epbuf import _C
from epbuf.control import ControlWords, KeepsWords
from epbuf.engine import Encoded, OnStreams, Place, Rows, StreamOrder
from epbuf.engines.regions import RegionTensors
from epbuf.plan import Plan
from epbuf.windows import Window


class ExternalEngine(KeepsWords, OnStreams):
    """Marks of use in stream order, and the device words that a replay needs: OPEN, demand, overflow.

    Nothing here talks to a peer: the caller's kernels synchronise the ranks among themselves.
    """

    encodes = True
    refuses_later = False

    def __init__(self, plan: Plan, window: Window, device: torch.device) -> None:
        self.synchronous = device.type == "cpu"
        self._streams = None if self.synchronous else StreamOrder(device, is_one_order=False)
        self._capacity_rows = plan.capacity_rows
        regions = RegionTensors(plan, window)
        self._words = ControlWords(regions.one("control"), regions.one("frame_counters"))
        self._overflow = regions.all("overflow")

    def enter(self, place: Place, use: str) -> None:
        """Let the current stream wait for the last users of a frame and a workspace, and be the last from now on."""
        if self._streams is not None:
            self._streams.enter(place, use)

    @torch.no_grad()
    def open_frame(self, frame: int) -> None:
        """Note on the device that a forward has begun whose backward is still to come."""
        self._words.open_frame(frame)
        self._overflow[frame].zero_()

    @torch.no_grad()
    def expect_open(self, frame: int) -> None:
        """Count an early reuse if the frame's backward has run since its forward."""
        self._words.expect_open(frame)

    @torch.no_grad()
    def close_frame(self, frame: int) -> None:
        """Note on the device that a backward has run."""
        self._words.close_frame(frame)

    @torch.no_grad()
    def note_demand(self, frame: int, num_rows: torch.Tensor) -> torch.Tensor:
        """Take in how many rows a dispatch needed: peak, overflow flag and count. Return the frame's flag.

        Shapes: num_rows [1] int32 or int64 device; result [1] float32.
        """
        rows = num_rows.to(torch.int64)
        is_over = rows > self._capacity_rows
        self._words.note_demand(frame, rows)
        self._overflow[frame].copy_(is_over)
        self._words.word("num_overflows").add_(is_over)
        self._words.mirror()
        return self._overflow[frame]

    def follow(self, frame: int) -> None:
        self.enter(Place(frame, frame), "frame")

    def close(self, *, is_healthy: bool = True) -> None:
        """Let go of the window."""
        del self._words, self._overflow

    def route(self, place: Place, topk_idx: torch.Tensor, live_tokens: torch.Tensor | None) -> _C.Outcome:
        _not_ours("dispatch")

    def dispatch(
        self, place: Place, x: torch.Tensor | Encoded, topk_weights: torch.Tensor | None
    ) -> _C.Outcome:  # fmt: skip
        _not_ours("dispatch")

    def combine(self, place: Place, rows: Rows, weights: torch.Tensor | None, out: torch.Tensor) -> _C.Outcome:
        _not_ours("combine")

    def combine_backward(self, place: Place, grad: torch.Tensor, expects_open: bool) -> _C.Outcome:
        _not_ours("combine's backward")

    def weight_grad(
        self, place: Place, expert_out: torch.Tensor, weights: torch.Tensor, grad_weights: torch.Tensor,
        grad_rows: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        _not_ours("combine's backward")

    def decode(self, place: Place, rows: Encoded, out: torch.Tensor, *, is_grad: bool) -> None:
        _not_ours("dequantize()")

    def stash(self, place: Place) -> None:
        _not_ours("combine")

    def return_pages(self, place: Place) -> None:
        _not_ours("combine")

    def restore(self, place: Place, *, returns_pages: bool) -> _C.Outcome:
        _not_ours("combine's backward")

    def dispatch_backward(
        self, place: Place, grads: tuple[Rows, Rows], out: torch.Tensor | None, out_weights: torch.Tensor | None,
        *, num_tokens: int, begins_use: bool, clears_open: bool,
    ) -> _C.Outcome:  # fmt: skip
        _not_ours("dispatch's backward")


def _not_ours(call: str) -> NoReturn:
    raise AssertionError(f"{call} reached an engine that moves nothing; `dispatch` and `combine` refuse before")
