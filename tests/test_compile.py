"""torch.compile: whole layers in one graph equal eager, and a compiler's copy of a region is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Pool, raised
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf.errors import NativeError

COMPILE_LIMIT_S = 180


def open_arena(group: Any, num_frames: int = 2) -> epbuf.Arena:
    config = base_config(group.size(), expert_alignment=16, token_dtype="fp32", timeout_s=COMPILE_LIMIT_S)
    return epbuf.Arena.open(epbuf.Plan.build(config, schedule=epbuf.Schedule(num_frames)), group)


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
