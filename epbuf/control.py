"""The words of regions `control` and `frame_counters` as tensors, for engines whose kernels are not ours."""

from __future__ import annotations

import torch

from epbuf import _C


class ControlWords:
    """Counters and records of one rank, which operations of torch or a kernel of ours write and the host reads.

    The native engines write the same words from all their kernels; whatever reads them need not know who did.
    """

    def __init__(self, region: torch.Tensor, frame_counters: torch.Tensor) -> None:
        """Take both regions.

        Shapes: region [n] uint8 device, frame_counters [num_frames, 4] int32 device.
        """
        self._region = region
        self._on_host = region if region.device.type == "cpu" else torch.zeros_like(region, device="cpu").pin_memory()
        self._open = frame_counters[:, 1]  # `FrameCounters` of csrc/layout.h
        self._peaks = demand_peaks(frame_counters)

    def word(self, name: str) -> torch.Tensor:
        """Return one word of `control`, as a tensor over its bytes.

        Shapes: [1] int64 or int32, as `struct Control` of csrc/layout.h has it.

        Raises:
            KeyError: no word of that name is written by others.
        """
        start, nbytes = _C.control_word(name)
        return self._region[start : start + nbytes].view(torch.int64 if nbytes == 8 else torch.int32)

    def open_frame(self, frame: int) -> None:
        """Note that a forward has begun whose backward is still to come."""
        self._open[frame].fill_(1)

    def close_frame(self, frame: int) -> None:
        """Note that a backward has run."""
        self._open[frame].zero_()

    def expect_open(self, frame: int) -> None:
        """Count an early reuse if a backward has run since the frame's forward."""
        self.word("num_early_reuses").add_(self._open[frame] == 0)
        self.mirror()

    def note_demand(self, frame: int, num_rows: torch.Tensor) -> None:
        """Raise the frame's demand peak to what a dispatch needed.

        Shapes: num_rows [1] int64.
        """
        peak = self._peaks[frame : frame + 1]
        torch.maximum(peak, num_rows, out=peak)

    def read(self) -> _C.Control:
        """Read all words of `control`. Synchronises on CUDA."""
        words = self._region.cpu()
        return _C.Control.at(words.data_ptr())

    def mirror(self) -> None:
        """Copy `control` to the host in stream order, for `mirrored`. Does not synchronise; may be captured."""
        if self._on_host is not self._region:
            self._on_host.copy_(self._region, non_blocking=True)

    @property
    def mirror_address(self) -> int:
        """Where kernels find the host's copy."""
        return self._on_host.data_ptr()

    def mirrored(self) -> _C.Control:
        """Read the words as the device last mirrored them, without synchronising; on CPU the words themselves."""
        return _C.Control.at(self._on_host.data_ptr())


class KeepsWords:
    """What an engine says of a rank that has nothing but its own words: no kernel of the engine's talks to peers."""

    _words: ControlWords

    def control(self) -> _C.Control:
        return self._words.read()

    def status(self) -> _C.Control:
        return self._words.mirrored()

    def progress(self) -> list[tuple[int, int, int, int]]:
        return []

    def abort(self) -> None:
        """Do nothing: peers hear of it from the other library's communication, or by its time-out."""


def demand_peaks(frame_counters: torch.Tensor) -> torch.Tensor:
    """Return the demand peak of each frame, as a view.

    Shapes: frame_counters [num_frames, 4] int32, `struct FrameCounters` of csrc/layout.h; result [num_frames] int64.
    """
    return frame_counters.view(torch.int64)[:, 1]
