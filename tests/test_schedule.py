"""Schedules against a simulated pipeline: no frame is taken twice, and every frame is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epbuf.errors import ConfigError
from epbuf.schedule import MAX_FRAMES, Schedule

UNTIMED = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)  # CI machines are shared

Pass = tuple[str, int, int]  # direction, microbatch, chunk
Use = tuple[int, int, int]  # layer, microbatch, chunk


def megatron_order(num_stages: int, stage: int, num_microbatches: int, num_chunks: int) -> list[Pass]:
    """Order of passes on one stage by number of pass, as Megatron-Core computes it in its schedule loops."""
    total = num_microbatches * num_chunks
    warmup = num_stages - stage - 1
    if num_chunks > 1:
        warmup = 2 * warmup + (num_chunks - 1) * num_stages

    def use(number: int) -> tuple[int, int]:
        group = num_stages if num_chunks > 1 else 1
        round_, rest = divmod(number, group * num_chunks)
        return round_ * group + rest % group, rest // group

    def forward(number: int) -> Pass:
        return ("forward", *use(number))

    def backward(number: int) -> Pass:
        microbatch, chunk = use(number)
        return "backward", microbatch, num_chunks - 1 - chunk

    order = []
    for number in range(total + warmup):
        if number < total:
            order.append(forward(number))
        if number >= warmup:
            order.append(backward(number - warmup))
    return order


def run_pipeline(orders: list[list[Pass]], num_chunks: int) -> None:
    """Run all stages, each in its own order; fail when they wait for each other in a ring."""
    num_stages = len(orders)
    done: set[tuple[int, Pass]] = set()

    def needs(stage: int, step: Pass) -> tuple[int, Pass] | None:
        direction, microbatch, chunk = step
        ahead = stage + chunk * num_stages + (-1 if direction == "forward" else 1)
        if ahead < 0:
            return None
        if ahead == num_stages * num_chunks:
            return stage, ("forward", microbatch, chunk)
        return ahead % num_stages, (direction, microbatch, ahead // num_stages)

    waiting = [list(reversed(order)) for order in orders]
    while any(waiting):
        ready = [s for s, left in enumerate(waiting) if left and needs(s, left[-1]) in done | {None}]
        assert ready, [left[-1] for left in waiting if left]
        done.update((stage, waiting[stage].pop()) for stage in ready)


def open_frames(order: Iterable[Pass], num_layers: int, frame: Callable[[Use], int]) -> Iterator[set[int]]:
    """Yield the frames in use after each pass; fail when a use takes a frame that another still has."""
    owner: dict[int, Use] = {}
    for direction, microbatch, chunk in order:
        for layer in range(num_layers):
            use = (layer, microbatch, chunk)
            if direction == "forward":
                assert frame(use) not in owner, f"{use} takes frame {frame(use)} of {owner[frame(use)]}"
                owner[frame(use)] = use
            else:
                assert owner.pop(frame(use)) == use
        yield set(owner)
    assert not owner


def assert_exact(schedule: Schedule, order: list[Pass], num_layers: int) -> None:
    """Check that the schedule's frames never collide and that no fewer would do."""
    taken = list(open_frames(order, num_layers, lambda use: schedule.frame(*use)))
    assert max(len(frames) for frames in taken) == schedule.num_frames
    assert set().union(*taken) == set(range(schedule.num_frames))


def smallest_ring(order: list[Pass], num_layers: int) -> int:
    """Fewest frames with which the n-th use can take frame n mod F."""
    uses = [(layer, m, c) for direction, m, c in order if direction == "forward" for layer in range(num_layers)]
    number = {use: n for n, use in enumerate(uses)}
    for num_frames in range(1, len(uses) + 1):
        try:
            list(open_frames(order, num_layers, lambda use, num_frames=num_frames: number[use] % num_frames))
        except AssertionError:
            continue
        return num_frames
    raise AssertionError("a ring of all uses never collides")


@UNTIMED
@given(
    num_stages=st.integers(1, 5), groups=st.integers(1, 4), num_chunks=st.integers(1, 4), num_layers=st.integers(1, 3)
)
def test_interleaved_frames_are_exact_in_a_running_pipeline(
    num_stages: int, groups: int, num_chunks: int, num_layers: int
) -> None:
    num_microbatches = num_stages * groups
    orders = [megatron_order(num_stages, stage, num_microbatches, num_chunks) for stage in range(num_stages)]
    if num_chunks > 1:
        run_pipeline(orders, num_chunks)
        for stage, order in enumerate(orders):
            schedule = Schedule.interleaved(num_layers, num_stages, stage, num_microbatches, num_chunks)
            assert_exact(schedule, order, num_layers)


