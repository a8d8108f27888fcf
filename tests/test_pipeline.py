"""Pipeline schedules captured and run: graphs/pipeline.py against the same model one micro-batch after the other."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epbuf
from epbuf.errors import ConfigError, LeaseError
from graphs import pipeline
from graphs.pipeline import Found, Options, Pipeline

CPU = torch.device("cpu")


@pytest.mark.parametrize("repeats", [False, True], ids=["layers", "one-layer-repeated"])
@pytest.mark.parametrize("kind", pipeline.KINDS)
def test_captured_schedule_equals_one_by_one_and_uses_its_frames(kind: str, repeats: bool) -> None:
    found = pipeline.compare(Options(kind, repeats, num_steps=2), None, CPU)
    assert found.difference == 0
    assert [used for used, _ in found.num_frames] == [planned for _, planned in found.num_frames]


def test_pipeline_runs_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline.main(["--ranks", "2", "--steps", "2", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("one_f_one_b, rank") == out.count("interleaved, rank") == 2
    assert out.count("differ by 0;") == 4
    assert "[(8, 8), (6, 6), (4, 4), (2, 2)]" in out
    assert "[(22, 22), (18, 18), (14, 14), (10, 10)]" in out


@pytest.mark.parametrize("kind", [kind for kind in pipeline.KINDS if kind != "sequential"])
def test_plan_with_one_frame_fewer_is_refused_when_it_runs(kind: str) -> None:
    with pytest.raises(
        LeaseError, match=r"(?s)acquire\(frame=\d+\) asks for a frame.*in use by:\n  frame 0: .*pipeline"
    ):
        pipeline.compare(Options(kind, num_steps=1, num_fewer=1), None, CPU)


@pytest.mark.parametrize(
    ("schedule", "asking", "holding"),
    [
        pytest.param(epbuf.Schedule.one_f_one_b(1, 4, 0, 8), (0, 3, 0), (0, 0, 0), id="1f1b"),
        pytest.param(epbuf.Schedule.one_f_one_b(2, 4, 1, 8), (1, 2, 0), (0, 0, 0), id="1f1b-two-layers"),
        pytest.param(epbuf.Schedule.one_f_one_b_overlap(1, 4, 0, 8), (0, 4, 0), (0, 0, 0), id="overlap"),
        pytest.param(epbuf.Schedule.interleaved(1, 4, 0, 8, 2), (0, 6, 0), (0, 0, 0), id="interleaved"),
        pytest.param(epbuf.Schedule.gpipe(1, 8), (0, 7, 0), (0, 0, 0), id="gpipe"),
    ],
)
def test_one_frame_fewer_is_refused_with_both_users(
    schedule: epbuf.Schedule, asking: tuple[int, int, int], holding: tuple[int, int, int]
) -> None:
    both = [rf"\(layer {layer}, microbatch {m}, chunk {chunk}\)" for layer, m, chunk in (asking, holding)]
    with pytest.raises(ConfigError, match=rf"needs {schedule.num_frames} frames.*{both[0]}.*while {both[1]}"):
        dataclasses.replace(schedule, num_frames=schedule.num_frames - 1)
    assert dataclasses.replace(schedule, num_frames=schedule.num_frames + 1).frame(*asking) < schedule.num_frames


def dense_layer(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Run every expert on every token, as plain torch does."""
    router, up, down = weights
    scores, ids = (x @ router).topk(pipeline.NUM_TOPK)
    by_expert = torch.stack([F.silu(x @ u) @ d for u, d in zip(up, down, strict=True)], dim=1)
    gates = torch.zeros(len(x), pipeline.NUM_EXPERTS).scatter(1, ids, scores.softmax(-1))
    return x + (by_expert * gates.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("repeats", [False, True], ids=["layers", "one-layer-repeated"])
@pytest.mark.parametrize("kind", ["one_f_one_b_overlap", "interleaved"])
def test_gradients_are_those_of_plain_torch(kind: str, repeats: bool) -> None:
    options = Options(kind, repeats)
    places = pipeline.draw_weights(0, 1, pipeline.NUM_STAGES * options.num_chunks, repeats=repeats)
    leaves = {id(w): w.requires_grad_() for place in places for layer in place for w in layer}
    with ExitStack() as stack:
        run = pipeline.open_pipeline(stack, options, kind, None, CPU)
        x, target = pipeline.draw_batches(0, 1, run.stages[0].arena)[0]
        losses, gradients = run.step(x, target)
    total = x.new_zeros(())
    for m in range(len(x)):
        y = x[m]
        for place in places:
            for layer in place:
                y = dense_layer(y, layer)
        loss = F.mse_loss(y, target[m]) / len(target)
        torch.testing.assert_close(losses[m], loss.detach(), rtol=1e-5, atol=1e-6)
        total = total + loss
    total.backward()
    wanted = []
    for number in range(pipeline.NUM_STAGES):
        mine = [places[chunk * pipeline.NUM_STAGES + number] for chunk in range(options.num_chunks)]
        distinct = {id(layer): layer for place in mine for layer in place}
        wanted += [w.grad for layer in distinct.values() for w in layer]
    assert len(wanted) == len(gradients) and len(leaves) == len(wanted)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-6)


