"""Windows of ranks that live in one process: one rank, or several on threads."""

from __future__ import annotations

import torch

from epbuf import _C
from epbuf.windows.device import device_bytes
from epbuf.windows.group import Group, Meeting, VirtualRank


def virtual_ranks(num_ranks: int) -> list[VirtualRank]:
    """Return `num_ranks` group members for as many threads; each thread passes its own to `Arena.open`."""
    meeting = Meeting(num_ranks)
    return [VirtualRank(rank, meeting) for rank in range(num_ranks)]


class LocalWindow:
    """Ordinary memory, of the host or of one GPU, that the ranks of one process see at the same addresses."""

    kind = "local"

    def __init__(self, nbytes: int, group: Group, device: torch.device) -> None:
        """Allocate this rank's zeroed bytes and learn the peers' addresses. Collective over `group`; synchronises."""
        self._own: _C.HostSegment | torch.Tensor | None
        self._own = _C.HostSegment.anonymous(nbytes) if device.type == "cpu" else _device_memory(nbytes, device)
        self._segments = group.all_gather(self._own)  # a peer's bytes live as long as anybody can address them
        self.peers = [_address(memory) for memory in self._segments]

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        assert self._own is not None, "an arena that is closed makes no regions"
        if isinstance(self._own, torch.Tensor):
            return device_bytes(self._own, self._own.data_ptr() + offset, nbytes, self._own.device)
        return torch.frombuffer(memoryview(self._own)[offset : offset + nbytes], dtype=torch.uint8)

    def close(self) -> None:
        self._segments, self._own = [], None


def _device_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return memory


def _address(memory: _C.HostSegment | torch.Tensor) -> int:
    return memory.data_ptr() if isinstance(memory, torch.Tensor) else memory.address
