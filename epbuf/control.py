"""The words of region `control` as tensors, for engines whose kernels are not ours."""

from __future__ import annotations

import torch

from epbuf import _C


class ControlWords:
    """Counters and records of one rank, which operations of torch write and the host reads.

    The native engines write the same words from their own kernels; whatever reads them need not know who did.
    """

    def __init__(self, region: torch.Tensor) -> None:
        """Take region `control`.

        Shapes: region [n] uint8 device.
        """
        self._region = region
        self._on_host = region if region.device.type == "cpu" else torch.zeros_like(region, device="cpu").pin_memory()

    def word(self, name: str) -> torch.Tensor:
        """Return one word, as a tensor over its bytes.

        Shapes: [1] int64 or int32, as `struct Control` of csrc/layout.h has it.

        Raises:
            KeyError: no word of that name is written by others.
        """
        start, nbytes = _C.control_word(name)
        return self._region[start : start + nbytes].view(torch.int64 if nbytes == 8 else torch.int32)

    def read(self) -> _C.Control:
        """Read all words. Synchronises on CUDA."""
        words = self._region.cpu()
        return _C.Control.at(words.data_ptr())

    def mirror(self) -> None:
        """Copy all words to the host in stream order, for `mirrored`. Does not synchronise; may be captured."""
        if self._on_host is not self._region:
            self._on_host.copy_(self._region, non_blocking=True)

    def mirrored(self) -> _C.Control:
        """Read the words as the device last mirrored them, without synchronising; on CPU the words themselves."""
        return _C.Control.at(self._on_host.data_ptr())
