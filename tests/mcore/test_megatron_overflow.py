"""Overflow under Megatron-Core's own rerun runner: rows that were dropped come back, and the arena has grown."""

from __future__ import annotations

from typing import Any

from ranks import Pool, raised

FACTOR = {"moe_expert_rank_capacity_factor": 0.75}
TOKENS = {"lengths": (32,)}  # 64 tokens a rank: the factor is of whole chunks of 64


def overflow_and_rerun(rank: int, group: Any, num_layers: int) -> dict[str, Any]:
    """Train three steps with too little room, the same batch twice; compare with a dispatcher that never drops."""
    from programs import Case, draw_batches, epbuf_model, largest_difference, run_program, stand_ins, stock
    from runner import rerun_runner, step

    case = Case(options={**FACTOR, "num_layers": num_layers}, **TOKENS)
    with stand_ins():
        wanted = stock(group, Case(options={"num_layers": num_layers}, **TOKENS))
        with epbuf_model(group, case) as (model, installation):
            config = model.layers[0].config
            with rerun_runner(model, config) as (runner, schedule):
                batch = draw_batches(rank, 32, 3)[0]
                y = step(runner, batch)
                found = {"y0": y, "dx0": batch[0].grad, **{n: p.grad for n, p in model.named_parameters()}}
                arena = installation.arena
                assert arena is not None
                grown = arena.capacity_rows
                # The rows of the dropped pass reached x.grad too: runner zeroes weights' gradients only.
                again = draw_batches(rank, 32, 3)[0]
                y = step(runner, again)
                second = {"y0": y, "dx0": again[0].grad, **{n: p.grad / 2 for n, p in model.named_parameters()}}
                manager = model.layers[0].token_dispatcher._comm_manager
                outcome = {
                    "first": largest_difference({k: found[k] for k in found if k != "dx0"},
                                                {k: wanted[k] for k in wanted if k != "dx0"}),
                    "second": largest_difference(second, wanted),
                    "calls": len(schedule.demands),
                    "demands": schedule.demands,
                    "planned": 64 * 2 * 3 // 4,
                    "grown": grown,
                    "factor": manager.moe_expert_rank_capacity_factor,
                    "over_budget": bool(manager.over_budget),
                }  # fmt: skip
    del run_program
    return outcome


def test_overflow_is_rerun_and_the_arena_grows(pool: Pool) -> None:
    """The first step runs twice and equals the alltoall dispatcher; the second has room and runs once."""
    for found in pool.run(2, overflow_and_rerun, 2):
        assert found["first"] == 0.0
        assert found["second"] == 0.0
        assert found["calls"] == 3
        assert found["grown"] > found["planned"]
        assert found["factor"] == 0.75
        assert not found["over_budget"]


def test_growth_is_by_the_demand_of_the_pass_without_drops(pool: Pool) -> None:
    """A layer behind the one that dropped rows needs more than the dropped pass showed; the rerun has it all the same.

    Routing of later layers in a pass that drops rows is wrong, so its peak is too small.
    """
    by_rank = pool.run(2, overflow_and_rerun, 4)
    dropped = max(max(found["demands"][0]) for found in by_rank)
    assert by_rank[0]["grown"] > dropped
    assert all(found["calls"] == 3 and found["first"] == 0.0 for found in by_rank)
