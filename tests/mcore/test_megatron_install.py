"""Installing under Megatron-Core: routes, undo, versions, when the arena opens and closes, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import package_info, parallel_state
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from ranks import Pool, raised

from epbuf.errors import ConfigError, LeaseError
from epbuf.integrations import megatron
from epbuf.integrations.megatron.installation import installed
from epbuf.integrations.megatron.planning import alignment_rows
from epbuf.integrations.megatron.refusals import REFUSALS

SIZES = {"seq_length": 16, "micro_batch_size": 2}
BOUND = (
    (token_dispatcher, "_NCCLEPManager"),
    (parallel_state, "destroy_model_parallel"),
    (fused_a2a, "nccl_ep_finalize"),
)


def names() -> list[object]:
    return [getattr(module, name) for module, name in BOUND]


@pytest.mark.parametrize(("route", "num_bound"), [("rebind", 3), ("spec", 2)])
def test_undo_puts_every_name_back(route: str, num_bound: int) -> None:
    before = names()
    installation = megatron.install(SIZES, route)
    assert sum(now is not old for now, old in zip(names(), before, strict=True)) == num_bound
    installation.undo()
    installation.undo()
    assert names() == before


def test_installing_twice_is_installing_once() -> None:
    before = names()
    first = megatron.install(SIZES)
    bound = names()
    assert megatron.install(dict(SIZES)) is first
    assert names() == bound
    first.undo()
    assert names() == before


@pytest.mark.parametrize(("sizes", "route"), [({**SIZES, "seq_length": 32}, "rebind"), (SIZES, "spec")])
def test_installing_something_else_names_both(sizes: dict[str, int], route: str) -> None:
    with megatron.install(SIZES), pytest.raises(ConfigError, match=r"installed already, with route 'rebind'.*undo"):
        megatron.install(sizes, route)


def test_undo_refuses_to_lose_what_others_bound_since(monkeypatch: pytest.MonkeyPatch) -> None:
    installation = megatron.install(SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(token_dispatcher, "_NCCLEPManager", object)
        with pytest.raises(ConfigError, match="_NCCLEPManager since"):
            installation.undo()
        assert parallel_state.destroy_model_parallel.installation is installation
    installation.undo()


@pytest.mark.parametrize("version", ["0.18.2", "0.19.20", "0.21.0", "1.0.0"])
def test_other_versions_are_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names()
    monkeypatch.setattr(package_info, "__version__", version)
    with pytest.raises(ConfigError, match=rf"knows Megatron-Core 0\.19\.2 and 0\.20 and found {version}"):
        megatron.install(SIZES)
    assert names() == before


@pytest.mark.parametrize("version", ["0.19.2", "0.19.2+1a2b3c4", "0.20.0", "0.20.0rc0"])
def test_known_versions_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_info, "__version__", version)
    megatron.install(SIZES).undo()


def test_a_manager_that_takes_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_dispatcher, "_NCCLEPManager", lambda group, config: None)
    with pytest.raises(ConfigError, match=r"lacks .*_NCCLEPManager\(num_local_experts=\)"):
        megatron.install(SIZES)


def test_unknown_route_and_recipe_are_refused() -> None:
    with pytest.raises(ConfigError, match='the routes are "rebind" and "spec"'):
        megatron.install(SIZES, "fork")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="found list"):
        megatron.install([4096])  # type: ignore[arg-type]


def test_functions_that_need_an_installation_or_a_layer_say_so() -> None:
    with pytest.raises(ConfigError, match="replace_dispatchers before install"):
        megatron.replace_dispatchers(torch.nn.Linear(1, 1))
    with megatron.install(SIZES) as installation, pytest.raises(ConfigError, match="no MoELayer in Linear"):
        installation.replace_dispatchers(torch.nn.Linear(1, 1))
    assert megatron.prepare(torch.nn.Linear(1, 1)) is None  # a pipeline stage without MoE layers


FORMATS = [{}, {"use_transformer_engine_op_fuser": True}, {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
           {"fp8": "e4m3", "fp8_recipe": "delayed"}, {"fp4": "e2m1", "fp4_recipe": "nvfp4"}]  # fmt: skip


@pytest.mark.parametrize("options", FORMATS, ids=["none", "fused", "mxfp8", "fp8", "fp4"])
def test_alignment_is_that_of_megatron(options: dict[str, Any]) -> None:
    from types import SimpleNamespace

    asked = {"use_transformer_engine_op_fuser": False, "fp8": None, "fp8_recipe": None, "fp4": None, "fp4_recipe": None}
    config = SimpleNamespace(**{**asked, **options})
    assert alignment_rows(config) == max(1, get_align_size_for_quantization(config))


def lazily_opened(rank: int, group: Any, route: str) -> dict[str, Any]:
    """Build, dispatch, destroy: what a training program does that calls nothing of epbuf in between."""
    from megatron.core import parallel_state
    from programs import Case, draw_batches, epbuf_model, stand_ins

    with stand_ins(), epbuf_model(group, Case(route=route)) as (model, installation):
        before = installation.arena
        x = draw_batches(rank, 16, 1)[0][0]
        y = model(x)
        arena = installation.arena
        allocations = arena.report()["window_allocations"]
        plan = arena.plan.fingerprint
        del y
        parallel_state.destroy_model_parallel()
        closed = arena.is_closed and installation.arena is None
        stale = raised(LeaseError, arena.acquire)
    return {"before": before, "allocations": allocations, "closed": closed, "plan": plan, "stale": stale}


@pytest.mark.parametrize("route", ["rebind", "spec", "replace"])
def test_arena_opens_with_the_first_dispatch_and_closes_before_the_groups(pool: Pool, route: str) -> None:
    for found in pool.run(2, lazily_opened, route):
        assert found["before"] is None
        assert found["allocations"] == 1
        assert found["closed"]
        assert "closed" in found["stale"]


def graph_alive(rank: int, group: Any) -> str:
    from capturing import STATIC, captured_training, grouped_model
    from megatron.core import parallel_state
    from programs import draw_batches, stand_ins

    with stand_ins(), grouped_model(group, STATIC, length=16) as (model, installation):
        step = captured_training(model, installation, draw_batches(rank, 16, 1)[0])
        refused = raised(LeaseError, parallel_state.destroy_model_parallel)
        step.close()
    return refused


def test_destroying_groups_while_a_graph_lives_is_refused(pool: Pool) -> None:
    """Megatron-Core would swallow it further down; here the groups are still there."""
    for refused in pool.run(2, graph_alive):
        assert "hold this memory" in refused


def sizes_of_batches(rank: int, group: Any) -> dict[str, Any]:
    """A first batch that is short, one that is as long as declared, and one that is longer on one rank."""
    import torch
    from programs import Case, epbuf_model, stand_ins

    case = Case(plan={"seq_length": 64, "micro_batch_size": 1})
    with stand_ins(), epbuf_model(group, case) as (model, installation), torch.no_grad():
        model(torch.randn(3, 1, 32))
        plan = installation.arena.plan
        longest = torch.randn(64, 1, 32)
        model(longest)
        refused = raised(ConfigError, lambda: model(torch.randn(65, 1, 32) if rank == 1 else longest))
        longest = model(longest)
    return {"planned": plan.config.max_tokens_per_rank, "capacity": plan.capacity_rows, "refused": refused,
            "afterwards": tuple(longest.shape)}  # fmt: skip


def test_nothing_is_sized_by_the_first_batch_and_a_longer_one_is_an_error_on_every_rank(pool: Pool) -> None:
    found = pool.run(2, sizes_of_batches)
    for each in found:
        assert (each["planned"], each["capacity"]) == (64, 2 * 64 * 2)
        assert each["afterwards"] == (64, 1, 32)
    assert "65 tokens came to an MoE layer (layer 0) and 64 a rank were declared" in found[1]["refused"]
    assert "give install the longest sequence" in found[1]["refused"]
    assert "rank 1" in found[0]["refused"]


def planned_for_another_model(rank: int, group: Any) -> str:
    from megatron_layers import FLEX, Layers, groups_of, make_config
    from programs import draw_batches, stand_ins

    import epbuf

    other = epbuf.EpConfig(
        num_ranks=2, num_experts=16, num_topk=2, hidden=64, max_tokens_per_rank=64, token_dtype="fp32",
        expert_alignment=8,
    )  # fmt: skip
    plan = epbuf.Plan.build(other, epbuf.Schedule.sequential(2), recv_policy=("keep", "recompute"))
    with stand_ins(), megatron.install(plan):
        groups = groups_of(group)
        model = Layers(make_config(groups, **FLEX), groups)
        manager = model.layers[0].token_dispatcher._comm_manager
        manager.needs = dataclasses.replace(manager.needs, alignment=16)  # of fp8, which needs a GPU
        return raised(ConfigError, lambda: model(draw_batches(rank, 16, 1)[0][0]))


def test_a_layer_that_does_not_fit_the_plan_names_every_difference(pool: Pool) -> None:
    for refused in pool.run(2, planned_for_another_model):
        for words in ("num_experts: the plan has 16, the layer 8", "hidden: the plan has 64, the layer 32",
                      "expert_alignment: the plan has 8, no multiple of the layer's 16",
                      "recv_policy: the plan's layers differ"):  # fmt: skip
            assert words in refused


def gpt_spec(rank: int, group: Any) -> list[str]:
    """Swap the layer inside Megatron-Core's own GPT layer spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False)
    with megatron.install(SIZES, "spec") as installation:
        swapped = installation.swap(spec)
        new = swapped.submodules.mlp.func
        return [spec.submodules.mlp.func.__name__, new.__name__, str(issubclass(new, MoELayer)),
                str(swapped.submodules.self_attention == spec.submodules.self_attention)]  # fmt: skip


