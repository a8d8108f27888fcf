"""engine="external" on CUDA: marks in stream order, real graphs, early reuse, adopted memory. Kernels are torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graphed import captured
from ranks import raised
from torch import Tensor

import epbuf
from epbuf.errors import ConfigError, LeaseError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SLEEP = 200_000_000  # cycles, some 100 ms


def plan_of(num_frames: int = 1, num_workspaces: int = 1, **changes: Any) -> epbuf.Plan:
    sizes: dict[str, Any] = {"num_experts": 4, "num_topk": 2, "hidden": 64, "max_tokens_per_rank": 128}
    config = epbuf.EpConfig(num_ranks=1, token_dtype="fp32", **{**sizes, **changes})
    return epbuf.Plan.build(config, epbuf.Schedule(num_frames, num_workspaces))


def memory_of(plan: epbuf.Plan) -> Tensor:
    return torch.full((plan.total_bytes,), 0xA5, dtype=torch.uint8, device="cuda")


@pytest.fixture(params=["open", "adopt"])
def arena(request: pytest.FixtureRequest) -> Iterator[epbuf.Arena]:
    plan = plan_of()
    if request.param == "adopt":
        opened = epbuf.Arena.adopt(plan, memory_of(plan))
    else:
        opened = epbuf.Arena.open(plan, device="cuda", engine="external")
    with opened as arena:
        yield arena


def test_use_on_another_stream_waits_for_the_last_one(arena: epbuf.Arena) -> None:
    """A frame and a workspace that are used on a second stream wait for kernels that the first was given before end."""
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one), arena.acquire() as lease:
        lease.begin()
        torch.cuda._sleep(SLEEP)
        lease.expert_out.fill_(1)
        lease.end()
    with torch.cuda.stream(two), arena.acquire() as lease:
        lease.begin()
        found = lease.expert_out.clone()
        lease.expert_out.fill_(2)
        lease.end()
    torch.cuda.synchronize()
    assert bool((found == 1).all())


def test_graph_of_marks_holds_its_memory(arena: epbuf.Arena) -> None:
    """A CUDA graph that anybody captures holds the arena; close() names its place, and works when it is gone."""
    x = torch.ones(arena.capacity_rows, 64, device="cuda")

    def step() -> Tensor:
        with arena.acquire() as lease:
            lease.begin()
            lease.recv_tokens.copy_(x)
            lease.expert_out.copy_(2 * lease.recv_tokens)
            y = lease.expert_out.clone()
            lease.end(total_recv_tokens=demand)
            return y

    demand = torch.tensor([7], device="cuda")
    graph, y = captured(step)
    assert "hold this memory" in raised(LeaseError, arena.close)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((y == 2 * value).all())
    demand.fill_(arena.capacity_rows + 9)
    graph.replay()
    report = arena.report()
    assert (report["num_overflows"], report["demand_peak_rows"]) == (1, arena.capacity_rows + 9)
    assert len(report["graphs"]) == 1
    del graph


def test_early_reuse_in_replays_raises(arena: epbuf.Arena) -> None:
    """Forward and backward in two graphs: the second replay of the backward finds the frame used."""
    outside = arena.acquire()

    def forward(x: Tensor) -> Tensor:
        outside.begin()
        outside.recv_tokens.fill_(1)
        outside.end()
        return x + 1

    def backward(x: Tensor) -> Tensor:
        outside.begin("backward")
        outside.grad_recv_tokens.fill_(1)
        outside.end("backward")
        return x + 1

    x = torch.zeros(1, device="cuda")
    first = epbuf.CapturedStep.capture(arena, forward, (x,), warmup=1)
    second = epbuf.CapturedStep.capture(arena, backward, (x,), warmup=0)
    first(x)
    second(x)
    second.check()
    second(x)
    with pytest.raises(LeaseError, match="already been followed by its backward"):
        second.check()
    for step in (first, second):
        step.close()
    outside.release()


def test_hundred_replays_of_two_graphs(arena: epbuf.Arena) -> None:
    """Two steps over one arena, in turns, each with its own inputs."""

    def step(x: Tensor) -> Tensor:
        with arena.acquire() as lease:
            lease.begin()
            lease.recv_tokens[: len(x)] = x
            lease.expert_out.copy_(lease.recv_tokens * 3)
            y = lease.expert_out[: len(x)].clone()
            lease.end()
            return y

    steps = [epbuf.CapturedStep.capture(arena, step, (torch.zeros(n, 64, device="cuda"),)) for n in (8, 16)]
    for number in range(100):
        x = torch.randn(8 * (1 + number % 2), 64, device="cuda")
        assert torch.equal(steps[number % 2](x), x * 3)
    for each in steps:
        each.check()
        each.close()


def test_adopted_memory_is_used_in_place_and_left() -> None:
    plan = plan_of()
    memory = memory_of(plan)
    with epbuf.Arena.adopt(plan, memory, registration="mine") as arena, arena.acquire() as lease:
        lease.recv_tokens.fill_(3)
        region = plan.region("recv_tokens")
        assert lease.window_of("recv_tokens") == ("mine", region.offset)
        assert lease.recv_tokens.data_ptr() == memory.data_ptr() + region.offset
        assert "close that one first" in raised(ConfigError, lambda: epbuf.Arena.adopt(plan, memory))
    assert bool((memory[region.offset : region.end].view(torch.float32) == 3).all())


def test_nccl_window_gives_its_handle() -> None:
    """Kernels that address a registered window find its handle and its communicator."""
    with epbuf.Arena.open(plan_of(), device="cuda", window="nccl", engine="external") as arena:
        with arena.acquire() as lease:
            window, offset = lease.window_of("recv_tokens")
        assert offset == arena.plan.region("recv_tokens").offset
        assert window.handle and window.communicator  # type: ignore[attr-defined]
    assert window.handle == 0  # type: ignore[attr-defined]
