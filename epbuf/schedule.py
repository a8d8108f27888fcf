"""How many frames and workspaces must exist at once, and which frame each use takes.

A frame is taken by a dispatch and free again after that dispatch's backward. Each constructor replays the order of
passes of one pipeline stage and gives every (layer, microbatch, chunk) the lowest frame free at its turn. That never
takes more frames than are in use at once. A ring (n-th use takes frame n mod F) can: in the interleaved order the
uses that begin early do not end early, so a ring waits on one old frame while others are free.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from epbuf.errors import ConfigError

MAX_FRAMES = 2**14 - 1
MAX_WORKSPACES = 2**14 - 2
"""A rank's progress is published in one word with 14 bits for the frame and 14, less one value, for the workspace."""

Pass = tuple[Literal["forward", "backward"], int, int]
"""One pass of a stage: direction, microbatch, chunk."""

_Use = tuple[int, int, int]


@dataclass(frozen=True)
class Schedule:
    """Say how many dispatches of one arena are between their forward and the end of their backward at once.

    `Schedule(num_frames, num_workspaces)` gives the numbers by hand; the constructors derive them.
    `num_layers` counts the MoE layers of one chunk on this stage; a repeat of a layer (multi-token prediction) is a
    layer of its own.

    Attributes:
        num_frames: frames that must exist at once.
        num_workspaces: forward and backward workspaces, one of each per chain of ops that is open at once.
        kind: name of the constructor, "by_hand" without one.
        parameters: what the constructor was called with.
        passes: (direction, microbatch, chunk) in the order in which this stage must run them for `frame` to hold; of a
            sequential schedule those of one microbatch, by hand none.
    """

    num_frames: int
    num_workspaces: int = 1
    kind: str = field(default="by_hand", kw_only=True)
    parameters: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    passes: tuple[Pass, ...] = field(default=(), kw_only=True, repr=False, compare=False)
    _frames: dict[_Use, int] = field(default_factory=dict, kw_only=True, repr=False, compare=False)
    _first_users: tuple[tuple[_Use, _Use], ...] = field(default=(), kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_count("num_frames", self.num_frames, MAX_FRAMES)
        _check_count("num_workspaces", self.num_workspaces, MAX_WORKSPACES)
        if self.num_frames < len(self._first_users):
            self._refuse_fewer()

    @classmethod
    def sequential(cls, num_layers: int = 1) -> Schedule:
        """Run forward through all layers, then backward through all, one microbatch after the other.

        Every layer's forward precedes every backward: num_frames = num_layers, and layer i always has frame i.
        """
        parameters = _checked_counts(num_layers=num_layers)
        return _derive("sequential", parameters, _gpipe_passes(1))

    @classmethod
    def gpipe(cls, num_layers: int, num_microbatches: int) -> Schedule:
        """Run all forwards of a step, then all backwards.

        Nothing is freed before the last forward: num_frames = num_layers * num_microbatches.
        """
        parameters = _checked_counts(num_layers=num_layers, num_microbatches=num_microbatches)
        return _derive("gpipe", parameters, _gpipe_passes(num_microbatches))

    @classmethod
    def one_f_one_b(cls, num_layers: int, num_stages: int, stage: int, num_microbatches: int) -> Schedule:
        """Alternate one forward and one backward after a warm-up of forwards (PipeDream-flush, 1F1B).

        Stage s of S is S - s - 1 passes from the last, so it runs W = min(S - s - 1, M) forwards before the first
        backward comes back; then each forward is followed by a backward. At most min(W + 1, M) = min(S - s, M)
        microbatches are open: num_frames = num_layers * min(S - s, M). S = 4, s = 0, M = 8, 1 layer: 4 frames.
        """
        parameters = _checked_counts(num_layers=num_layers, num_stages=num_stages, num_microbatches=num_microbatches)
        parameters["stage"] = _checked_stage(stage, num_stages)
        warmup = num_stages - stage - 1
        order = [(microbatch, 0) for microbatch in range(num_microbatches)]
        return _derive("one_f_one_b", parameters, _alternate(order, order, warmup))

    @classmethod
    def one_f_one_b_overlap(cls, num_layers: int, num_stages: int, stage: int, num_microbatches: int) -> Schedule:
        """Run each forward and backward of 1F1B together, so that one's all-to-all runs beside the other's experts.

        On the last stage a backward needs the forward before it, so there is one more forward in the warm-up:
        W = min(S - s, M). Two chains of ops are open together, so there are two workspaces of each kind. At most
        min(W + 1, M) microbatches are open: num_frames = num_layers * min(S - s + 1, M). S = 4, s = 0, M = 8, 1 layer:
        5 frames. The passes of `passes[W:]` come in pairs, a forward and a backward; a pair may be run layer by layer
        in any order, because the forward takes no frame that the backward frees.
        """
        parameters = _checked_counts(num_layers=num_layers, num_stages=num_stages, num_microbatches=num_microbatches)
        parameters["stage"] = _checked_stage(stage, num_stages)
        order = [(microbatch, 0) for microbatch in range(num_microbatches)]
        passes = _alternate(order, order, num_stages - stage)
        return _derive("one_f_one_b_overlap", parameters, passes, num_workspaces=2)

    @classmethod
    def interleaved(
        cls, num_layers: int, num_stages: int, stage: int, num_microbatches: int, num_chunks: int
    ) -> Schedule:
        """Alternate as 1F1B does, with several chunks of the model on each stage (virtual pipeline).

        Forwards go through groups of S microbatches: the group in chunk 0, the group in chunk 1, ...; backwards go
        through the same groups from the last chunk to the first. The first backward of stage s needs the first
        microbatch to pass the last chunk of the last stage and come back: W = min(2 * (S - s - 1) + (V - 1) * S, M * V)
        forwards of chunks before it. At most min(W + 1, M * V) (microbatch, chunk) pairs are open:
        num_frames = num_layers * min(W + 1, M * V). S = 4, V = 2, s = 0, M = 8, 2 layers a chunk: W = 10, 22 frames.
        Source: Megatron-Core, core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches` and
        `get_schedule_table` with a group of num_stages microbatches.
        """
        parameters = _checked_counts(
            num_layers=num_layers, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks
        )
        parameters["stage"] = _checked_stage(stage, num_stages)
        if num_microbatches % num_stages:
            raise ConfigError(
                f"interleaved runs groups of num_stages={num_stages} microbatches, found "
                f"num_microbatches={num_microbatches}; use a multiple of {num_stages}"
            )
        warmup = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
        groups = [range(first, first + num_stages) for first in range(0, num_microbatches, num_stages)]
        chunks = range(num_chunks)
        forwards = [(microbatch, chunk) for group in groups for chunk in chunks for microbatch in group]
        backwards = [(microbatch, chunk) for group in groups for chunk in reversed(chunks) for microbatch in group]
        return _derive("interleaved", parameters, _alternate(forwards, backwards, warmup))

    def frame(self, layer: int, microbatch: int, chunk: int = 0) -> int:
        """Return the frame of one use; every rank takes the same.

        A sequential schedule finishes one microbatch before the next, so it takes any microbatch.

        Raises:
            ConfigError: the schedule has no such use, or was given by hand.
        """
        use = (layer, 0 if self.kind == "sequential" and microbatch >= 0 else microbatch, chunk)
        if use in self._frames:
            return self._frames[use]
        if not self._frames:
            raise ConfigError(
                f"frame(layer={layer}, microbatch={microbatch}): {self} was given by hand and knows no order of "
                "passes; take arena.acquire() in the same order on every rank, or build the plan with "
                "Schedule.sequential, gpipe, one_f_one_b or interleaved"
            )
        raise ConfigError(f"frame(layer={layer}, microbatch={microbatch}, chunk={chunk}): {self} has no such use")

    @property
    def num_layers(self) -> int:
        """MoE layers of one chunk; of a schedule given by hand its frames, each a layer of its own."""
        return dict(self.parameters).get("num_layers", self.num_frames)

    def layer_of(self, frame: int) -> int:
        """Return the layer whose uses take a frame.

        Each pass takes a frame for each of its layers, and its backward frees them together. So the lowest free frames
        are always those of one whole pass, in the order of its layers.
        """
        return frame % self.num_layers

    def _refuse_fewer(self) -> NoReturn:
        asking, holding = self._first_users[self.num_frames]
        raise ConfigError(
            f"{self} needs {len(self._first_users)} frames and num_frames={self.num_frames} was asked for: the "
            f"forward of {_name(asking)} needs a frame while {_name(holding)} is the first of {self.num_frames} that "
            "wait for their backward. Plan all frames, or take a schedule that has fewer microbatches open"
        )

    def __str__(self) -> str:
        if self.kind == "by_hand":
            return f"Schedule(num_frames={self.num_frames}, num_workspaces={self.num_workspaces})"
        given = ", ".join(f"{name}={value}" for name, value in self.parameters)
        return f"Schedule.{self.kind}({given})"


def _gpipe_passes(num_microbatches: int) -> Iterator[Pass]:
    for microbatch in range(num_microbatches):
        yield "forward", microbatch, 0
    for microbatch in reversed(range(num_microbatches)):
        yield "backward", microbatch, 0


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warmup: int
) -> Iterator[Pass]:
    """Yield `warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    num_pairs = len(forwards) - warmup
    for use in forwards[:warmup]:
        yield "forward", *use
    for forward, backward in zip(forwards[warmup:], backwards[:num_pairs], strict=True):
        yield "forward", *forward
        yield "backward", *backward
    for use in backwards[num_pairs:]:
        yield "backward", *use


def _derive(kind: str, parameters: dict[str, int], passes: Iterator[Pass], num_workspaces: int = 1) -> Schedule:
    """Give each layer of each pass the lowest free frame; a backward frees what its forward took."""
    order = tuple(passes)
    frames: dict[_Use, int] = {}
    free: list[int] = []
    first_users: list[tuple[_Use, _Use]] = []  # of each frame: who takes it first, and who has waited longest by then
    waiting: dict[_Use, None] = {}
    for direction, microbatch, chunk in order:
        for layer in range(parameters["num_layers"]):
            use = (layer, microbatch, chunk)
            if direction == "backward":
                heapq.heappush(free, frames[use])
                del waiting[use]
                continue
            waiting[use] = None
            frames[use] = heapq.heappop(free) if free else len(first_users)
            if frames[use] == len(first_users):
                first_users.append((use, next(iter(waiting))))
    return Schedule(
        len(first_users), num_workspaces, kind=kind, parameters=tuple(parameters.items()), passes=order, _frames=frames,
        _first_users=tuple(first_users),
    )  # fmt: skip


def _name(use: _Use) -> str:
    layer, microbatch, chunk = use
    return f"(layer {layer}, microbatch {microbatch}, chunk {chunk})"


def _check_count(name: str, value: object, limit: int = 2**31 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise ConfigError(f"Schedule: {name}={value!r} must be an integer from 1 to {limit}; correct {name}")


def _checked_counts(**counts: int) -> dict[str, int]:
    for name, value in counts.items():
        _check_count(name, value)
    return counts


def _checked_stage(stage: object, num_stages: int) -> int:
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage < num_stages:
        raise ConfigError(
            f"Schedule: stage={stage!r} must be an integer from 0 to {num_stages - 1} (num_stages={num_stages}); "
            "stage 0 holds the first layers"
        )
    return stage
