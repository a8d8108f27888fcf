"""Captured MoE layers of Megatron-Core: whole steps, router graphs that put tensors back, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ranks import Pool, raised

from epbuf.errors import CaptureError

REPLAYS = 20


def replays(rank: int, group: Any) -> dict[str, Any]:
    """Capture a training step and replay it with other batches; compare with eager steps."""
    from capturing import STATIC, captured_training, grouped_model, training_step
    from programs import draw_batches, stand_ins

    with stand_ins(), grouped_model(group, STATIC, length=16) as (model, installation):
        batches = [tuple(t.detach() for t in batch) for batch in draw_batches(rank, 16, REPLAYS)]
        step = captured_training(model, installation, batches[0])
        eager = training_step(model)
        differences, counts = [], set()
        for batch in batches:
            found = [tensor.clone() for tensor in step(*batch)]
            wanted = eager(*batch)
            differences += [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]
            counts.add(tuple(installation.arena.region("counts").tolist()))
        step.check()
        report = installation.arena.report()
        step.close()
    return {"largest": max(differences), "routings": len(counts), "frames": report["num_frames_high_water"]}


def test_replays_with_other_routings_equal_eager(pool: Pool) -> None:
    for found in pool.run(2, replays):
        assert found == {"largest": 0.0, "routings": REPLAYS, "frames": 2}


def grouped_against_alltoall(rank: int, group: Any) -> float:
    """Compare experts that read counts on the device, and get all C rows, with the stock dispatcher's exact rows."""
    from capturing import STATIC, grouped_model, training_step
    from megatron_layers import ALLTOALL, GroupedExperts, Layers, groups_of, layer_spec, make_config
    from programs import draw_batches, stand_ins

    batch = draw_batches(rank, 16, 1)[0]
    with stand_ins():
        groups = groups_of(group)
        wanted = training_step(Layers(make_config(groups, **ALLTOALL), groups, layer_spec(GroupedExperts)))(*batch)
        with grouped_model(group, STATIC, length=16, plan={"expert_alignment": 1}) as (model, _):
            found = training_step(model)(*batch)
        return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def test_rows_past_the_last_zone_are_never_read(pool: Pool) -> None:
    assert pool.run(2, grouped_against_alltoall) == [0.0, 0.0]


def first_dispatch_in_a_capture(rank: int, group: Any) -> list[str]:
    from capturing import STATIC, grouped_model
    from programs import draw_batches, stand_ins

    import epbuf
    from epbuf.integrations import megatron

    small = epbuf.EpConfig(num_ranks=1, num_experts=1, num_topk=1, hidden=8, max_tokens_per_rank=1)
    with stand_ins(), grouped_model(group, STATIC, length=16) as (model, installation):
        x = draw_batches(rank, 16, 1)[0][0].detach()
        with epbuf.Arena.open(epbuf.Plan.build(small)) as other:
            refused = raised(CaptureError, lambda: epbuf.CapturedStep.capture(other, model, (x,)))
            assert installation.arena is None
        megatron.prepare(model)
        assert installation.arena is not None
        epbuf.CapturedStep.capture(installation.arena, lambda x: model(x).detach(), (x,)).close()
    return [refused]


def test_first_dispatch_inside_a_capture_names_the_missing_line(pool: Pool) -> None:
    for (refused,) in pool.run(2, first_dispatch_in_a_capture):
        assert "add the line: epbuf.integrations.megatron.prepare(model)" in refused


def forward_without_backward(rank: int, group: Any) -> tuple[int, int]:
    from programs import Case, draw_batches, epbuf_model, stand_ins

    x = draw_batches(rank, 16, 1)[0][0]
    with stand_ins(), epbuf_model(group, Case()) as (model, installation):
        for _ in range(3):
            y = model(x)
            del y
        report = installation.arena.report()
    return len(report["claims"]), report["num_frames_high_water"]


def test_a_forward_that_no_backward_follows_leaves_no_claim(pool: Pool) -> None:
    """The routing that a layer remembers must not keep the graph of the layers before it."""
    assert pool.run(2, forward_without_backward) == [(0, 2), (0, 2)]


