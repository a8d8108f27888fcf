"""Windows of `torch.distributed._symmetric_memory`, CUDA backend."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from epbuf.errors import ConfigError, NativeError
from epbuf.windows.device import device_bytes
from epbuf.windows.group import Group, TorchGroup


class AlignedStore(c10d.Store):
    """A store for one rendezvous, in which its ranks find each other whatever rendezvous each was in before.

    torch numbers the exchanges of a process, over all its groups, and puts the number into the keys: a rank that has
    taken part in more of them than its peers waits for ever. Here the first exchange has number 0 on every rank.

    Source of the keys, `PREFIX/NUMBER/RANK` and, of a barrier, `PREFIX/NUMBER/WORD`: torch 2.13,
    torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.hpp.
    """

    def __init__(self, store: c10d.Store) -> None:
        super().__init__()
        self._store = store
        self._first: int | None = None

    def _aligned(self, key: str) -> str:
        found = re.search(r"(?<![^/])\d+(?![^/])", key)  # the first part that is a number
        if found is None:
            return key
        self._first = int(found[0]) if self._first is None else self._first
        return f"{key[: found.start()]}{int(found[0]) - self._first}{key[found.end() :]}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._aligned(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._aligned(key)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._aligned(key), amount))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        aligned = [self._aligned(key) for key in keys]
        self._store.wait(aligned) if timeout is None else self._store.wait(aligned, timeout)


@contextmanager
def aligned_group(group: TorchGroup) -> Iterator[str]:
    """Register the ranks of a group as one more process group, with an aligned store; yield its name. Collective."""
    name = f"epbuf-{group.all_gather(uuid.uuid4().hex)[0]}"
    store = AlignedStore(c10d.PrefixStore(name, c10d._get_process_group_store(group.process_group)))
    native: Any = torch._C._distributed_c10d
    process_group = native.ProcessGroup(store, group.rank, group.size)  # torch keeps it by its name, but not alive
    native._register_process_group(name, process_group)
    try:
        yield name
    finally:
        native._unregister_process_group(name)


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
        self._tensor.zero_()  # torch zeroes its signal pad only
        torch.cuda.synchronize(device)
        self._handle: Any = _rendezvous(self._tensor, group)
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


_num_rendezvous = 0  # of this process, in any group


def _rendezvous(tensor: torch.Tensor, group: TorchGroup) -> Any:
    import torch.distributed._symmetric_memory as symmetric

    global _num_rendezvous
    same_history = len(set(group.all_gather(_num_rendezvous))) == 1
    _num_rendezvous += 1
    if same_history:
        return symmetric.rendezvous(tensor, group.process_group)
    with aligned_group(group) as name:
        return torch._C._distributed_c10d._SymmetricMemory.rendezvous(tensor, name)