def test_layer_spec_of_a_gpt_is_swapped_and_the_given_one_stays(pool: Pool) -> None:
    assert pool.run(1, gpt_spec) == [["MoELayer", "EpbufMoELayer", "True", "True"]]


def documented(rank: int, group: Any) -> list[Any]:
    """Run the blocks of the adapter's README, the second one over a model that is built already."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron_layers import ALLTOALL, Layers, groups_of, make_config
    from programs import draw_batches, stand_ins

    text = (Path(megatron.__file__).parent / "README.md").read_text()
    install_block, others = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    exec(install_block, {})
    recipe = installed().buffers.recipe
    installed().undo()
    with stand_ins():
        model = Layers(make_config(groups_of(group), **ALLTOALL), groups_of(group))
        given = {"megatron": megatron, "sizes": SIZES, "model": model,
                 "get_gpt_layer_local_spec": get_gpt_layer_local_spec}  # fmt: skip
        forgotten = raised(ConfigError, lambda: megatron.prepare(model))
        assert "2 MoE layer(s) and none with epbuf's manager" in forgotten
        exec(others, given)
        with given["installation"] as installation:
            model(draw_batches(rank, 16, 1)[0][0])
            opened = installation.arena is not None
    num_lines = sum(bool(line.strip()) for line in install_block.splitlines())
    return [recipe, num_lines, given["spec"].submodules.mlp.func.__name__, opened]


def test_blocks_of_the_readme_run(pool: Pool) -> None:
    recipe = {"seq_length": 4096, "micro_batch_size": 1, "num_microbatches": 8}
    assert pool.run(2, documented) == [[recipe, 2, "EpbufMoELayer", True]] * 2


@pytest.mark.parametrize("flag", [refusal.flag for refusal in REFUSALS])
def test_readme_lists_what_is_refused(flag: str) -> None:
    lines = (Path(megatron.__file__).parent / "README.md").read_text().splitlines()
    assert any(f"`{flag}`" in line and "| refused: " in line for line in lines)


def ranges(rank: int, group: Any) -> list[str]:
    """Record what a profiler would be told."""
    from unittest import mock

    import torch
    from programs import Case, draw_batches, epbuf_model, stand_ins

    told: list[str] = []
    with stand_ins(), epbuf_model(group, Case()) as (model, _):
        megatron.prepare(model)
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda.nvtx, "range_push", told.append),
            mock.patch.object(torch.cuda.nvtx, "range_pop", lambda: told.append("end")),
        ):
            model(draw_batches(rank, 16, 1)[0][0]).sum().backward()
    return told


def test_profiles_name_each_op_by_its_layer(pool: Pool) -> None:
    forward = [f"epbuf {op} layer {layer}" for layer in (1, 2) for op in ("dispatch", "combine")]
    backward = [f"epbuf {op} backward layer {layer}" for layer in (2, 1) for op in ("combine", "dispatch")]
    for told in pool.run(2, ranges):
        assert told == [word for name in forward + backward for word in (name, "end")]
