"""Marks of use by kernels that are not ours: what `Lease.begin` and `Lease.end` do to the book and the engine."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.autograd.graph import increment_version

from epbuf.engine import Engine, Place
from epbuf.engines.external import ExternalEngine
from epbuf.errors import ConfigError
from epbuf.lease import Lease, LeaseBook, Ticket, Use, make_ticket_tensor
from epbuf.plan import Lifetime, Plan


class Memory(Protocol):
    """What marks need of a generation of memory."""

    plan: Plan
    device: torch.device
    engine: Engine
    book: LeaseBook
    capacity_rows: int

    def raise_pending(self) -> None:
        """Raise what earlier calls met and could not raise."""

    def require_open(self, what: str) -> None:
        """Raise LeaseError when the memory is closed or gone."""

    def region(self, name: str, index: int = 0, lifetime: Lifetime | None = None) -> torch.Tensor:
        """Return the one tensor of a region."""


def begin_use(memory: Memory, lease: Lease, use: Use) -> None:
    """Begin a use of a lease's frame, and of a workspace, by kernels that are not ours; as `Lease.begin` says."""
    engine, book, frame = _external(memory, "begin", use), memory.book, lease.frame
    if use == "backward" and memory.plan.config.inference_only:
        raise ConfigError(
            'begin("backward") of a plan with inference_only=True, which has no regions for gradients; build it '
            "with inference_only=False"
        )
    memory.raise_pending()
    ticket = book.begin_use(frame, lease.serial, use)
    recorded_in = ticket.recorded_in if ticket is not None else None
    workspace = frame if use == "frame" else book.workspace(frame, use)
    assert workspace is not None, "begin_use claimed it"
    opened: Ticket | None = None
    try:
        graph = book.touch(frame, recorded_in)
        engine.enter(Place(frame, workspace), use)
        if use == "forward":
            opened = book.open_ticket(frame, lease.serial, 0, memory.capacity_rows, graph)
            engine.open_frame(frame)
        elif use == "backward" and book.crosses(ticket):
            engine.expect_open(frame)
    except BaseException:
        book.end_use(frame, lease.serial, use)
        if opened is not None:
            book.cancel_ticket(opened)
        raise
    if opened is not None:
        lease.ticket = make_ticket_tensor(book, opened.serial)
    if use != "frame":
        increment_version(_filled_by(memory, frame, workspace, use))


def end_use(memory: Memory, lease: Lease, use: Use, total_recv_tokens: torch.Tensor | None) -> None:
    """End a use that `begin_use` began; as `Lease.end` says."""
    engine, book, frame = _external(memory, "end", use), memory.book, lease.frame
    _check_demand(memory.device, use, total_recv_tokens)
    held = frame if use == "frame" else book.workspace(frame, use)
    ticket = book.end_use(frame, lease.serial, use)
    assert held is not None, "a use that has begun has its workspace"
    book.touch(frame, ticket.recorded_in if ticket is not None else None)
    engine.enter(Place(frame, held), use)
    if total_recv_tokens is not None:
        book.note_overflow(frame, engine.note_demand(frame, total_recv_tokens))
    if use == "backward" and ticket is not None and not ticket.returned and not book.rehearses(ticket):
        engine.close_frame(frame)
        ticket.returned = True


def _external(memory: Memory, call: str, use: Use) -> ExternalEngine:
    if not isinstance(memory.engine, ExternalEngine):
        raise ConfigError(
            f"{call}() marks the use by kernels that are not ours, and this arena has an engine whose dispatch and "
            'combine mark theirs: call those, or open the arena with engine="external"'
        )
    if use not in ("frame", "forward", "backward"):
        raise ConfigError(f'{call}() takes "forward", "backward" or "frame", found {use!r}')
    if torch.compiler.is_compiling():
        raise ConfigError(f"{call}() inside torch.compile, whose code would not run it again; call it around that")
    memory.require_open(f'{call}("{use}")')
    return memory.engine


def _filled_by(memory: Memory, frame: int, workspace: int, use: Lifetime) -> list[torch.Tensor]:
    """Return the regions that kernels of a use may write: those of its workspace, and in a forward the frame's."""
    sets: list[tuple[Lifetime, int]] = [(use, workspace)]
    if use == "forward":
        sets.append(("frame", frame))
    return [memory.region(r.name, r.index, r.lifetime) for at in sets for r in memory.plan.regions_of(*at)]


def _check_demand(device: torch.device, use: Use, num_rows: object) -> None:
    if num_rows is None:
        return
    if use != "forward":
        raise ConfigError(f'total_recv_tokens is of end("forward"), found it in end("{use}"); leave it out there')
    found = type(num_rows).__name__
    if isinstance(num_rows, torch.Tensor):
        if num_rows.shape == (1,) and num_rows.dtype in (torch.int32, torch.int64) and num_rows.device == device:
            return
        found = f"{list(num_rows.shape)} {num_rows.dtype} on {num_rows.device}"
    raise ConfigError(f"total_recv_tokens must be a tensor [1] int32 or int64 on {device}, found {found}")
