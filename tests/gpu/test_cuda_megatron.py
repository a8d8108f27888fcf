"""Megatron-Core MoE layers on CUDA: captured whole, by epbuf and by Megatron-Core itself; growth beside graphs.

Its dispatcher refuses one rank.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from gpus import GpuPool, places

sys.path.append(str(Path(__file__).resolve().parent.parent / "mcore"))  # programs that both devices run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

LIMIT_S = 240.0  # importing Megatron-Core
CLOSE = {"rtol": 2e-2, "atol": 2e-2}  # bfloat16; a capture may take another GEMM, a wrong row is off by more


def batches_of(rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    from programs import draw_batches

    return [
        (x.detach().to("cuda", torch.bfloat16), y.to("cuda", torch.bfloat16)) for x, y in draw_batches(rank, 16, count)
    ]


def replayed(rank: int, group: Any, window: str, num_replays: int) -> dict[str, Any]:
    """Capture forward and backward, replay with other batches, compare each with an eager step."""
    from capturing import STATIC, captured_training, grouped_model, training_step
    from megatron_layers import stand_ins

    with stand_ins(), grouped_model(group, STATIC, length=16, device="cuda", window=window) as (model, installation):
        batches = batches_of(rank, num_replays)
        step = captured_training(model, installation, batches[0])
        eager = training_step(model)
        counts = set()
        for batch in batches:
            found = [tensor.clone() for tensor in step(*batch)]
            for got, wanted in zip(found, eager(*batch), strict=True):
                torch.testing.assert_close(got, wanted, **CLOSE)
            counts.add(tuple(installation.arena.region("counts").tolist()))
        step.check()
        frames = installation.arena.report()["num_frames_high_water"]
        allocations = installation.arena.window_allocations
        step.close()
    return {"routings": len(counts), "frames": frames, "allocations": allocations}


@places((2, "torch_symm"), (4, "torch_symm"), (2, "nccl"))
def test_a_hundred_replays_equal_eager_steps(pool: GpuPool, num_ranks: int, window: str) -> None:
    for found in pool.run(num_ranks, replayed, window, 100, limit_s=LIMIT_S):
        assert found["routings"] > 50
        assert (found["frames"], found["allocations"]) == (2, 1)


def full_iteration(rank: int, group: Any, window: str) -> int:
    """Let Megatron-Core's own wrapper capture a training step; validate eagerly between its replays."""
    from capturing import STATIC, grouped_model, training_step
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron_layers import stand_ins

    initialize_rng_tracker(use_cudagraphable_rng=True)
    meet = functools.partial(torch.distributed.barrier, group)  # the wrapper means every process of the world
    with (
        mock.patch.object(torch.distributed, "barrier", meet),
        stand_ins(),
        grouped_model(group, STATIC, length=16, device="cuda", window=window) as (model, installation),
    ):
        eager = training_step(model)

        def forward_backward(*, data_iterator: Any, **_: Any) -> list[torch.Tensor]:
            batch = next(data_iterator[0])
            return eager(batch["x"], batch["target"])

        wrapper = FullCudaGraphWrapper(forward_backward, cuda_graph_warmup_steps=1)
        batches = batches_of(rank, 10)
        for x, target in batches:
            data = [iter([{"x": x, "target": target}])]
            found = wrapper(
                model=[model], data_iterator=data, num_microbatches=1, seq_length=16, forward_only=False
            )  # fmt: skip
            found = [tensor.clone() for tensor in found]
            with torch.no_grad():
                model(batches[0][0])
            for got, wanted in zip(found, eager(x, target), strict=True):
                torch.testing.assert_close(got, wanted, **CLOSE)
        num_graphs = len(installation.arena.report()["graphs"])
        wrapper.reset_cuda_graph()
        del found, wrapper
    return num_graphs


@places((2, "torch_symm"), (2, "nccl"))
def test_full_iteration_graphs_of_megatron(pool: GpuPool, num_ranks: int, window: str) -> None:
    assert pool.run(num_ranks, full_iteration, window, limit_s=LIMIT_S) == [1] * num_ranks


def grown_beside_a_graph(rank: int, group: Any, window: str) -> list[int]:
    """Grow, and ask for memory to be freed, while a graph holds the old one; the graph still replays right."""
    from capturing import STATIC, grouped_model, training_step
    from graphed import captured
    from megatron_layers import stand_ins

    from epbuf.integrations import megatron

    options = {**STATIC, "moe_expert_rank_capacity_factor": 2.0}
    with stand_ins(), grouped_model(group, options, length=16, device="cuda", window=window) as (model, _):
        arena = megatron.prepare(model)
        batch = batches_of(rank, 2)
        x, target = (part.clone() for part in batch[0])
        eager = training_step(model)
        graph, outputs = captured(lambda: eager(x, target), mode="thread_local")
        manager = model.layers[0].token_dispatcher._comm_manager
        manager.grow_recv_capacity(arena.capacity_rows + 1)
        type(manager)._zc_fwd_token_buf = None
        wanted = eager(*batch[1])
        generations = [each["generation"] for each in arena.report()["generations"]]
        x.copy_(batch[1][0])
        target.copy_(batch[1][1])
        graph.replay()
        for got, want in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(got, want, **CLOSE)
        del graph, outputs, got
    return generations


@places((2, "torch_symm"), (2, "nccl"))
def test_a_graph_replays_in_its_memory_after_growth(pool: GpuPool, num_ranks: int, window: str) -> None:
    assert pool.run(num_ranks, grown_beside_a_graph, window, limit_s=LIMIT_S) == [[0, 1]] * num_ranks
