"""torch.compile: whole layers in one graph equal eager, and a compiler's copy of a region is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import Pool, raised
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees

import epbuf
from epbuf import ops
from epbuf.errors import LeaseError, NativeError

COMPILE_LIMIT_S = 180
NUM_REDUCED = 6  # the first calls of a function warm up and record, later ones replay


def open_arena(group: Any, num_frames: int = 2, *, device: str = "cpu", window: str = "auto") -> epbuf.Arena:
    config = base_config(group.size(), expert_alignment=16, token_dtype="fp32", timeout_s=COMPILE_LIMIT_S)
    plan = epbuf.Plan.build(config, schedule=epbuf.Schedule(num_frames))
    return epbuf.Arena.open(plan, group, device=device, window=window)


def layer(lease: epbuf.Lease, x: Tensor, ids: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    recv = epbuf.dispatch(lease, x, ids, weights)
    rows = torch.where(recv.row_mask()[:, None], recv.tokens, 0) * scale
    return epbuf.combine(lease, rows, topk_weights=recv.topk_weights)


def two_layers(
    first: epbuf.Lease, second: epbuf.Lease, x: Tensor, ids: Tensor, weights: Tensor, scale: Tensor
) -> Tensor:
    return layer(second, layer(first, x + 1, ids, weights, scale) * 0.5, ids, weights, scale)


def _inputs(rank: int, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, ids, weights and scale; ids differ from call to call."""
    case = named_case("some_negative", 2, 16, "fp32")
    inputs = draw_inputs(case, rank, False)
    ids = torch.where(case.topk_idx[rank] < 0, -1, (case.topk_idx[rank].long() + number) % case.config.num_experts)
    return (
        inputs.x.clone().requires_grad_(),
        ids,
        inputs.topk_weights.clone().requires_grad_(),
        torch.full((16,), 2.0, requires_grad=True),
    )


def _grads(arena: epbuf.Arena, function: Callable[..., Tensor], rank: int, number: int) -> list[Tensor]:
    x, ids, weights, scale = _inputs(rank, number)
    with arena.acquire() as first, arena.acquire() as second:
        y = function(first, second, x, ids, weights, scale)
    y.backward(draw_inputs(named_case("some_negative", 2, 16, "fp32"), rank, False).dy)
    return [t.detach().clone() for t in (y, x.grad, weights.grad) if t is not None]


def _training(rank: int, group: Any) -> list[tuple[list[Tensor], list[Tensor]]]:
    compiled = torch.compile(two_layers, fullgraph=True, backend="inductor")
    with open_arena(group) as arena:
        return [(_grads(arena, two_layers, rank, number), _grads(arena, compiled, rank, number)) for number in range(3)]


def test_two_compiled_layers_equal_eager(pool: Pool) -> None:
    """Two layers over one arena, compiled in one graph by inductor: y, dx and dw equal eager, routing after routing."""
    for rank, rounds in enumerate(pool.run(2, _training, limit_s=COMPILE_LIMIT_S)):
        for number, (eager, compiled) in enumerate(rounds):
            for name, want, got in zip(("y", "dx", "dw"), eager, compiled, strict=True):
                assert torch.allclose(got, want, rtol=1e-5, atol=1e-5), f"{name} of rank {rank}, call {number}"


def _inference(rank: int, group: Any) -> list[tuple[Tensor, Tensor]]:
    compiled = torch.compile(two_layers, fullgraph=True, backend="inductor")
    pairs = []
    with open_arena(group) as arena, torch.no_grad():
        for number in range(3):
            both = []
            for function in (two_layers, compiled):
                with arena.acquire() as first, arena.acquire() as second:
                    both.append(function(first, second, *_inputs(rank, number)))
            pairs.append((both[0], both[1]))
    return pairs


def test_compiled_inference_equals_eager(pool: Pool) -> None:
    """The same without gradients: y equals eager to the bit, so nothing was reordered or left out."""
    for rank, pairs in enumerate(pool.run(2, _inference, limit_s=COMPILE_LIMIT_S)):
        for number, (eager, compiled) in enumerate(pairs):
            assert_same(compiled, eager, f"y of rank {rank}, call {number}")


def _leaks(rank: int, group: Any) -> int:
    compiled = torch.compile(two_layers, fullgraph=True, backend="inductor")
    with open_arena(group) as arena:
        for number in range(20):
            _grads(arena, compiled, rank, number)
        leases = [arena.acquire(), arena.acquire()]
        return len(leases)


def test_compiled_steps_leak_no_frame(pool: Pool) -> None:
    """Rule 14: 20 compiled training steps run on exactly the two planned frames, which are free afterwards."""
    assert pool.run(2, _leaks, limit_s=COMPILE_LIMIT_S) == [2, 2]


