"""Windows of ranks that live in one process: one rank, or several on threads."""

from __future__ import annotations

import torch

from epbuf import _C
from epbuf.windows.group import Group, Meeting, VirtualRank


def virtual_ranks(num_ranks: int) -> list[VirtualRank]:
    """Return `num_ranks` group members for as many threads; each thread passes its own to `Arena.open`."""
    meeting = Meeting(num_ranks)
    return [VirtualRank(rank, meeting) for rank in range(num_ranks)]


class LocalWindow:
    """Anonymous memory that the ranks of one process see at the same addresses."""

    kind = "local"

    def __init__(self, nbytes: int, group: Group) -> None:
        """Allocate this rank's bytes and learn the peers' addresses. Collective over `group`."""
        own = _C.HostSegment.anonymous(nbytes)
        self._segments = group.all_gather(own)  # a peer's bytes live as long as anybody can address them
        self.peers = [segment.address for segment in self._segments]
        self._bytes = memoryview(own)

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self._bytes[offset : offset + nbytes], dtype=torch.uint8)

    def close(self) -> None:
        self._segments = []