def exact_rows_in_a_capture(rank: int, group: Any) -> str:
    from capturing import grouped_model
    from programs import draw_batches, stand_ins

    import epbuf
    from epbuf.integrations import megatron

    with stand_ins(), grouped_model(group, {}, length=16) as (model, _):
        arena = megatron.prepare(model)
        x = draw_batches(rank, 16, 1)[0][0].detach()
        return raised(CaptureError, lambda: epbuf.CapturedStep.capture(arena, model, (x,)))


def test_experts_that_need_exact_rows_are_refused_in_a_capture(pool: Pool) -> None:
    for refused in pool.run(2, exact_rows_in_a_capture):
        assert re.search("moe_ncclep_static_shape=True", refused)


def no_drops_in_a_capture(rank: int, group: Any) -> str:
    from capturing import STATIC, grouped_model
    from programs import draw_batches, stand_ins

    import epbuf
    from epbuf.integrations import megatron

    options = {**STATIC, "moe_expert_rank_capacity_factor": 0.75}
    with stand_ins(), grouped_model(group, options, length=16) as (model, _):
        arena = megatron.prepare(model)
        for layer in model.layers:
            layer.token_dispatcher._comm_manager.moe_expert_rank_capacity_factor = None  # as the rerun runner does
        x = draw_batches(rank, 16, 1)[0][0].detach()
        return raised(CaptureError, lambda: epbuf.CapturedStep.capture(arena, model, (x,)))


def test_a_capture_that_may_drop_no_row_needs_room_for_all(pool: Pool) -> None:
    for refused in pool.run(2, no_drops_in_a_capture):
        assert "no row may be dropped" in refused


def router_graph(rank: int, group: Any) -> float:
    """Put the routing tensors of one batch back, as a replayed router graph does, after Python has seen another."""
    import torch
    from programs import Case, draw_batches, epbuf_model, stand_ins

    with stand_ins(), epbuf_model(group, Case()) as (model, _):
        layer = model.layers[0]
        dispatcher = layer.token_dispatcher
        x = draw_batches(rank, 16, 1)[0][0].detach()
        with torch.no_grad():
            wanted = layer(x)[0]
            rows, probs = layer.preprocess(x, *layer.route(x))
            names = [name.split(".")[-1] for name in dispatcher.cudagraph_attrs]
            kept = [getattr(dispatcher._comm_manager, name).clone() for name in names]
            shape = dispatcher.hidden_shape
            layer.preprocess(x[:3], *layer.route(x[:3]))  # another batch, shorter
            dispatcher.hidden_shape = shape  # Megatron-Core's own, which it restores itself
            for name, tensor in zip(names, kept, strict=True):
                setattr(dispatcher._comm_manager, name, tensor)
            output, _ = layer.routed_experts_compute(*layer.dispatch(rows, probs))
            found = layer.postprocess(layer.combine(output), None)
        return (found - wanted).abs().max().item()


def test_routing_tensors_put_back_are_all_that_a_dispatch_needs(pool: Pool) -> None:
    assert pool.run(2, router_graph) == [0.0, 0.0]


@pytest.mark.parametrize("flag", [True, False], ids=["zero copy", "staged"])
def test_experts_may_write_into_the_window(pool: Pool, flag: bool) -> None:
    """With moe_ncclep_zero_copy experts get the window's own regions, and no row is staged."""
    for difference, staged in pool.run(2, zero_copy, flag):
        assert difference == 0.0
        assert (staged == 0) == flag


def zero_copy(rank: int, group: Any, flag: bool) -> tuple[float, int]:
    from capturing import STATIC, grouped_model, training_step
    from megatron_layers import GroupedExperts
    from programs import draw_batches, stand_ins
    from writing import WritingExperts

    batch = draw_batches(rank, 16, 1)[0]
    with stand_ins():
        with grouped_model(group, STATIC, length=16) as (model, _):
            wanted = training_step(model)(*batch)
        options = {**STATIC, "moe_ncclep_zero_copy": flag}
        experts = WritingExperts if flag else GroupedExperts
        with grouped_model(group, options, length=16, experts=experts) as (model, installation):
            found = training_step(model)(*batch)
            staged = installation.arena.report()["staged_bytes"]
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)), staged
