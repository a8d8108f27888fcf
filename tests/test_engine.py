"""In which order ops run that come on different streams. Streams and captures are played here: a CPU has neither."""

from __future__ import annotations

import torch

from epbuf.engine import Place, StreamOrder

MAIN, SIDE = 11, 22


class Played(StreamOrder):
    """Streams are numbers, captures too; every wait is noted as (waiting, waited for)."""

    def __init__(self, is_one_order: bool) -> None:
        super().__init__(torch.device("cuda", 0), is_one_order)
        self.stream, self.captures = MAIN, {MAIN: 0, SIDE: 0}
        self.waits: list[tuple[int, int]] = []

    def current(self) -> int:
        return self.stream

    def capture_of(self, stream: int) -> int:
        return self.captures[stream]

    def wait_for(self, stream: int) -> None:
        self.waits.append((self.stream, stream))

    def use(
        self, stream: int, frame: int, workspace: int = 0, direction: str = "forward", refusal: int = 0
    ) -> list[tuple[int, int]]:  # fmt: skip
        """Issue an op on a stream; return the waits that it made."""
        self.stream, self.waits = stream, []
        assert self.enter(Place(frame, workspace, refusal), direction) == stream
        return self.waits


def test_one_workspace_is_one_order() -> None:
    order = Played(is_one_order=True)
    assert order.use(MAIN, 0) == []
    assert order.use(SIDE, 1, direction="backward") == [(SIDE, MAIN)]
    assert order.use(SIDE, 2) == []
    assert order.use(MAIN, 0) == [(MAIN, SIDE)]


def test_several_workspaces_order_what_is_shared() -> None:
    order = Played(is_one_order=False)
    assert order.use(MAIN, 0, 0) == order.use(SIDE, 1, 1) == []
    assert order.use(SIDE, 2, 0) == [(SIDE, MAIN)]
    assert order.use(MAIN, 1, 2) == [(MAIN, SIDE)]
    assert order.use(MAIN, 3, 1, "backward") == []


def test_refusal_without_a_workspace_is_behind_all() -> None:
    """Its COUNT lets peers write into whatever workspace this rank pulled from last; a decode has none to wait for."""
    order = Played(is_one_order=False)
    order.use(MAIN, 0, 0)
    assert order.use(SIDE, 1, -1) == []
    assert order.use(SIDE, 1, -1, refusal=1) == [(SIDE, MAIN)]


def test_op_after_a_capture_waits_for_the_last_op_outside() -> None:
    for order in (Played(is_one_order=True), Played(is_one_order=False)):
        order.use(MAIN, 0)
        order.captures[MAIN] = 5
        assert order.use(MAIN, 0) == []
        order.captures[MAIN] = 0
        assert order.use(SIDE, 0) == [(SIDE, MAIN)]


def test_op_never_waits_across_the_boundary_of_a_capture() -> None:
    for order in (Played(is_one_order=True), Played(is_one_order=False)):
        order.use(MAIN, 0)
        order.captures[SIDE] = 5
        assert order.use(SIDE, 0) == []
        assert order.use(MAIN, 0) == []
        order.captures = {MAIN: 0, SIDE: 0}
        order.use(SIDE, 0)
        order.captures[SIDE] = 6  # an event recorded on it now belongs to the capture
        assert order.use(MAIN, 0) == []


def test_streams_of_one_capture_are_ordered() -> None:
    for order in (Played(is_one_order=True), Played(is_one_order=False)):
        order.captures = {MAIN: 5, SIDE: 5}
        order.use(MAIN, 0)
        assert order.use(SIDE, 0) == [(SIDE, MAIN)]
        order.captures = {MAIN: 6, SIDE: 6}
        assert order.use(MAIN, 0) == []
