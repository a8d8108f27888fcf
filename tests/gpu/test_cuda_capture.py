"""Contract rules 12, 16, 19, 22 under real captures: modes, guard, graphed callables, whole steps, memory."""

from __future__ import annotations

import ctypes
import gc
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpus import GpuPool, open_arena, places
from graphed import captured, compare_replayed, warmed
from moe import MoE, batches, open_moe_arena, train_step
from ranks import raised
from rounds import assert_same, draw_inputs, expected, play_round
from routings import named_case
from torch import Tensor, nn

import epbuf
from epbuf.errors import CaptureError, ConfigError, LeaseError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MODES = ("global", "thread_local", "relaxed")
BIT = {"rtol": 1e-3, "atol": 1e-3}  # cuBLAS may take another kernel in a capture; a wrong row is off by more


def _modes(rank: int, group: Any, window: str, num_ranks: int) -> int:
    cases = [named_case(name, num_ranks, 16, "bf16") for name in ("balanced", "one_rank", "some_negative")]
    with open_arena(group, window, cases[0].config) as arena:
        played = sum(compare_replayed(arena, rank, cases, mode) for mode in MODES)
        arena.check()
    expected.cache_clear()
    return played


@places((1, "local"), (2, "torch_symm"), (2, "nccl"))
def test_every_capture_mode(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 19: dispatch, combine and both backwards are legal in all three capture error modes."""
    assert pool.run(num_ranks, _modes, window, num_ranks) == [24] * num_ranks


HOST_NODE, MEM_ALLOC_NODE, MEM_FREE_NODE = 3, 10, 11  # CUgraphNodeType of cuda.h


def _node_types(graph: torch.cuda.CUDAGraph) -> Counter[int]:
    driver, raw, num = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(raw, None, ctypes.byref(num)) == 0
    nodes = (ctypes.c_void_p * num.value)()
    assert driver.cuGraphGetNodes(raw, nodes, ctypes.byref(num)) == 0
    types: Counter[int] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        types[kind.value] += 1
    return types


def _nodes(rank: int, group: Any, window: str, num_ranks: int) -> dict[int, int]:
    case = named_case("balanced", num_ranks)
    inputs = draw_inputs(case, rank, True, "cuda")
    with open_arena(group, window, case.config) as arena:
        stream = warmed(lambda: play_round(arena, inputs, True))
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=stream):
            play_round(arena, inputs, True)
        types = _node_types(graph)
        del graph
    return dict(types)


@places((1, "local"), (2, "torch_symm"), (2, "nccl"))
def test_graph_has_no_allocation_and_no_host_node(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rules 12 and 20: a captured round is kernels and copies; nothing allocates, frees or runs on the host."""
    for types in pool.run(num_ranks, _nodes, window, num_ranks):
        assert sum(types.values()) > 10
        assert not {HOST_NODE, MEM_ALLOC_NODE, MEM_FREE_NODE} & set(types)


def _segments() -> dict[int, tuple[int, ...]]:
    return {segment["address"]: tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}


def _new_segments(rank: int, group: Any, window: str, num_ranks: int) -> list[bool]:
    [(x, target)] = batches(rank, 1)
    with open_moe_arena(group, window, num_ranks) as arena:
        model = MoE(arena, 0)

        def step() -> Tensor:
            loss = (model(x.requires_grad_()).float() - target).square().mean()
            loss.backward()
            return loss.detach()

        stream = warmed(step)
        first, _ = captured(lambda: x + 1, stream=stream)  # torch's own words for random numbers in graphs
        before = _segments()
        graph, loss = captured(step, stream=stream)
        pool_id = tuple(graph.pool())
        found = [pool == pool_id for address, pool in _segments().items() if address not in before]
        allocations = arena.window_allocations
        del first, graph, loss
    return [*found, allocations == 1]


@places((1, "local"), (2, "torch_symm"))
def test_capture_allocates_in_the_graphs_pool_only(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 12: segments that a capture adds belong to the graph's pool, and no window memory is among them."""
    for found in pool.run(num_ranks, _new_segments, window, num_ranks):
        assert len(found) >= 2 and all(found)


def _train(rank: int, group: Any, window: str, num_ranks: int) -> bool:
    data = batches(rank, 5)
    with open_moe_arena(group, window, num_ranks) as arena:
        models = [MoE(arena, 3) for _ in range(2)]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, fused=True, capturable=True) for m in models]
        eager = train_step(models[0], optimizers[0])
        wanted = [eager(*batch).clone() for batch in data]
        step = epbuf.CapturedStep.capture(
            arena, train_step(models[1], optimizers[1]), data[-1], restore=(models[1], optimizers[1])
        )
        losses, places_ = [], set()
        for batch in data:
            loss = step(*batch)
            losses.append(loss.clone())
            places_.add(loss.data_ptr())
        torch.testing.assert_close(losses, wanted, **BIT)
        for mine, want in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-2, atol=1e-2)
        assert len(places_) == 1 and wanted[0] != wanted[-1]
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        for number in range(20):
            step(*data[number % 5])
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        changed = {key: (before[key], after[key]) for key in after if before.get(key) != after[key]}
        step.check()
        step.close()
    assert changed == {}
    return True


