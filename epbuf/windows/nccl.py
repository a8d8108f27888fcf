"""NCCL windows: `ncclMemAlloc` and `ncclCommWindowRegister` on a communicator of our own."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from epbuf import _C
from epbuf.errors import NativeError
from epbuf.windows.device import device_bytes
from epbuf.windows.group import Group

MIN_VERSION = 23004  # 2.30.4, the first with ranks that share a GPU and host getters that TE's EP requires too


class NcclWindow:
    """One registered allocation; peers are load/store addresses within the NVLink domain."""

    kind = "nccl"

    def __init__(self, nbytes: int, group: Group, device: torch.device) -> None:
        """Make a communicator over `group`, allocate, register, ask for the peers' addresses. Collective; synchronises.

        Raises:
            NativeError: no NCCL >= 2.30.4, a refused registration, or a group wider than the NVLink domain.
        """
        library, trouble = try_library()
        _raise_everywhere(group, trouble)
        identity = group.all_gather(_C.NcclWindow.unique_id(library) if group.rank == 0 else b"")[0]
        with torch.cuda.device(device):
            self._native: Any = _C.NcclWindow(library, identity, group.rank, group.size, nbytes)
        self.peers = list(self._native.peers)
        self.peers[group.rank] = self._native.address  # our regions and our kernels use one address for our bytes
        self._device = device
        self.bytes_at(0, nbytes).zero_()
        torch.cuda.synchronize(device)

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        return device_bytes(self._native, self._native.address + offset, nbytes, self._device)

    @property
    def handle(self) -> int:
        """The ncclWindow_t, for kernels that address the window themselves; 0 once it is closed."""
        return int(self._native.handle) if self._native is not None else 0

    @property
    def communicator(self) -> int:
        """The ncclComm_t that the window is registered with; 0 once it is closed."""
        return int(self._native.communicator) if self._native is not None else 0

    def close(self) -> None:
        """Deregister and destroy the communicator; the memory goes with the last view of it. After a barrier."""
        if self._native is not None:
            self._native.deregister()
        self._native = None


def find_library() -> str:
    """Return the NCCL to open: EPBUF_NCCL_LIBRARY, else the process's own if new enough, else the wheel's.

    Raises:
        NativeError: none is there, or none is new enough; all that were tried are named.
    """
    tried = []
    for source, path in _candidates():
        version = _C.nccl_version(path)
        if version >= MIN_VERSION:
            return path
        tried.append(f"{source} {path}: " + (f"version {version}" if version else "cannot be opened"))
    raise NativeError(
        f"no NCCL >= 2.30.4 found. Tried: {'; '.join(tried) or 'nothing'}. Install epbuf[cu13] or epbuf[cu12], or set "
        "EPBUF_NCCL_LIBRARY to a libnccl.so.2"
    )


def _candidates() -> list[tuple[str, str]]:
    given = os.environ.get("EPBUF_NCCL_LIBRARY")
    if given:
        return [("EPBUF_NCCL_LIBRARY", given)]
    found = [("process", _C.nccl_in_process())]
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else []:
        found.append(("wheel", str(Path(folder) / "lib" / "libnccl.so.2")))
    return [(source, path) for source, path in found if path]


def try_library() -> tuple[str, str]:
    """Return (library, "") or ("", what find_library would raise)."""
    try:
        return find_library(), ""
    except NativeError as error:
        return "", str(error)


def _raise_everywhere(group: Group, trouble: str) -> None:
    for rank, text in enumerate(group.all_gather(trouble)):
        if text:
            raise NativeError(f"rank {rank}: {text}")