@UNTIMED
@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 12), num_layers=st.integers(1, 3))
def test_one_f_one_b_frames_are_exact_in_a_running_pipeline(
    num_stages: int, num_microbatches: int, num_layers: int
) -> None:
    orders = [megatron_order(num_stages, stage, num_microbatches, 1) for stage in range(num_stages)]
    run_pipeline(orders, 1)
    for stage, order in enumerate(orders):
        schedule = Schedule.one_f_one_b(num_layers, num_stages, stage, num_microbatches)
        assert schedule.num_frames == num_layers * min(num_stages - stage, num_microbatches)
        assert_exact(schedule, order, num_layers)


def paired_order(num_stages: int, stage: int, num_microbatches: int) -> list[Pass]:
    """Order of 1F1B with one more forward before the first backward."""
    warmup = min(num_stages - stage, num_microbatches)
    order: list[Pass] = [("forward", m, 0) for m in range(warmup)]
    for m in range(num_microbatches):
        order += [("forward", m + warmup, 0)] if m + warmup < num_microbatches else []
        order.append(("backward", m, 0))
    return order


@UNTIMED
@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 12), num_layers=st.integers(1, 3))
def test_overlap_frames_are_exact_in_a_running_pipeline(
    num_stages: int, num_microbatches: int, num_layers: int
) -> None:
    orders = [paired_order(num_stages, stage, num_microbatches) for stage in range(num_stages)]
    run_pipeline(orders, 1)
    for stage, order in enumerate(orders):
        schedule = Schedule.one_f_one_b_overlap(num_layers, num_stages, stage, num_microbatches)
        assert schedule.num_frames == num_layers * min(num_stages - stage + 1, num_microbatches)
        assert (list(schedule.passes), schedule.num_workspaces) == (order, 2)
        assert_exact(schedule, order, num_layers)


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        pytest.param(Schedule.sequential(2), [("forward", 0, 0), ("backward", 0, 0)], id="sequential"),
        pytest.param(Schedule.one_f_one_b(1, 4, 1, 8), megatron_order(4, 1, 8, 1), id="1f1b"),
        pytest.param(Schedule.interleaved(1, 4, 2, 8, 2), megatron_order(4, 2, 8, 2), id="interleaved"),
        pytest.param(Schedule(3), [], id="by-hand"),
    ],
)
def test_schedule_says_the_order_of_its_passes(schedule: Schedule, order: list[Pass]) -> None:
    assert list(schedule.passes) == order


@UNTIMED
@given(num_layers=st.integers(1, 4), num_microbatches=st.integers(1, 8))
def test_gpipe_frames_are_exact(num_layers: int, num_microbatches: int) -> None:
    microbatches = range(num_microbatches)
    order = [("forward", m, 0) for m in microbatches] + [("backward", m, 0) for m in reversed(microbatches)]
    schedule = Schedule.gpipe(num_layers, num_microbatches)
    assert schedule.num_frames == num_layers * num_microbatches
    assert_exact(schedule, order, num_layers)


@UNTIMED
@given(num_layers=st.integers(1, 4), num_microbatches=st.integers(1, 8))
def test_sequential_frames_are_exact_for_any_microbatch(num_layers: int, num_microbatches: int) -> None:
    order = [(direction, m, 0) for m in range(num_microbatches) for direction in ("forward", "backward")]
    schedule = Schedule.sequential(num_layers)
    assert schedule.num_frames == num_layers
    assert_exact(schedule, order, num_layers)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule.sequential(4),
        Schedule.gpipe(3, 5),
        *(Schedule.one_f_one_b(2, 4, stage, 8) for stage in range(4)),
        *(Schedule.one_f_one_b_overlap(3, 4, stage, 8) for stage in range(4)),
        *(Schedule.interleaved(2, 4, stage, 8, num_chunks) for stage in range(4) for num_chunks in (2, 3)),
    ],
    ids=str,
)
def test_a_frame_serves_one_layer(schedule: Schedule) -> None:
    chunks = {chunk for _, _, chunk in schedule.passes}
    for _, microbatch, chunk in schedule.passes:
        for layer in range(schedule.num_layers):
            assert schedule.layer_of(schedule.frame(layer, microbatch, chunk)) == layer
    assert len(chunks) == dict(schedule.parameters).get("num_chunks", 1)


