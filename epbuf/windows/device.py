"""Device memory as torch tensors, one storage per region."""

from __future__ import annotations

import torch


class _Bytes:
    """Hands torch an address whose memory `owner` keeps alive."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_bytes(owner: object, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return device memory as a uint8 tensor that keeps its owner alive.

    Source: numba.readthedocs.io, CUDA Array Interface, version 3.
    """
    return torch.as_tensor(_Bytes(owner, address, nbytes), device=device)
