"""POSIX shared memory among the processes of one host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from epbuf import _C
from epbuf.errors import NativeError
from epbuf.windows.group import Group

_T = TypeVar("_T")

PREFIX = "epbuf"


class HostWindow:
    """One shared segment per rank, mapped by every rank and unlinked before `open` returns."""

    kind = "host"

    def __init__(self, nbytes: int, group: Group, device: torch.device) -> None:
        """Create this rank's segment, map the peers', remove the names.

        Collective over `group`. Segments that killed processes of this user left behind are removed first.

        Raises:
            NativeError: no room in shared memory, on every rank.
        """
        _C.HostSegment.sweep(PREFIX)
        own, trouble = _attempt(lambda: _C.HostSegment.create(PREFIX, nbytes))
        try:
            names = _exchange(group, own.name if own is not None else "", trouble)
            peers, trouble = _attempt(lambda: [_C.HostSegment.map(name, nbytes) for name in names])
            _exchange(group, "", trouble)  # also the barrier before the names go
        finally:
            if own is not None:
                own.unlink()
        assert own is not None and peers is not None
        peers[group.rank] = own
        self._segments = peers
        self.peers = [segment.address for segment in peers]
        self._bytes = memoryview(own)

    def bytes_at(self, offset: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self._bytes[offset : offset + nbytes], dtype=torch.uint8)

    def close(self) -> None:
        self._segments, self._bytes = [], memoryview(b"")


def _attempt(make: Callable[[], _T]) -> tuple[_T | None, str]:
    try:
        return make(), ""
    except Exception as error:  # it reaches every rank through the exchange that follows
        return None, str(error)


def _exchange(group: Group, item: str, trouble: str) -> list[str]:
    """Return every rank's item, or raise on all ranks what went wrong on one."""
    answers = group.all_gather((item, trouble))
    for rank, (_, text) in enumerate(answers):
        if text:
            raise NativeError(f"rank {rank} could not make or map the window: {text}")
    return [answer for answer, _ in answers]