@places((1, "local"), (2, "torch_symm"), (2, "nccl"), (4, "torch_symm"))
def test_whole_training_step(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rules 12, 21, 22: forward, backward and fused AdamW as one graph train like eager calls; outputs are static, and
    20 replays change nothing in torch's memory statistics.
    """
    assert pool.run(num_ranks, _train, window, num_ranks) == [True] * num_ranks


def _results(model: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = model(x)
    return [y.detach().clone(), *(g.clone() for g in torch.autograd.grad(y.float().square().sum(), [x, *parameters]))]


def _graphed(rank: int, group: Any, window: str, num_ranks: int) -> dict[str, Any]:
    xs = [x for x, _ in batches(rank, 4)]
    with open_moe_arena(group, window, num_ranks, num_frames=2) as arena:
        model, twin = MoE(arena, 5), MoE(arena, 5)
        graphed = torch.cuda.make_graphed_callables(model, (xs[-1].clone().requires_grad_(),))
        parameters = [list(m.parameters()) for m in (model, twin)]
        for x in xs:
            got, want = _results(graphed, parameters[0], x), _results(twin, parameters[1], x)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        arena.check()
        report = arena.report()
        found = {"frames": [graph["frames"] for graph in report["graphs"]], "early": report["num_early_reuses"]}
        found["message"] = raised(LeaseError, arena.close)
        found["reserved"] = raised(LeaseError, lambda: arena.acquire(0))
        del graphed, model, parameters, got, want
        gc.collect()
    return found


@places((1, "local"), (2, "torch_symm"))
def test_graphed_callables(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 16: forward and backward graphs of make_graphed_callables give eager results, are both listed as holders,
    and keep their frame for themselves.
    """
    for found in pool.run(num_ranks, _graphed, window, num_ranks):
        assert found["frames"] == [[0], [0]]
        assert len(re.findall(r"captured at \S+\.py:\d+", found["message"])) == 2, found["message"]
        assert "reserved" in found["reserved"]
        assert found["early"] == 0


class Sum(nn.Module):
    """A layer without experts over a fixed routing: its backward reads no memory that its graphs use again."""

    def __init__(self, arena: epbuf.Arena, topk_idx: Tensor) -> None:
        super().__init__()
        self.arena = arena
        self.register_buffer("topk_idx", topk_idx)

    def forward(self, x: Tensor) -> Tensor:
        with self.arena.acquire() as lease:
            return epbuf.combine(lease, epbuf.dispatch(lease, x, self.topk_idx).tokens)


def _backward_alone(rank: int, group: Any, window: str, num_ranks: int) -> list[int]:
    inputs = draw_inputs(named_case("balanced", num_ranks, 16, "bf16"), rank, True, "cuda")
    with open_arena(group, window, named_case("balanced", num_ranks, 16, "bf16").config) as arena:
        graphed = torch.cuda.make_graphed_callables(Sum(arena, inputs.topk_idx), (inputs.x.clone().requires_grad_(),))
        x, counted = inputs.x.clone().requires_grad_(), []
        y = graphed(x)
        for keep in (True, False):
            torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=keep)
            counted.append(arena.report()["num_early_reuses"])
        del graphed, y
        gc.collect()
    return counted


