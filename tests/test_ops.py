"""What an eager dispatch finds out afterwards, over an engine whose calls return before their round is over.

The CUDA engine is like that. Here the host engine plays it: it completes every round and says nothing of what it found.
The COUNT cells are overwritten before anybody can read them, as a faster peer's next round would.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import raised, virtual
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf import _C
from epbuf.errors import CapacityError, ConfigError

CASE = named_case("one_row_over", 2)


class Enqueuing:
    """An engine that answers every call before its outcome is known."""

    synchronous = False

    def __init__(self, arena: epbuf.Arena) -> None:
        self._arena, self._engine = arena, arena.engine
        self._refused = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def route(self, *call: Any) -> _C.Outcome:
        self._refused = self._engine.route(*call).status == int(_C.Status.REFUSED)
        return _C.Outcome()

    def dispatch(self, *call: Any) -> _C.Outcome:
        if not self._refused:  # after a refused route the kernels of dispatch do nothing
            self._engine.dispatch(*call)
            self._arena.barrier()
            self._arena.region("count_cells", call[0].frame).fill_(-1)
            self._arena.barrier()
        return _C.Outcome()

    def combine(self, *call: Any) -> _C.Outcome:
        self._engine.combine(*call)
        return _C.Outcome()


def open_enqueuing(group: Any, **changes: Any) -> epbuf.Arena:
    config = base_config(2, recv_capacity_per_rank=CASE.config.recv_capacity_per_rank, **changes)
    arena = epbuf.Arena.open(epbuf.Plan.build(config), group)
    arena.memory.engine = Enqueuing(arena)
    return arena


def good_ids() -> Tensor:
    ids = torch.full((12, 3), -1)
    ids[:, 0] = torch.arange(12) % CASE.config.num_experts
    return ids


def dispatch_error(arena: epbuf.Arena, kind: type[Exception], x: Tensor, ids: Tensor) -> str:
    with arena.acquire() as lease:
        return raised(kind, lambda: epbuf.dispatch(lease, x, ids))


def _overflows(rank: int, group: Any) -> list[str]:
    x, ids = draw_inputs(CASE, rank, True).x, CASE.topk_idx[rank]
    with open_enqueuing(group, overflow_policy="error") as arena:
        found = []
        for _ in range(2):
            found.append(dispatch_error(arena, CapacityError, x, ids))
            with arena.acquire() as lease:
                epbuf.dispatch(lease, x, good_ids())
        return found


def test_overflow_is_read_from_what_this_rank_recorded() -> None:
    capacity = CASE.config.recv_capacity_per_rank
    assert capacity is not None
    for messages in virtual(2, _overflows):
        assert all(f"needs {capacity + 1} rows" in message and f"is {capacity};" in message for message in messages)


def _bad_ids(rank: int, group: Any) -> list[str]:
    x = draw_inputs(CASE, rank, True).x
    with open_enqueuing(group, validate_ids=True) as arena:
        found = []
        for token, value in ((3, 77), (5, 2**40 + 5)):
            ids = good_ids()
            if rank == 1:
                ids[token, 1] = value
            found.append(dispatch_error(arena, ConfigError, x, ids))
            with arena.acquire() as lease:
                epbuf.dispatch(lease, x, good_ids())
        return found


def test_the_latest_bad_id_is_named() -> None:
    for first, second in virtual(2, _bad_ids):
        assert "rank 1 routes token 3 to expert 77" in first
        assert f"rank 1 routes token 5 to expert {2**40 + 5}" in second


def _refused_dispatch(rank: int, group: Any) -> list[str]:
    x = draw_inputs(CASE, rank, True).x
    with open_enqueuing(group, overflow_policy="error") as arena:
        found = [
            dispatch_error(arena, ConfigError, x.double() if rank == refuser else x, good_ids()) for refuser in (0, 1)
        ]
        with arena.acquire() as lease:
            epbuf.dispatch(lease, x, good_ids())
        return found


def test_refusal_of_a_peer_raises_at_the_call() -> None:
    for rank, messages in enumerate(virtual(2, _refused_dispatch)):
        assert f"rank {1 - rank} refused dispatch: a tensor of the wrong dtype" in messages[1 - rank]


def _refused_combine(rank: int, group: Any) -> str:
    x = draw_inputs(CASE, rank, True).x
    with open_enqueuing(group, overflow_policy="error") as arena:
        dispatch_error(arena, CapacityError, x, CASE.topk_idx[rank])
        with arena.acquire() as lease:
            tokens = epbuf.dispatch(lease, x, good_ids()).tokens
            if rank == 0:
                return raised(ConfigError, lambda: epbuf.combine(lease, tokens.double()))
            epbuf.combine(lease, tokens)
        return raised(ConfigError, arena.check)


def test_refusal_of_a_peer_is_not_hidden_by_an_overflow_before() -> None:
    assert "rank 0 refused combine" in virtual(2, _refused_combine)[1]


def _grows(rank: int, group: Any, enqueues: bool) -> tuple[str, list[int], Tensor]:
    """Overflow once without growing, which leaves the frame's flag set; let a peer refuse; then grow."""
    x, ids = draw_inputs(CASE, rank, True).x, CASE.topk_idx[rank]
    opens = open_enqueuing if enqueues else open_plainly
    with opens(group) as arena, arena.growing(), torch.no_grad():
        arena.memory.grower, grower = None, arena.memory.grower
        with arena.acquire() as lease:
            epbuf.dispatch(lease, x, ids)
        arena.memory.grower = grower
        message = dispatch_error(arena, ConfigError, x.double() if rank == 0 else x, ids)
        capacities = [arena.capacity_rows]
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, ids)
            capacities += [arena.capacity_rows, int(recv.overflow)]
            y = epbuf.combine(lease, recv.tokens)
            del recv
        return message, capacities, y


def open_plainly(group: Any) -> epbuf.Arena:
    return epbuf.Arena.open(epbuf.Plan.build(CASE.config), group)


@pytest.mark.parametrize("enqueues", [False, True], ids=["synchronous", "enqueuing"])
def test_growing_dispatch_reads_its_own_round_and_is_not_misled_by_a_refused_one(enqueues: bool) -> None:
    capacity = CASE.config.recv_capacity_per_rank
    assert capacity is not None
    for rank, (message, capacities, y) in enumerate(virtual(2, _grows, enqueues)):
        assert "dtype" in message if rank else "float64" in message
        assert capacities == [capacity, capacity + 1, 0]
        wanted = draw_inputs(CASE, rank, True).x * (CASE.topk_idx[rank] >= 0).sum(1, keepdim=True)
        assert_same(y, wanted, f"y of rank {rank}")
