"""Rounds of tests/rounds.py on CUDA, in eager calls and as graphs over static inputs, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rounds import Inputs, assert_round, draw_inputs, expected, play_round
from routings import Case, padded_case
from torch import Tensor

import epbuf

VARIANTS = PLAIN, WEIGHTED, WEIGHTED_RANDOM = (False, False), (True, True), (True, False)  # (weighted, whole numbers)


def warmed(function: Callable[[], Any]) -> torch.cuda.Stream:
    """Call a function once on a new stream, as torch asks before a capture; return the stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    return stream


def captured(
    function: Callable[[], Any], mode: str = "global", stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Warm a function up and capture it; return the graph and what the function returned inside it."""
    stream = warmed(function) if stream is None else stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        outputs = function()
    return graph, outputs


class GraphedRound:
    """One captured round; every run copies new inputs into the static ones and replays."""

    def __init__(self, arena: epbuf.Arena, inputs: Inputs, weighted: bool, mode: str = "global") -> None:
        self._inputs = inputs.map(torch.clone)
        self.graph, self._outputs = captured(lambda: play_round(arena, self._inputs, weighted), mode)

    def run(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the static outputs of a replay on `inputs`, which have the shapes and dtypes of the first ones."""
        for name, static in vars(self._inputs).items():
            if static is not None:
                static.copy_(getattr(inputs, name))
        for output in self._outputs.values():
            output.fill_(-7)  # what a replay did not write must not look right
        self.graph.replay()
        return self._outputs


def compare_eager(
    arena: epbuf.Arena, rank: int, cases: Sequence[Case], variants: Sequence[tuple[bool, bool]] = VARIANTS
) -> int:  # fmt: skip
    """Play every case in eager calls; return the number of rounds."""
    for case in cases:
        for weighted, whole in variants:
            got = play_round(arena, draw_inputs(case, rank, whole, "cuda"), weighted)
            but = () if whole else ("grad_weights",)  # the order of their sums over H is the engine's
            assert_round(got, expected(case, weighted, whole)[rank], f"{case.name}, eager, rank {rank}", but)
    return len(cases) * len(variants)


def compare_replayed(arena: epbuf.Arena, rank: int, cases: Sequence[Case], mode: str = "global") -> int:
    """Capture the first case, replay it and then all of them; return the number of replays."""
    padded = [padded_case(case) for case in (cases[0], *cases)]
    for weighted, whole in (PLAIN, WEIGHTED):
        graph = GraphedRound(arena, draw_inputs(padded[0], rank, whole, "cuda"), weighted, mode)
        for number, case in enumerate(padded):
            got = graph.run(draw_inputs(case, rank, whole, "cuda"))
            what = f"{case.name}, replay {number} of {padded[0].name}, rank {rank}"
            assert_round(got, expected(case, weighted, whole)[rank], what)
        del graph, got
    return 2 * len(padded)