@places((1, "local"), (2, "torch_symm"))
def test_graphed_backward_without_its_forward(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rule 16: a backward that is replayed once more, without a forward before it, is counted."""
    assert pool.run(num_ranks, _backward_alone, window, num_ranks) == [[0, 1]] * num_ranks


def _guard(rank: int, group: Any) -> dict[str, str]:
    case = named_case("balanced", 1)
    inputs = draw_inputs(case, 0, True, "cuda")
    messages: dict[str, str] = {}
    with open_arena(None, "local", case.config) as arena:

        def step() -> Tensor:
            with arena.acquire() as lease, torch.no_grad():
                recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
                forbidden: dict[str, Callable[[], object]] = {
                    "Arena.open": lambda: epbuf.Arena.open(arena.plan, device="cuda"),
                    "close": arena.close,
                    "check": arena.check,
                    "report": arena.report,
                    "trim": recv.trim,
                    "capture": lambda: epbuf.CapturedStep.capture(arena, step, ()),
                }
                if torch.cuda.is_current_stream_capturing():
                    for name, call in forbidden.items():
                        messages[name] = raised(CaptureError, call)
                return epbuf.combine(lease, recv.tokens)

        graph, y = captured(step)
        inputs.x.add_(1)
        graph.replay()
        assert_same(y, inputs.x * 3, "y of a replay")
        del graph
        arena.check()
    return messages


def test_guard_refuses_before_it_touches_cuda(pool: GpuPool) -> None:
    """Rule 19: what cannot be captured raises CaptureError with the place of the capture, and the capture goes on."""
    [messages] = pool.run(1, _guard)
    assert set(messages) == {"Arena.open", "close", "check", "report", "trim", "capture"}
    for name, message in messages.items():
        assert name in message and re.search(r"test_cuda_capture\.py:\d+", message), message


def _step_ends(rank: int, group: Any, window: str) -> dict[str, Any]:
    case = named_case("balanced", 2)
    inputs = draw_inputs(case, rank, True, "cuda")
    with open_arena(group, window, case.config) as arena:

        def step(x: Tensor, ids: Tensor) -> Tensor:
            with arena.acquire() as lease, torch.no_grad():
                return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)

        kept: list[epbuf.Lease] = []
        leaky = lambda: kept.append(arena.acquire())  # noqa: E731
        leak = raised(CaptureError, lambda: epbuf.CapturedStep.capture(arena, leaky, (), warmup=0))
        kept.clear()
        steps = [epbuf.CapturedStep.capture(arena, step, (inputs.x[:n], inputs.topk_idx[:n])) for n in (12, 5)]
        shape = raised(ConfigError, lambda: steps[0](inputs.x[:5], inputs.topk_idx))
        holders = [len(arena.report()["graphs"])]
        refused = raised(LeaseError, arena.close)
        assert_same(steps[0](inputs.x + 1, inputs.topk_idx), (inputs.x + 1) * 3, "y after the refused close")
        del steps[0]  # dropped, not closed
        raised(LeaseError, arena.close)
        holders.append(len(arena.report()["graphs"]))
        assert_same(steps[0](inputs.x[:5], inputs.topk_idx[:5]), inputs.x[:5] * 3, "y of the other step")
        steps[0].close()
        closed = raised(CaptureError, lambda: steps[0](inputs.x[:5], inputs.topk_idx[:5]))
    return {"leak": leak, "shape": shape, "holders": holders, "refused": refused, "closed": closed}


@places((2, "torch_symm"))
def test_captured_steps_hold_until_they_end(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rules 16 and 22: each step is one holder until it is dropped or closed; a claim that outlives it is refused."""
    for found in pool.run(num_ranks, _step_ends, window):
        assert "lease on frame 0" in found["leak"] and "[5, 16]" in found["shape"] and "closed" in found["closed"]
        assert found["holders"] == [2, 1]
        assert len(re.findall(r"test_cuda_capture\.py:\d+", found["refused"])) == 2, found["refused"]
