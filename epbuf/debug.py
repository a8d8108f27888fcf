"""Debug mode: what a frame holds is poisoned before it is handed out, and what nobody may write is looked at.

Poison is a tagged NaN: its low bits are the number of the lease that the frame was handed to, so that a NaN found
anywhere names that lease. The poison past the last zone, and a pattern in the gaps between regions, are the canaries of
the next time the frame is handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from epbuf.errors import NativeError
from epbuf.plan import Plan, Region
from epbuf.windows import Window

_GAP_BYTE = 0xC3
_JUNK = {torch.int32: -0x5A5A5A5B, torch.int64: -0x5A5A5A5A5A5A5A5B, torch.uint8: 0xA5}  # 0xA5 in every byte
_QUIET_NAN = {
    torch.float32: (torch.int32, 0x7FC00000, 0x3FFFFF),
    torch.bfloat16: (torch.int16, 0x7FC0, 0x3F),
    torch.float16: (torch.int16, 0x7E00, 0x1FF),
}
"""Dtype: integers of its size, a quiet NaN, and the bits of it that may hold a tag."""

_ROWS = ("recv_topk_weights", "recv_tokens")
_POISONED = ("slot_map", "offs", "counts", "overflow", *_ROWS, "recv_scales", "recv_row_scales")  # no cell, no counter
_NUM_REMEMBERED = 4096


@dataclass(frozen=True)
class HandOut:
    """One time a frame was handed out: to which lease, and where that was acquired."""

    serial: int
    frame: int
    where: str


class Debug:
    """Poison and canaries of one arena.

    Attributes:
        hand_outs: the latest ones, the last one last.
    """

    def __init__(
        self, plan: Plan, window: Window, region: Callable[[str, int], torch.Tensor], *, unrouted_end: int = 0
    ) -> None:  # fmt: skip
        """Poison all frames.

        Args:
            unrouted_end: where the last zone ends in a frame whose `offs` nobody wrote: 0 if nothing was dispatched
                then, C if the caller's kernels need not write `offs`.
        """
        self._unrouted_end = unrouted_end
        self._watches_tail = plan.engine != "nccl_ep"  # that library writes there
        frames = range(plan.schedule.num_frames)
        names = [{r.name for r in plan.regions_of("frame", frame)} for frame in frames]
        if plan.dedups or plan.adds_by_rank:  # peers may read it until this rank's next COUNT (csrc/PROTOCOL.md)
            names = [found - {"slot_map"} for found in names]
        self._poisoned = [
            {name: region(name, frame).detach() for name in _POISONED if name in names[frame]} for frame in frames
        ]
        self._gaps = [[window.bytes_at(*gap) for gap in _gaps_of(plan, frame)] for frame in frames]
        device = region("offs", 0).device
        self._patterns = torch.zeros(len(frames), len(_ROWS), dtype=torch.int64, device=device)
        self._found = torch.zeros(len(frames), 3, dtype=torch.int64, device=device)  # rows, a row, bytes in gaps
        self.hand_outs: deque[HandOut] = deque(maxlen=_NUM_REMEMBERED)
        for frame in frames:
            self._poison(frame, 0)
            for gap in self._gaps[frame]:
                gap.fill_(_GAP_BYTE)

    def hand_out(self, hand_out: HandOut, *, reads: bool) -> None:
        """Look at a frame's canaries, then poison it. On the current stream.

        With `reads` what was found is raised now; otherwise (while capturing) by `raise_found`.

        Raises:
            NativeError: bytes that belong to nobody were written since the frame was handed out before.
        """
        frame = hand_out.frame
        with torch.no_grad():
            self._look(frame)
            if reads:
                self.raise_found(frame)
            self._poison(frame, hand_out.serial)
        self.hand_outs.append(hand_out)

    def raise_found(self, frame: int | None = None) -> None:
        """Raise what was found in one frame or in all, once. Reads the device."""
        frames = range(len(self._found)) if frame is None else [frame]
        for index, (num_rows, row, num_gap_bytes) in zip(frames, self._found[list(frames)].tolist(), strict=True):
            if num_rows or num_gap_bytes:
                self._found[index] = 0
                self._mend(index)
                rows = f"{num_rows} row(s) past the last zone, row {row} among them; " if num_rows else ""
                gaps = f"{num_gap_bytes} byte(s) between its regions; " if num_gap_bytes else ""
                places = [h.where for h in self.hand_outs if h.frame == index][-1:]
                raise NativeError(
                    f"frame {index} was written where nobody may write: {rows}{gaps}it had been handed out to the "
                    f"lease acquired at {places[0] if places else 'unknown'}. Look for a kernel that writes past "
                    "recv.offs[-1] or past the end of a view"
                )

    def source_of(self, tensor: torch.Tensor) -> HandOut | None:
        """Return whose poison the first NaN of a tensor is; None without one, or for a NaN of other making.

        Reads the device. A tag has as many bits as the dtype leaves: 22 in float32, 6 in bfloat16, 9 in float16; the
        latest lease whose number ends with them is taken.
        """
        if tensor.dtype not in _QUIET_NAN:
            return None
        integers, nan, mask = _QUIET_NAN[tensor.dtype]
        flat = tensor.detach().contiguous().view(integers).flatten()
        places = tensor.detach().contiguous().flatten().isnan().nonzero().flatten()
        if not len(places):
            return None
        bits = int(flat[places[0]])
        if bits & ~mask != nan:
            return None
        return next((h for h in reversed(self.hand_outs) if h.serial & mask == bits & mask), None)

    def _look(self, frame: int) -> None:
        """Count, on the device, canaries that were written."""
        regions, found = self._poisoned[frame], self._found[frame]
        end = self._end_of_rows(regions["offs"])
        for column, name in enumerate(_ROWS):
            if name in regions and self._watches_tail:
                rows = _integers(regions[name])
                tail = torch.arange(len(rows), device=rows.device) >= end
                written = tail & (rows != self._patterns[frame, column]).flatten(1).any(1)
                found[0] += written.sum()
                found[1] = torch.maximum(found[1], (written * torch.arange(len(rows), device=rows.device)).max())
        for gap in self._gaps[frame]:
            found[2] += (gap != _GAP_BYTE).sum()

    def _end_of_rows(self, offs: torch.Tensor) -> torch.Tensor:
        """Return the end of the last zone; offs holds junk below 0 if nobody wrote it."""
        return torch.where(offs[-1] < 0, self._unrouted_end, offs[-1])

    def _poison(self, frame: int, serial: int) -> None:
        for name, region in self._poisoned[frame].items():
            pattern = _pattern(region.dtype, serial)
            _integers(region).fill_(pattern)
            if name in _ROWS:
                self._patterns[frame, _ROWS.index(name)].fill_(pattern)  # an assignment is no kernel in a capture

    def _mend(self, frame: int) -> None:
        """Put canaries back, so that what was raised is not raised again."""
        for name in self._poisoned[frame]:
            if name in _ROWS:
                rows = _integers(self._poisoned[frame][name])
                tail = torch.arange(len(rows), device=rows.device) >= self._end_of_rows(self._poisoned[frame]["offs"])
                rows[tail] = self._patterns[frame, _ROWS.index(name)].to(rows.dtype)
        for gap in self._gaps[frame]:
            gap.fill_(_GAP_BYTE)


def _pattern(dtype: torch.dtype, serial: int) -> int:
    if dtype in _QUIET_NAN:
        _, nan, mask = _QUIET_NAN[dtype]
        return nan | (serial & mask)
    if dtype in _JUNK:
        return _JUNK[dtype]
    return 0xFF  # a NaN of every 8-bit float that has one


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bytes as integers, of at least two dimensions."""
    if tensor.dtype in _QUIET_NAN:
        tensor = tensor.view(_QUIET_NAN[tensor.dtype][0])
    elif tensor.dtype not in _JUNK:
        tensor = tensor.view(torch.uint8)
    return tensor if tensor.ndim > 1 else tensor.unsqueeze(1)


def _gaps_of(plan: Plan, frame: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of what lies between a region of a frame and whatever follows it."""
    ordered = sorted(plan.regions, key=lambda region: (region.offset, region.end))
    gaps, end, last = [], 0, ordered[0]
    for region in [*ordered, _end_of(plan)]:
        if region.offset > end and last.lifetime == "frame" and last.index == frame:
            gaps.append((end, region.offset - end))
        if region.end > end:
            end, last = region.end, region
    return gaps


def _end_of(plan: Plan) -> Region:
    return Region("", 0, plan.total_bytes, 0, 1, (), "uint8", "arena")
