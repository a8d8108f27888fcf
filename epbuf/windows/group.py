"""The few collective calls that opening and closing an arena needs, over whatever group the user has."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from epbuf.errors import ConfigError, PeerTimeoutError


class Group(Protocol):
    """Ranks that open one arena together. Every method but the properties is collective."""

    @property
    def rank(self) -> int:
        """Position of the caller in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, item: Any) -> list[Any]:
        """Return every rank's `item`, by rank."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called. A process group's own time-out counts instead of `timeout_s`."""


class SoloGroup:
    """One rank, no group."""

    rank = 0
    size = 1

    def all_gather(self, item: Any) -> list[Any]:
        return [item]

    def barrier(self, timeout_s: float | None = None) -> None:
        return None


class TorchGroup:
    """A torch process group of any backend."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    def has_cuda(self) -> bool:
        """Tell whether the group has a CUDA backend of its own; gloo, which copies through the host, is none."""
        backend = self._backend("cuda") if torch.cuda.is_available() else None
        return backend is not None and backend.name() != "gloo"

    def _backend(self, kind: str) -> Any:
        """Return what the group uses for a kind of device; None: it takes none of that kind."""
        device = torch.device(kind)
        return self.process_group._get_backend(device) if device in self.process_group._device_types else None

    def all_gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.process_group)
        return items

    def barrier(self, timeout_s: float | None = None) -> None:
        backend = self._backend("cpu")
        if backend is not None and backend.name() == "gloo":
            # An exchange of objects leaves tensors of Python's with a thread of gloo's. If the process ends right after
            # it, such a thread lets go of one while the interpreter is going, and aborts.
            backend.barrier().wait()
        else:
            self.all_gather(None)  # not dist.barrier: that one guesses a device for NCCL groups


@dataclass
class Meeting:
    """Where the virtual ranks of one process exchange objects."""

    size: int
    barrier: threading.Barrier = field(init=False)
    items: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.items = [None] * self.size


@dataclass(frozen=True)
class VirtualRank:
    """One of several ranks that live on threads of one process."""

    rank: int
    meeting: Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    def all_gather(self, item: Any) -> list[Any]:
        self.meeting.items[self.rank] = item
        self.meeting.barrier.wait()
        items = list(self.meeting.items)
        self.meeting.barrier.wait()
        return items

    def barrier(self, timeout_s: float | None = None) -> None:
        try:
            self.meeting.barrier.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise PeerTimeoutError(
                f"rank {self.rank} waited at a barrier of {self.size} virtual ranks and not all came within "
                f"{timeout_s} s: a rank failed, or its thread ended early"
            ) from None


AnyGroup: TypeAlias = "dist.ProcessGroup | DeviceMesh | VirtualRank | None"


def as_group(group: AnyGroup) -> Group:
    """Wrap what a user calls a group.

    Raises:
        ConfigError: not a group, or a mesh of more than one dimension.
    """
    if group is None:
        return SoloGroup()
    if isinstance(group, VirtualRank):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(
                f"group is a DeviceMesh of {group.ndim} dimensions; an expert-parallel group has one: "
                'pass the sub-mesh, for example mesh["ep"]'
            )
        return TorchGroup(group.get_group())
    if isinstance(group, dist.ProcessGroup):
        return TorchGroup(group)
    raise ConfigError(
        f"group must be a ProcessGroup, a one-dimensional DeviceMesh, None or a member of "
        f"epbuf.windows.local.virtual_ranks(R), found {type(cast(object, group)).__name__}"
    )
