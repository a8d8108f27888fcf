"""Memory that somebody else made, registered and will free: a window of this rank's own bytes."""

from __future__ import annotations

import ctypes

import torch

from epbuf.errors import ConfigError
from epbuf.plan import ALIGNMENT_BYTES
from epbuf.windows.device import device_bytes

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class AdoptedWindow:
    """A caller's tensor. Peers are not mapped: `peers` has this rank's address and 0 for the others."""

    kind = "adopted"

    def __init__(self, tensor: torch.Tensor, nbytes: int, rank: int, num_ranks: int) -> None:
        """Take the first `nbytes` of a tensor that `check_adoptable` accepts, and zero them. Local; synchronises."""
        self._tensor: torch.Tensor | None = tensor  # whose death may be what frees the memory
        self._storage: torch.UntypedStorage | None = tensor.untyped_storage()  # to which a tensor is not bound for ever
        self._storage_start = self._storage.data_ptr()
        self._start, self._end = tensor.data_ptr(), tensor.data_ptr() + nbytes
        self.device = tensor.device
        self.peers = [0] * num_ranks
        self.peers[rank] = tensor.data_ptr()
        tensor[:nbytes].zero_()
        if tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        assert self._storage is not None, "an arena that is closed makes no regions"
        owner, address = (self._tensor, self._storage), self._start + offset
        if self.device.type == "cuda":
            return device_bytes(owner, address, nbytes, self.device)
        return torch.frombuffer(_host_bytes(owner, address, nbytes), dtype=torch.uint8)

    @property
    def is_in_place(self) -> bool:
        """Whether the memory is where it was: its owner may resize the storage, or move it to shared memory."""
        storage = self._storage
        if storage is None:
            return True
        return storage.data_ptr() == self._storage_start and self._end - self._storage_start <= storage.nbytes()

    def close(self) -> None:
        """Let go of the tensor: its memory is its owner's, and lasts as long as that or a view of ours wants it."""
        self._tensor = self._storage = None


def _host_bytes(owner: object, address: int, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
    """Return host memory as a buffer that keeps its owner alive."""
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return buffer


def check_adoptable(tensor: object, nbytes: int) -> torch.Tensor:
    """Check a tensor that a window of `nbytes` shall lie in.

    Raises:
        ConfigError: it is none of [n] uint8, contiguous, on cpu or cuda, at a multiple of 256 bytes, n >= nbytes.
    """
    if type(tensor) not in _PLAIN or not isinstance(tensor, torch.Tensor):
        raise ConfigError(
            f"adopt() takes a plain torch.Tensor [n] uint8, found {type(tensor).__name__}; pass one of {nbytes:,} "
            "bytes, to grow(plan, tensor) as well"
        )
    if tensor.is_inference():
        raise ConfigError(
            "adopt() takes a tensor that may be written anywhere, found one made inside torch.inference_mode; allocate "
            "it outside"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"adopt() takes memory on cpu or cuda, found a tensor on {tensor.device}; allocate it there")
    if tensor.layout != torch.strided or tensor.dtype != torch.uint8 or tensor.ndim != 1 or not tensor.is_contiguous():
        raise ConfigError(
            f"adopt() takes a contiguous tensor [n] uint8, found {list(tensor.shape)} {tensor.dtype} of layout "
            f"{tensor.layout}{_strides(tensor)}; pass tensor.view(torch.uint8).view(-1)"
        )
    if tensor.shape[0] < nbytes:
        raise ConfigError(
            f"adopt() needs {nbytes:,} bytes for the plan, found a tensor of {tensor.shape[0]:,}; allocate "
            "plan.total_bytes"
        )
    past = tensor.data_ptr() % ALIGNMENT_BYTES
    if past or not tensor.data_ptr():
        raise ConfigError(
            f"adopt() needs memory at a multiple of {ALIGNMENT_BYTES} bytes, found address {tensor.data_ptr():#x}, "
            f"{past} past one; allocate {ALIGNMENT_BYTES - past} bytes more and pass tensor[{ALIGNMENT_BYTES - past}:]"
        )
    return tensor


def _strides(tensor: torch.Tensor) -> str:
    return f" with strides {tuple(tensor.stride())}" if tensor.layout == torch.strided else ""