def spied(run: Pipeline, number: int) -> list[tuple[str, int]]:
    """Note (op, frame) of every call that the engine of one stage gets from now on."""
    seen: list[tuple[str, int]] = []
    engine = run.stages[number].arena.engine
    for op in ("dispatch", "combine", "combine_backward", "dispatch_backward"):
        call = getattr(engine, op)

        def spy(place: Any, *rest: Any, op: str = op, call: Any = call, **options: Any) -> Any:
            seen.append((op, place.frame))
            return call(place, *rest, **options)

        setattr(engine, op, spy)
    return seen


@pytest.mark.parametrize("kind", ["gpipe", "one_f_one_b", "interleaved"])
def test_capture_and_replay_take_the_frames_of_the_schedule_in_its_order(kind: str) -> None:
    options = Options(kind)
    with ExitStack() as stack:
        run = pipeline.open_pipeline(stack, options, kind, None, CPU)
        stage = run.stages[1]
        batch = pipeline.draw_batches(0, 1, stage.arena)[0]
        step = epbuf.CapturedStep.capture([s.arena for s in run.stages], run.step, batch, warmup=0)
        seen = spied(run, 1)
        step(*batch)
        step.close()
    wanted = []
    for direction, m, chunk in stage.schedule.passes:
        layers = range(pipeline.NUM_LAYERS)
        for layer in layers if direction == "forward" else reversed(layers):
            ops = ("dispatch", "combine") if direction == "forward" else ("combine_backward", "dispatch_backward")
            wanted += [(op, stage.schedule.frame(layer, m, chunk)) for op in ops]
    assert seen == wanted


def test_overlap_keeps_a_forward_and_a_backward_chain_open_together() -> None:
    options = Options("one_f_one_b_overlap")
    with ExitStack() as stack:
        run = pipeline.open_pipeline(stack, options, options.kind, None, CPU)
        seen = spied(run, 3)  # the last stage, where a backward follows its own forward most closely
        run.step(*pipeline.draw_batches(0, 1, run.stages[0].arena)[0])
    ops = [op for op, _ in seen]
    pair = ["dispatch", "combine_backward", "combine", "dispatch", "dispatch_backward", "combine_backward"]
    pair += ["combine", "dispatch_backward"]  # of two layers
    starts = range(4, len(ops) - 4, len(pair))
    assert [ops[start : start + len(pair)] for start in starts] == [pair] * (pipeline.NUM_MICROBATCHES - 1)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(Found([1.0], 1e-9, [(2, 2)]), id="gradients"),
        pytest.param(Found([1.0], float("nan"), [(2, 2)]), id="nan"),
        pytest.param(Found([1.0], 0.0, [(1, 2)]), id="frames"),
    ],
)
def test_pipeline_fails_when_a_rank_differs(
    found: Found, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "run_ranks", lambda *_: [Found([1.0], 0.0, [(2, 2)]), found])
    assert pipeline.main(["--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_pipeline_sees_a_difference_in_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    train = Pipeline.train

    def changed(run: Pipeline, *batch: Tensor) -> Any:
        found = train(run, *batch)
        if run.overlaps:
            with torch.no_grad():
                run.all_weights()[-1][0, 0, 0] += 1e-6
        return found

    monkeypatch.setattr(Pipeline, "train", changed)
    assert pipeline.compare(Options("one_f_one_b_overlap", num_steps=1), None, CPU).difference > 0
