"""Memory of this rank alone: for engines whose library registers its own buffers, and carries rows across a network."""

from __future__ import annotations

import torch

from epbuf.windows.group import Group, SoloGroup
from epbuf.windows.local import LocalWindow


class OwnWindow(LocalWindow):
    """Ordinary memory that no peer addresses: `peers` has this rank's own address throughout."""

    kind = "own"

    def __init__(self, nbytes: int, group: Group, device: torch.device) -> None:
        """Allocate this rank's zeroed bytes. Local; synchronises."""
        super().__init__(nbytes, SoloGroup(), device)
        self.peers = self.peers * group.size