def test_by_hand_each_frame_is_a_layer() -> None:
    schedule = Schedule(3, 2)
    assert schedule.num_layers == 3 and [schedule.layer_of(frame) for frame in range(3)] == [0, 1, 2]


def test_interleaved_takes_22_frames_where_a_ring_takes_30() -> None:
    order = megatron_order(num_stages=4, stage=0, num_microbatches=8, num_chunks=2)
    schedule = Schedule.interleaved(num_layers=2, num_stages=4, stage=0, num_microbatches=8, num_chunks=2)
    assert schedule.num_frames == 22
    assert smallest_ring(order, num_layers=2) == 30
    with pytest.raises(AssertionError, match="takes frame"):
        list(open_frames(order, 2, lambda use: (use[1] * 2 + use[0]) % 22))


@pytest.mark.parametrize(
    ("schedule", "num_frames"),
    [
        pytest.param(Schedule.one_f_one_b(1, 4, 0, 8), 4, id="1f1b_first_stage"),
        pytest.param(Schedule.one_f_one_b(2, 4, 3, 8), 2, id="1f1b_last_stage"),
        pytest.param(Schedule.one_f_one_b(1, 8, 0, 3), 3, id="1f1b_few_microbatches"),
        pytest.param(Schedule.interleaved(1, 4, 3, 8, 2), 5, id="interleaved_last_stage"),
        pytest.param(Schedule.interleaved(3, 4, 0, 4, 2), 24, id="interleaved_all_warmup"),
    ],
)
def test_schedule_numbers_follow_their_docstring(schedule: Schedule, num_frames: int) -> None:
    assert schedule.num_frames == num_frames


def test_schedule_takes_lowest_free_frame() -> None:
    schedule = Schedule.one_f_one_b(num_layers=2, num_stages=2, stage=0, num_microbatches=4)
    frames = [[schedule.frame(layer, microbatch) for layer in range(2)] for microbatch in range(4)]
    assert frames == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_schedule_needs_one_workspace_of_each_kind() -> None:
    assert Schedule.interleaved(2, 4, 0, 8, 2).num_workspaces == Schedule.sequential(3).num_workspaces == 1
    assert Schedule(num_frames=2, num_workspaces=2).num_workspaces == 2


def test_schedule_by_hand_names_no_frames() -> None:
    with pytest.raises(ConfigError, match=r"Schedule\(num_frames=3, num_workspaces=1\).*arena.acquire"):
        Schedule(3).frame(0, 0)


@pytest.mark.parametrize("use", [(2, 0, 0), (0, 8, 0), (0, 0, 2), (-1, 0, 0), (0, -1, 0)])
def test_schedule_refuses_unknown_use(use: Use) -> None:
    with pytest.raises(ConfigError, match="has no such use"):
        Schedule.interleaved(2, 4, 0, 8, 2).frame(*use)


@pytest.mark.parametrize("use", [(2, 0, 0), (0, 0, 1), (-1, 0, 0), (0, -1, 0)])
def test_sequential_refuses_unknown_use(use: Use) -> None:
    with pytest.raises(ConfigError, match="has no such use"):
        Schedule.sequential(2).frame(*use)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: Schedule(0), "num_frames=0", id="no_frame"),
        pytest.param(lambda: Schedule(MAX_FRAMES + 1), f"num_frames={MAX_FRAMES + 1}", id="too_many_frames"),
        pytest.param(lambda: Schedule(1, 0), "num_workspaces=0", id="no_workspace"),
        pytest.param(lambda: Schedule(1.5), "num_frames=1.5", id="fraction"),  # type: ignore[arg-type]
        pytest.param(lambda: Schedule.sequential(0), "num_layers=0", id="no_layer"),
        pytest.param(lambda: Schedule.gpipe(1, 0), "num_microbatches=0", id="no_microbatch"),
        pytest.param(lambda: Schedule.one_f_one_b(1, 4, 4, 8), "stage=4.*from 0 to 3", id="stage_past_end"),
        pytest.param(lambda: Schedule.one_f_one_b(1, 4, -1, 8), "stage=-1", id="stage_negative"),
        pytest.param(lambda: Schedule.interleaved(1, 4, 0, 6, 2), "num_stages=4.*num_microbatches=6", id="odd_group"),
    ],
)
def test_schedule_refuses_bad_value(make: Callable[[], Schedule], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_schedule_prints_how_it_was_made() -> None:
    assert str(Schedule.gpipe(2, 3)) == "Schedule.gpipe(num_layers=2, num_microbatches=3)"
    assert str(Schedule(2, 2)) == "Schedule(num_frames=2, num_workspaces=2)"
