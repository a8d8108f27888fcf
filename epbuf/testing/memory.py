"""Bytes that must not be read or written, and ranks that come late."""

from __future__ import annotations

import time
from types import TracebackType
from typing import NoReturn

import torch

from epbuf.arena import Arena
from epbuf.lease import caller

_JUNK, _CANARY = 0xA5, 0xC3
_NAN = 0xFF  # as a byte of float8_e4m3fn, float8_e5m2 and float8_e8m0fnu
_CYCLES_PER_MS = 1_500_000  # of a GPU's clock, roughly


def poison(*tensors: torch.Tensor) -> None:
    """Fill tensors with what no computation should meet: NaN, or bytes 0xA5 where the dtype has no NaN.

    In place, on the current stream; allocates nothing and may be captured.
    """
    with torch.no_grad():
        for tensor in tensors:
            if tensor.dtype.is_floating_point and tensor.element_size() == 1:
                has_nan = tensor.dtype != torch.float4_e2m1fn_x2
                tensor.view(torch.uint8).fill_(_NAN if has_nan else _JUNK)
            elif tensor.dtype.is_floating_point:
                tensor.fill_(torch.nan)
            else:
                tensor.fill_(_junk(tensor.dtype))


def _junk(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 1
    return int.from_bytes(bytes([_JUNK] * dtype.itemsize), "little", signed=dtype.is_signed)


class CanaryRows:
    """Rows that nobody may write; made by `canary_rows`. Leaving `with` checks them."""

    def __init__(self, rows: torch.Tensor, first_row: int) -> None:
        self._rows = rows
        self._first_row = first_row
        self._where = caller()

    def check(self) -> None:
        """Fail if a canary row was written. Reads the device.

        Raises:
            AssertionError: names the first such row, how many there are, and where the canaries were set.
        """
        written = (self._rows != _CANARY).any(1).nonzero().flatten().tolist()
        if written:
            raise AssertionError(
                f"{len(written)} of {len(self._rows)} canary rows set at {self._where} were written, the first of them "
                f"row {self._first_row + written[0]}; nobody may write rows from {self._first_row} on"
            )

    def __enter__(self) -> CanaryRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.check()


def canary_rows(tensor: torch.Tensor, first_row: int) -> CanaryRows:
    """Put a pattern into the rows from `first_row` on, which nobody may write; `check()` looks at them.

        with canary_rows(out, int(recv.offs[-1])):
            kernel(recv.tokens, recv.offs, out)

    Args:
        tensor: [N, ...], contiguous.
        first_row: 0 to N; read offs[-1] on the host for it, outside any capture.
    """
    if not tensor.is_contiguous() or tensor.ndim == 0 or not 0 <= first_row <= len(tensor):
        _refuse_canaries(tensor, first_row)
    rows = tensor.detach()[first_row:]
    as_bytes = rows.view(torch.uint8) if rows.ndim > 1 else rows.unsqueeze(1).view(torch.uint8)
    flat = as_bytes.view(len(rows), -1) if len(rows) else as_bytes.new_empty(0, 1)
    flat.fill_(_CANARY)
    return CanaryRows(flat, first_row)


def _refuse_canaries(tensor: torch.Tensor, first_row: int) -> NoReturn:
    raise ValueError(
        f"canary_rows takes a contiguous tensor of rows and a row from 0 to their number, found {list(tensor.shape)}, "
        f"strides {tensor.stride()}, first_row={first_row}"
    )


class Skew:
    """Makes one rank late at the places where it is called; made by `skew`."""

    def __init__(self, rank: int, ms: float) -> None:
        self._rank = rank
        self._ms = ms

    def __call__(self, arena: Arena) -> None:
        """Wait, if `arena` is that of the late rank: the host on CPU; the current stream on CUDA, also captured."""
        if arena.rank != self._rank:
            return
        if arena.device.type == "cuda":
            torch.cuda._sleep(int(self._ms * _CYCLES_PER_MS))  # type: ignore[no-untyped-call]
        else:
            time.sleep(self._ms / 1000)


def skew(rank: int, ms: float) -> Skew:
    """Return what makes rank `rank` late by `ms` milliseconds wherever a step calls it with its arena.

        late = skew(rank=1, ms=20)

        def step(x, ids):
            late(arena)
            recv = epbuf.dispatch(lease, x, ids)

    Results must not depend on it. On CUDA the wait is in the stream, and its length is approximate.
    """
    return Skew(rank, ms)