def _refused(rank: int, group: Any, backend: str, program: str) -> tuple[str, Tensor]:
    compiled = torch.compile(PROGRAMS[program], fullgraph=True, backend=backend)
    x, ids, weights, scale = (t.detach() for t in _inputs(rank, 0))
    with open_arena(group) as arena, torch.no_grad():
        with arena.acquire() as lease:
            message = raised(NativeError, lambda: compiled(lease, lease.recv_tokens, x, ids, weights, scale))
        with arena.acquire() as lease:
            return message, layer(lease, x, ids, weights, scale)


def _one_layer(lease: epbuf.Lease, view: Tensor, *arguments: Tensor) -> Tensor:
    return layer(lease, *arguments)


def _reads_before(lease: epbuf.Lease, view: Tensor, *arguments: Tensor) -> Tensor:
    """Want a sum over the region's older value after the dispatch: the compiler fuses it late and keeps a copy."""
    old = view * 1.0
    return layer(lease, *arguments) + old.sum()


def _compares(lease: epbuf.Lease, view: Tensor, *arguments: Tensor) -> tuple[Tensor, Tensor]:
    """Want the region before and after."""
    old = view * 1.0
    y = layer(lease, *arguments)
    return y, old + view


PROGRAMS: dict[str, Callable[..., Any]] = {
    "one_layer": _one_layer,
    "reads_before": _reads_before,
    "compares": _compares,
}


def _assert_copy_refused(results: list[tuple[str, Tensor]]) -> None:
    for rank, (message, y) in enumerate(results):
        assert "copy" in message and "region" in message and "inductor" in message
        x, ids, weights, scale = _inputs(rank, 0)
        factors = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(y, (x * factors * scale).detach(), rtol=1e-5, atol=1e-5)


def test_aot_eager_is_refused(pool: Pool) -> None:
    """aot_eager functionalises every op: the copy is found by its address, on every rank, and eager goes on."""
    _assert_copy_refused(pool.run(2, _refused, "aot_eager", "one_layer", limit_s=COMPILE_LIMIT_S))


@pytest.mark.parametrize("program", ["reads_before", "compares"])
def test_inductor_copy_is_refused(program: str, pool: Pool) -> None:
    """A program for which inductor must copy a region raises NativeError with region and remedy on every rank."""
    results = pool.run(2, _refused, "inductor", program, limit_s=COMPILE_LIMIT_S)
    assert all("recv_tokens" in message for message, _ in results)
    _assert_copy_refused(results)


