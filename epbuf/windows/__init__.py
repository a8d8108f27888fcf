"""Symmetric memory behind one small protocol.

A window is one allocation per rank, of the same size on every rank, that all ranks of a group can address. Kinds "own"
and "adopted" are a rank's own bytes, for engines whose library reaches the peers by itself.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Window(Protocol):
    """What an arena needs of symmetric memory.

    Attributes:
        kind: the word that `Arena.open(window=)` takes.
        peers: base address of every rank's bytes as mapped in this process, by rank; what a kind has in place of ranks
            that are not mapped, it says.
    """

    kind: str
    peers: list[int]

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return some of this rank's bytes as a uint8 tensor with a storage of its own, which keeps the mapping alive.

        One storage per region: a compiler takes tensors of one storage for aliases and would copy them.
        """

    def close(self) -> None:
        """Give up this rank's references. Never communicates; idempotent."""
