"""Windows of `torch.distributed._symmetric_memory`, CUDA backend."""

from __future__ import annotations

from typing import Any

import torch

from epbuf.errors import ConfigError, NativeError
from epbuf.windows.device import device_bytes
from epbuf.windows.group import Group, TorchGroup


class TorchSymmWindow:
    """One allocation of torch's symmetric memory, rendezvoused once, outside any pool."""

    kind = "torch_symm"

    def __init__(self, nbytes: int, group: Group, device: torch.device) -> None:
        """Allocate, exchange handles, map the peers. Collective over `group`; synchronises.

        Raises:
            ConfigError: the group is no torch process group.
            NativeError: the rendezvous gave no peer addresses.

        Source: torch/distributed/_symmetric_memory/__init__.py, torch 2.11 to 2.14.
        """
        import torch.distributed._symmetric_memory as symmetric

        if not isinstance(group, TorchGroup):
            raise ConfigError('window="torch_symm" needs a torch process group; for one rank take window="local"')
        self._tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self._tensor, group.process_group)
        if self._handle is None or len(self._handle.buffer_ptrs) != group.size:
            raise NativeError(
                "torch.distributed._symmetric_memory.rendezvous gave no peer addresses: are all ranks' GPUs in one "
                "NVLink domain? Several ranks on one GPU need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"
            )
        # buffer_ptrs are relative to the allocation; `offset` (torch >= 2.13) is ours within it.
        offset = getattr(self._handle, "offset", 0)
        self.peers = [int(pointer) + offset for pointer in self._handle.buffer_ptrs]

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        return device_bytes(self._tensor, self._tensor.data_ptr() + offset, nbytes, self._tensor.device)

    def close(self) -> None:
        """Keep the mapping: torch frees it with the last tensor that uses it, which synchronises the device."""
        self._handle = None