def _received(lease: epbuf.Lease, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    recv = epbuf.dispatch(lease, x, ids, weights)
    return epbuf.combine(lease, recv.tokens * 2), recv.tokens, recv.offs


def _returned(rank: int, group: Any) -> list[list[Tensor]]:
    x, ids, weights, _ = (t.detach() for t in _inputs(rank, 0))
    both = []
    with open_arena(group) as arena, torch.no_grad():
        for function in (_received, torch.compile(_received, fullgraph=True, backend="inductor")):
            with arena.acquire() as lease:
                y, tokens, offs = function(lease, x, ids, weights)
                both.append([y.clone(), tokens[: int(offs[-1])].clone(), offs.clone()])
    return both


def test_compiled_code_may_return_what_it_received(pool: Pool) -> None:
    """Returning recv.tokens and recv.offs from compiled code gives the window's rows, as in eager."""
    for rank, (eager, compiled) in enumerate(pool.run(2, _returned, limit_s=COMPILE_LIMIT_S)):
        for name, want, got in zip(("y", "tokens", "offs"), eager, compiled, strict=True):
            assert_same(got, want, f"{name} of rank {rank}")


def _on_one_frame(rank: int, group: Any) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Call a compiled layer twice on the only frame, then once with its backward; and the same eagerly."""
    compiled = torch.compile(layer, fullgraph=True, backend="inductor")
    dy = draw_inputs(named_case("some_negative", 2, 16, "fp32"), rank, False).dy

    def run(function: Callable[..., Tensor], number: int) -> list[Tensor]:
        x, ids, weights, scale = _inputs(rank, number)
        with torch.no_grad():
            y = x.detach()
            for _ in range(2):
                with arena.acquire() as lease:
                    y = function(lease, y, ids, weights.detach(), scale.detach())
        with arena.acquire() as lease:
            out = function(lease, x, ids, weights, scale)
        return [y, out.detach(), *torch.autograd.grad(out, [x, weights, scale], dy)]

    with open_arena(group, num_frames=1) as arena:
        return [(run(layer, number), run(compiled, number)) for number in range(3)]


def test_compiled_layers_share_one_frame(pool: Pool) -> None:
    for rank, rounds in enumerate(pool.run(2, _on_one_frame, limit_s=COMPILE_LIMIT_S)):
        for eager, compiled in rounds:
            for name, want, got in zip(("y of two", "y", "dx", "dw", "dscale"), eager, compiled, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=f"{name} of rank {rank}")


def _one_lease_twice(rank: int, group: Any) -> tuple[str, Tensor]:
    compiled = torch.compile(two_layers, fullgraph=True, backend="inductor")
    x, ids, weights, scale = (t.detach() for t in _inputs(rank, 0))
    with open_arena(group, num_frames=1) as arena, torch.no_grad():
        with arena.acquire() as lease:
            message = raised(LeaseError, lambda: compiled(lease, lease, x, ids, weights, scale))
        with arena.acquire() as lease:
            return message, layer(lease, x, ids, weights, scale)


def test_two_compiled_layers_on_one_lease_are_refused(pool: Pool) -> None:
    """One frame cannot carry both dispatches of one graph: every rank says so, and eager goes on."""
    for rank, (message, y) in enumerate(pool.run(2, _one_lease_twice, limit_s=COMPILE_LIMIT_S)):
        assert "dispatch was called twice" in message
        torch.testing.assert_close(y, wanted(rank, 0)[0], rtol=1e-5, atol=1e-5)


def wanted(rank: int, number: int) -> tuple[Tensor, ...]:
    """Compute y of one layer, and the gradients of x, weights and scale, without experts on ranks."""
    x, ids, weights, scale = _inputs(rank, number)
    y = x * scale * torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
    dy = draw_inputs(named_case("some_negative", 2, 16, "fp32"), rank, False).dy
    return y.detach(), *torch.autograd.grad(y, [x, weights], dy)


@dataclass
class Reduced:
    """What training with mode="reduce-overhead" gave, and what became of graphs."""

    results: list[tuple[Tensor, ...]]
    num_holders: int  # graphs that hold the window
    num_captured: int
    num_skipped: int


def reduced_overhead(rank: int, group: Any, device: str = "cpu", window: str = "auto") -> Reduced:
    """Train one layer with mode="reduce-overhead", more often than inductor warms up and records."""
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    dy = draw_inputs(named_case("some_negative", 2, 16, "fp32"), rank, False).dy.to(device)
    results, first_graph, skipped = [], _next_graph(), counters["inductor"]["cudagraph_skips"]
    with open_arena(group, device=device, window=window) as arena:
        for number in range(NUM_REDUCED):
            x, ids, weights, scale = (t.detach().to(device) for t in _inputs(rank, number))
            x.requires_grad_(), weights.requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            with arena.acquire() as lease:
                y = compiled(lease, x, ids, weights, scale)
            grads = torch.autograd.grad(y, [x, weights], dy)
            results.append(tuple(part.detach().cpu().clone() for part in (y, *grads)))
            del y, grads
        arena.check()
        num_captured = max(0, _next_graph() - first_graph - 1)
        num_skipped = counters["inductor"]["cudagraph_skips"] - skipped
        return Reduced(results, len(arena.book.live_graphs()), num_captured, num_skipped)


def _next_graph() -> int:
    """Take a number from inductor's count of the graphs that it captures on this device; -1 before it counts."""
    if not torch.cuda.is_available():
        return -1
    manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    return -1 if manager is None else int(manager.new_graph_id().id)


def assert_reduced(found: list[Reduced]) -> None:
    """Compare with the dense layer; no graph of the compiler's may hold the window, since its replays call no op."""
    for rank, reduced in enumerate(found):
        assert reduced.num_holders == 0
        for number, parts in enumerate(reduced.results):
            for name, got, want in zip(("y", "dx", "dw"), parts, wanted(rank, number), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=f"{name} of rank {rank}, call {number}")


def test_reduce_overhead_is_right_and_captures_no_graph_on_cpu(pool: Pool) -> None:
    found = pool.run(2, reduced_overhead, limit_s=COMPILE_LIMIT_S)
    assert_reduced(found)
    assert [reduced.num_captured for reduced in found] == [0, 0]


def test_compiler_is_told_not_to_capture_the_ops() -> None:
    """A graph of inductor's would replay kernels without the lease book."""
    overloads = [value for value in vars(ops).values() if isinstance(value, torch._ops.OpOverload)]
    assert {ops.ROUTE, ops.DISPATCH, ops.COMBINE, ops.COMBINE_BACKWARD, ops.RESTORE} < set(overloads)
    for op in overloads:
        assert torch.Tag.cudagraph_unsafe in op.tags, op
