"""Symmetric memory behind one small protocol.

A window is one allocation per rank, of the same size on every rank, that all ranks of a group can address.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Window(Protocol):
    """What an arena needs of symmetric memory.

    Attributes:
        kind: the word that `Arena.open(window=)` takes.
        storage: this rank's bytes; the storage's owner keeps the mapping alive.
        peers: base address of every rank's bytes as mapped in this process, by rank.
    """

    kind: str
    storage: torch.UntypedStorage
    peers: list[int]

    def close(self) -> None:
        """Give up this rank's references. Never communicates; idempotent."""
