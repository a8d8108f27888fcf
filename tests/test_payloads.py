"""Quantised and raw rows, end to end: dispatch, decode, combine, and both backwards, over poisoned regions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Pool, raised, virtual
from rounds import Inputs, assert_same, draw_inputs
from routings import Case, named_case
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epbuf
from epbuf import Payload, reference
from epbuf.errors import ConfigError, LeaseError
from epbuf.ops import COMBINE, DECODE, DISPATCH, ROUTE

Spread = Callable[..., list[Any]]
PAYLOADS = {
    "mxfp8": Payload.mxfp8(),
    "fp8_block128": Payload.fp8_block128(),
    "nvfp4": Payload.nvfp4(),
    "mxfp8_blocked": Payload.mxfp8(scale_layout="blocked"),
    "nvfp4_blocked": Payload.nvfp4(scale_layout="blocked"),
}
ROUTINGS = ("some_negative", "one_rank_without_tokens", "one_row_over", "num_tokens_int64", "no_tokens")
POISON = 0xFF  # NaN in E8M0, E4M3 and float32
COMPILE_LIMIT_S = 180

every_payload = pytest.mark.parametrize("word", PAYLOADS)
every_form = pytest.mark.usefixtures("form")


def case_of(word: str, routing: str = "some_negative", num_ranks: int = 2, dtype: str = "bf16", **changes: Any) -> Case:
    """Build a case whose rows travel in one payload, both ways; blocked scales need zones of 128 rows."""
    payload = PAYLOADS[word]
    sizes = {"hidden": 128, "dispatch_payload": payload, "combine_grad_payload": payload} | changes
    alignment = 128 if payload.scale_layout == "blocked" else 16
    return named_case(routing, num_ranks, alignment, dtype, **sizes)


def open_arena(case: Case, group: Any, **options: Any) -> epbuf.Arena:
    return epbuf.Arena.open(epbuf.Plan.build(case.config, **options), group)


def poison(arena: epbuf.Arena) -> None:
    """Fill every region of rows, scales and weights of this rank, once no peer reads there any more."""
    arena.report()  # on CUDA it waits for the device
    arena.barrier()
    _fill(arena, ("recv_", "grad_", "expert_out"))


def _fill(arena: epbuf.Arena, names: tuple[str, ...]) -> None:
    for region in arena.plan.regions:
        if region.name.startswith(names) and "cells" not in region.name:
            arena.window.bytes_at(region.offset, region.nbytes).fill_(POISON)


def plain(rows: Tensor) -> Tensor:
    """Copy rows, as bytes unless they are float32."""
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint8)).clone()


def copies(*parts: Tensor | None) -> list[Tensor]:
    return [plain(part) for part in parts if part is not None]


@functools.cache
def expected(case: Case, which: str, payload: Payload) -> list[list[Tensor]]:
    """Return what every rank receives of x, or of dy: data, scales, row scales; scales in the payload's layout."""
    inputs = [draw_inputs(case, rank, False) for rank in range(case.config.num_ranks)]
    capacity = len(inputs[0].expert_out)
    routing = reference.route(case.config, capacity, case.topk_idx, case.num_tokens)
    rows = [getattr(each, which) for each in inputs]
    received = reference.dispatch_quantised(case.config, capacity, routing, payload, rows)
    return [_laid_out(rank.parts, payload) for rank in received]


def _laid_out(parts: tuple[Tensor, ...], payload: Payload) -> list[Tensor]:
    data, scales, *rest = parts
    return [data, reference.blocked(scales) if payload.scale_layout == "blocked" else scales, *rest]


def decoded(case: Case, which: str, payload: Payload) -> list[Tensor]:
    """Return the same rows decoded into the token dtype."""
    dtype = draw_inputs(case, 0, False).x.dtype
    compact = Payload(format=payload.format)
    return [
        reference.dequantise(compact, reference.Quantised(*parts), dtype) for parts in expected(case, which, compact)
    ]


def assert_received(got: list[Tensor], want: list[Tensor], end: int) -> None:
    """Rows below `end` are those of the reference; the others were never written."""
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert torch.equal(mine[:end], theirs[:end])
        assert mine[end:].view(torch.uint8).eq(POISON).all()


def round_of(arena: epbuf.Arena, inputs: Inputs, weighted: bool) -> dict[str, Any]:
    """Run one round over poison; return copies of everything it gave."""
    x, weights = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone().requires_grad_()
    poison(arena)
    with arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, inputs.topk_idx, weights, num_tokens=inputs.num_tokens)
        got: dict[str, Any] = {"recv": copies(recv.tokens, recv.scales, recv.row_scales), "offs": recv.offs.clone()}
        end = int(recv.offs[-1])  # rows past it have no value that could be kept
        got["rows"] = recv.dequantize().detach()[:end].clone()
        expert_out = inputs.expert_out.clone().requires_grad_()
        y = epbuf.combine(lease, expert_out, topk_weights=recv.topk_weights if weighted else None)
        grads = torch.autograd.grad(y, [expert_out, recv.topk_weights] if weighted else [expert_out], inputs.dy)
        got |= {"y": y.detach(), "grad_expert_out": grads[0][:end].clone(), "grad_weights": grads[-1][:end].clone()}
        outer = [inputs.grad_recv_tokens, inputs.grad_recv_topk_weights]
        got["dx"], got["dw"] = torch.autograd.grad([recv.carrier, recv.topk_weights], [x, weights], outer)
    return got


def _rounds(rank: int, group: Any, case: Case, weighted: bool) -> dict[str, Any]:
    inputs = draw_inputs(case, rank, False)
    with open_arena(case, group) as arena:
        round_of(arena, inputs, weighted)
        return round_of(arena, inputs, weighted)


def assert_round(case: Case, results: list[dict[str, Any]], weighted: bool) -> None:
    payload = case.config.dispatch_payload
    inputs = [draw_inputs(case, rank, False) for rank in range(len(results))]
    routing = reference.route(case.config, len(inputs[0].expert_out), case.topk_idx, case.num_tokens)
    grads = [[i.grad_recv_tokens for i in inputs], [i.grad_recv_topk_weights for i in inputs]]
    dx, dw = reference.dispatch_backward(case.config, routing, *grads)
    rows, grad_rows = decoded(case, "x", payload), decoded(case, "dy", payload)
    for rank, got in enumerate(results):
        end = int(routing.offs[rank][-1])
        assert_received(got["recv"], expected(case, "x", payload)[rank], end)
        assert_same(got["rows"], rows[rank][:end], "decoded rows")
        assert_same(got["dx"], dx[rank], "dx")
        assert_same(got["dw"], dw[rank], "dw")
        want = grad_rows[rank]
        if weighted:
            weights = _recv_weights(case, routing, rank)
            dots = (inputs[rank].expert_out.float() * want.float()).sum(1)
            torch.testing.assert_close(got["grad_weights"], dots[:end], rtol=1e-4, atol=1e-4)
            want = (want.float() * weights[:, None]).to(want.dtype)
        assert_same(got["grad_expert_out"], want[:end], "gradient of the experts")


def _recv_weights(case: Case, routing: reference.Routing, rank: int) -> Tensor:
    inputs = [draw_inputs(case, source, False) for source in range(case.config.num_ranks)]
    sent = [i.x for i in inputs], [i.topk_weights for i in inputs]
    return reference.dispatch(case.config, len(inputs[0].expert_out), routing, *sent)[1][rank]


@pytest.mark.parametrize("routing", ROUTINGS)
@every_payload
@every_form
def test_round_equals_the_reference(word: str, routing: str) -> None:
    """Data, scales and row scales, padding 0, nothing behind the zones, gradients of both directions: to the bit."""
    case = case_of(word, routing)
    assert_round(case, virtual(2, _rounds, case, False), weighted=False)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("word", ["mxfp8", "fp8_block128", "nvfp4"])
@every_form
def test_weighted_round_equals_the_reference(word: str, dtype: str) -> None:
    """With weights the decoded gradient is multiplied, and the weights get theirs."""
    case = case_of(word, dtype=dtype)
    assert_round(case, virtual(2, _rounds, case, True), weighted=True)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_round_on_processes_equals_the_reference(num_ranks: int, pool: Pool) -> None:
    case = case_of("mxfp8", num_ranks=num_ranks)
    assert_round(case, pool.run(num_ranks, _rounds, case, False), weighted=False)


@pytest.mark.parametrize(("recv", "grad"), [("same", "mxfp8"), ("nvfp4", "same"), ("fp8_block128", "nvfp4")])
@every_form
def test_directions_are_independent(recv: str, grad: str) -> None:
    """Each direction has the payload that the config names for it."""
    case = named_case("some_negative", 2, 16, hidden=128, dispatch_payload=recv, combine_grad_payload=grad)
    results = virtual(2, _rounds, case, False)
    for rank, got in enumerate(results):
        end = int(got["offs"][-1])
        if recv != "same":
            assert_received(got["recv"], expected(case, "x", Payload(format=recv))[rank], end)
        if grad != "same":
            want = decoded(case, "dy", Payload(format=grad))[rank]
            assert_same(got["grad_expert_out"], want[:end], "gradient of the experts")


def eager_and_replayed(
    arena: epbuf.Arena, case: Case, begin: Callable[[], None] = lambda: None
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return, for three batches, what an eager step and a replay gave; `begin` is called in each before dispatch."""
    inputs = draw_inputs(case, arena.rank, False, arena.device.type)

    def step(x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
        with arena.acquire() as lease:
            begin()
            x = x.detach().requires_grad_()
            recv = epbuf.dispatch(lease, x, ids, weights)
            y = epbuf.combine(lease, recv.dequantize() * 2, topk_weights=recv.topk_weights)
            (dx,) = torch.autograd.grad(y, x, y.detach())
            dead = ~recv.row_mask()[:, None]
            return [y.detach(), dx, *(part.masked_fill(dead, 0) for part in copies(recv.tokens))]

    def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.where(inputs.topk_idx < 0, -1, (inputs.topk_idx + number) % case.config.num_experts)
        return inputs.x * (1 + number), ids, inputs.topk_weights + number

    eager = [[part.clone() for part in step(*batch(number))] for number in range(3)]
    captured = epbuf.CapturedStep.capture(arena, step, batch(2))
    replayed = [[part.clone() for part in captured(*batch(number))] for number in range(3)]
    assert arena.window_allocations == 1
    captured.close()
    return list(zip(eager, replayed, strict=True))


def _captured(rank: int, group: Any, case: Case) -> list[tuple[list[Tensor], list[Tensor]]]:
    with open_arena(case, group) as arena:
        return eager_and_replayed(arena, case, lambda: _fill(arena, ("recv_",)))  # which peers write, and never read


@every_payload
@every_form
def test_replays_equal_eager_steps(word: str) -> None:
    """Captured once and replayed with other values and routings: y, dx and received bytes equal eager, to the bit."""
    for rounds in virtual(2, _captured, case_of(word)):
        for eager, replayed in rounds:
            assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


def _thousand(rank: int, group: Any, word: str) -> list[Tensor]:
    case = case_of(word, "balanced", num_topk=1, combine_grad_payload="same")
    inputs = draw_inputs(case, rank, False)
    with open_arena(case, group) as arena, arena.acquire() as lease:
        x = inputs.x.clone().requires_grad_()
        recv = epbuf.dispatch(lease, x, inputs.topk_idx)
        y = epbuf.combine(lease, recv.dequantize())
        y.backward(torch.full_like(y, 1000.3))
        return [x.grad]


@every_payload
def test_gradients_are_not_cast_to_the_format(word: str) -> None:
    """A gradient of 1000.3 through quantised rows is 1000.3, rounded to bf16: not 448, nor without its scale."""
    for (dx,) in virtual(2, _thousand, word):
        assert_same(dx, torch.full_like(dx, 1000.3), "dx")


def _carriers(rank: int, group: Any, word: str) -> dict[str, Any]:
    case = case_of(word)
    inputs = draw_inputs(case, rank, False)
    with open_arena(case, group) as arena, arena.acquire() as lease:
        x = inputs.x.clone().requires_grad_()
        recv = epbuf.dispatch(lease, x, inputs.topk_idx)
        carrier = recv.carrier
        facts = {
            "shape": (carrier.shape, carrier.stride(), carrier.dtype),
            "is_nan": bool(carrier.isnan().all()),
            "gradients": (carrier.requires_grad, recv.tokens.requires_grad, recv.scales.requires_grad),
            "write": raised(RuntimeError, lambda: carrier.detach().add_(1)),
        }
        y = epbuf.combine(lease, carrier * 2)  # a consumer that takes the carrier for rows
        y.sum().backward()
        tokens = reference.route(case.config, len(carrier), case.topk_idx).slot_map[rank]
        return facts | {"y": y.detach(), "live": (tokens >= 0).any(1), "capacity": len(inputs.expert_out)}


@every_payload
def test_the_carrier_is_one_nan(word: str) -> None:
    """[C, H] token dtype, strides (0, 0); rows carry no gradient; taken for rows it makes live tokens NaN."""
    for facts in virtual(2, _carriers, word):
        assert facts["shape"] == ((facts["capacity"], 128), (0, 0), torch.bfloat16)
        assert facts["is_nan"] and facts["gradients"] == (True, False, False)
        assert "memory location" in facts["write"]
        assert torch.equal(facts["y"].isnan().all(1), facts["live"])


HALF_STEPS = {"mxfp8": 16.0, "fp8_block128": 16.0, "nvfp4": 1.0}
"""Half a step of the format at its largest values: E4M3 256 to 448 in steps of 32, E2M1 4 to 6 in steps of 2."""


@pytest.mark.parametrize("word", HALF_STEPS)
def test_errors_are_bounded(word: str) -> None:
    """dispatch, dequantise, combine: per element at most K times half a step times the scale of its block."""
    case = case_of(word)
    results, payload = virtual(2, _identity, case), Payload(format=word)
    for rank, y in enumerate(results):
        x = draw_inputs(case, rank, False).x
        num_rows = (reference.route(case.config, 10**4, case.topk_idx).slot_map[rank] >= 0).sum(1, keepdim=True)
        sent = reference.quantise(payload, x)
        scales = {"mxfp8": reference._powers, "fp8_block128": lambda s: s}.get(word, lambda s: reference.E4M3[s.long()])
        scale = scales(sent.scales).double().repeat_interleave(payload.scale_block, 1)
        if sent.row_scales is not None:
            scale = scale * (1 + 2**-3) * sent.row_scales[:, None]  # the block scale is rounded, too
        rounding = 2**-7 * (x.double() * num_rows).abs()
        bound = num_rows * (HALF_STEPS[word] * scale) + rounding
        assert ((y.double() - x.double() * num_rows).abs() <= bound).all()
        assert ((y.double() - x.double() * num_rows).abs() > 0).any()


def _identity(rank: int, group: Any, case: Case) -> Tensor:
    inputs = draw_inputs(case, rank, False)
    with open_arena(case, group) as arena, arena.acquire() as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
        y = epbuf.combine(lease, recv.dequantize())
        del recv
    return y


def _trained(rank: int, group: Any, word: str) -> list[Tensor]:
    """Train zone by zone with padding rows in every GEMM."""
    case = case_of(word)
    inputs = draw_inputs(case, rank, False)
    generator = torch.Generator().manual_seed(rank)
    matrices = torch.randn(case.config.num_local_experts, 128, 128, generator=generator).bfloat16().requires_grad_()
    with open_arena(case, group) as arena:
        poison(arena)
        with arena.acquire() as lease:
            x = inputs.x.clone().requires_grad_()
            recv = epbuf.dispatch(lease, x, inputs.topk_idx, inputs.topk_weights)
            rows, ends = recv.dequantize(), [0, *recv.offs.tolist()]
            zones = [rows[a:b] @ matrix for a, b, matrix in zip(ends, ends[1:], matrices, strict=False)]
            out = torch.cat([*zones, rows[ends[-1] :]])
            y = epbuf.combine(lease, out, topk_weights=recv.topk_weights)
        y.backward(inputs.dy)
    return [y.detach(), x.grad, matrices.grad]


@every_payload
@every_form
def test_no_nan_comes_through_padding(word: str) -> None:
    """Over poison, with padding rows in every GEMM: results, data and weight gradients are finite."""
    for results in virtual(2, _trained, word):
        assert all(result is not None and result.isfinite().all() for result in results)


def _decoded_into(rank: int, group: Any, word: str) -> tuple[Tensor, int]:
    case = case_of(word)
    inputs = draw_inputs(case, rank, False)
    with open_arena(case, group) as arena, arena.acquire() as lease, torch.no_grad():
        poison(arena)
        recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
        out = torch.full(recv.carrier.shape, 7.0, dtype=torch.bfloat16)
        torch.ops.epbuf.decode(out, recv.ticket, recv.tokens, recv.scales, recv.row_scales)
        found = out, int(recv.offs[-1])
        del recv
    return found


@every_payload
def test_rows_behind_the_zones_are_not_decoded(word: str) -> None:
    for out, end in virtual(2, _decoded_into, word):
        assert end < len(out) and out[end:].eq(7.0).all() and out[:end].isfinite().all()


def _trim(rank: int, group: Any, word: str, routing: str) -> dict[str, Any]:
    case = case_of(word, routing)
    inputs = draw_inputs(case, rank, False)
    with open_arena(case, group) as arena, arena.acquire() as lease:
        poison(arena)
        x = inputs.x.clone().requires_grad_()
        recv = epbuf.dispatch(lease, x, inputs.topk_idx).trim()
        rows = recv.dequantize()
        y = epbuf.combine(lease, rows)
        y.backward(inputs.dy)
        parts = copies(recv.tokens, recv.scales, recv.row_scales)
        return {"rows": rows.detach(), "parts": parts, "end": int(recv.offs[-1]), "dx": x.grad, "carrier": recv.carrier}


@pytest.mark.parametrize("routing", ["some_negative", "all_negative"])
@every_payload
@every_form
def test_trimmed_rows_are_decoded(word: str, routing: str) -> None:
    """trim() cuts data, scales and carrier alike; with no row at all what it shows is zero."""
    case = case_of(word, routing)
    for rank, got in enumerate(virtual(2, _trim, word, routing)):
        num_rows = max(got["end"], case.config.expert_alignment)
        assert got["carrier"].shape == (num_rows, 128) and got["carrier"].stride() == (0, 0)
        wanted = decoded(case, "x", case.config.dispatch_payload)[rank]
        assert_same(got["rows"], wanted[:num_rows], "decoded rows")
        for mine, theirs in zip(got["parts"], expected(case, "x", case.config.dispatch_payload)[rank], strict=True):
            assert torch.equal(mine, theirs[:num_rows])
        assert got["dx"].isfinite().all()


def _saved_decode(rank: int, group: Any, case: Case, saved: tuple[Any, ...]) -> list[Tensor]:
    inputs, finite = draw_inputs(case, rank, False), torch.zeros(())
    with open_arena(case, group) as arena:

        def layer(x: Tensor, factor: Tensor) -> Tensor:
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, inputs.topk_idx)
                is_row = recv.row_mask()[:, None]
                rows = torch.where(is_row, recv.dequantize().float(), finite)
                return epbuf.combine(lease, torch.where(is_row, rows * factor, finite).to(x.dtype))

        def gradients(call: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
            x, factor = inputs.x.clone().requires_grad_(), torch.full((128,), 2.0).requires_grad_()
            call(x, factor).backward(inputs.dy)
            return [x.grad, factor.grad]

        contexts = functools.partial(create_selective_checkpoint_contexts, list(saved))
        again = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
        return [*gradients(layer), *gradients(again)]


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param((DECODE,), id="decode"),
        pytest.param((ROUTE, DECODE), id="route_and_decode"),
        pytest.param((ROUTE, DISPATCH, COMBINE, DECODE), id="all_ops"),
    ],
)
@every_payload
def test_saved_decode_is_repeated(word: str, saved: tuple[Any, ...]) -> None:
    """An op that writes its argument leaves a checkpoint nothing to save: the second pass decodes the rows again."""
    for dx, factor_grad, again_dx, again_factor_grad in virtual(2, _saved_decode, case_of(word), saved):
        assert_same(again_dx, dx, "dx")
        assert_same(again_factor_grad, factor_grad, "gradient of the factor")


def _raw_gradient(rank: int, group: Any, word: str, trims: bool) -> dict[str, Any]:
    case = case_of(word)
    inputs = draw_inputs(case, rank, False)
    seen: dict[str, Any] = {}

    class Experts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, carrier: Tensor) -> Tensor:
            return torch.zeros(carrier.shape, dtype=carrier.dtype)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen["carrier"] = (bool(grad.isnan().all()), grad.stride(), grad.shape)
            seen["parts"] = copies(*epbuf.unpack(grad))
            seen["number"] = len(epbuf.unpack(grad))
            seen["derived"] = raised(ConfigError, lambda: epbuf.unpack(grad * 2))
            seen["some_rows"] = raised(ConfigError, lambda: epbuf.unpack(grad[1:]))
            seen["grad"] = grad
            return inputs.grad_recv_tokens[: len(grad)]

    with open_arena(case, group) as arena, arena.acquire() as lease:
        poison(arena)
        x = inputs.x.clone().requires_grad_()
        recv = epbuf.dispatch(lease, x, inputs.topk_idx)
        recv = recv.trim() if trims else recv
        epbuf.combine(lease, Experts.apply(recv.carrier), raw_grad=True).backward(inputs.dy)
        seen["late"] = raised(LeaseError, lambda: epbuf.unpack(seen["grad"]))
        return seen | {"end": int(recv.offs[-1]), "dx": x.grad}


@pytest.mark.parametrize("trims", [False, True], ids=["all_rows", "trimmed"])
@every_payload
@every_form
def test_raw_gradients_are_unpacked(word: str, trims: bool) -> None:
    """raw_grad=True: a NaN carrier, behind which unpack finds the bytes that travelled, until dispatch's backward."""
    case = case_of(word)
    for rank, seen in enumerate(virtual(2, _raw_gradient, word, trims)):
        assert seen["carrier"][:2] == (True, (0, 0)) and seen["number"] == (3 if "nvfp4" in word else 2)
        wanted = expected(case, "dy", case.config.combine_grad_payload)[rank]
        for mine, theirs in zip(seen["parts"], wanted, strict=True):
            assert len(mine) == seen["carrier"][2][0] and torch.equal(mine[: seen["end"]], theirs[: seen["end"]])
        assert "raw_grad" in seen["derived"] and "raw_grad" in seen["some_rows"]
        assert "backward workspace has ended" in seen["late"]
        assert seen["dx"].isfinite().all()


class _Unpacking(torch.autograd.Function):
    """Experts that copy the raw gradient's data into a tensor they are given."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, into: Tensor) -> Tensor:
        ctx.into = into
        return torch.zeros(carrier.shape, dtype=carrier.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.into.copy_(epbuf.unpack(grad)[0].view(torch.uint8))
        return torch.ones(grad.shape, dtype=grad.dtype), None


def _captured_raw(rank: int, group: Any) -> list[tuple[Tensor, Tensor]]:
    case = case_of("mxfp8")
    inputs = draw_inputs(case, rank, False)

    def step(x: Tensor, ids: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        with arena.acquire() as lease:
            x = x.detach().requires_grad_()
            recv = epbuf.dispatch(lease, x, ids)
            moved = torch.empty(recv.tokens.shape, dtype=torch.uint8)
            y = epbuf.combine(lease, _Unpacking.apply(recv.carrier, moved), raw_grad=True)
            (dx,) = torch.autograd.grad(y, x, dy)
            return moved.masked_fill(~recv.row_mask()[:, None], 0), dx

    def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.where(inputs.topk_idx < 0, -1, (inputs.topk_idx + number) % case.config.num_experts)
        return inputs.x, ids, inputs.dy * (1 + number)

    with open_arena(case, group) as arena:
        eager = [step(*batch(number)) for number in range(3)]
        captured = epbuf.CapturedStep.capture(arena, step, batch(2))
        replayed = [tuple(part.clone() for part in captured(*batch(number))) for number in range(3)]
        captured.close()
    return [pair for both in zip(eager, replayed, strict=True) for pair in zip(*both, strict=True)]


@every_form
def test_raw_gradients_in_a_captured_step() -> None:
    for pairs in virtual(2, _captured_raw):
        assert all(torch.equal(eager, replayed) for eager, replayed in pairs)


def _ignored(rank: int, group: Any) -> Tensor:
    """Multiply experts' weights with a raw gradient as if it were rows."""
    case = case_of("mxfp8", "balanced")
    inputs = draw_inputs(case, rank, False)
    with open_arena(case, group) as arena, arena.acquire() as lease:
        x = inputs.x.clone().requires_grad_()
        recv = epbuf.dispatch(lease, x, inputs.topk_idx)
        epbuf.combine(lease, recv.dequantize() * 2, raw_grad=True).backward(inputs.dy)
        return x.grad


@every_form
def test_who_ignores_a_raw_gradient_gets_nan() -> None:
    assert all(dx.isnan().all() for dx in virtual(2, _ignored))


def encoded_inputs(case: Case, rank: int) -> tuple[Tensor, Any]:
    """Return x and x_scales of one rank, as a caller has them that quantises itself."""
    payload = case.config.dispatch_payload
    sent = reference.quantise(Payload(format=payload.format), draw_inputs(case, rank, False).x)
    plan = epbuf.Plan.build(case.config)
    dtypes = [getattr(torch, plan.region(name).dtype) for name in ("recv_tokens", "recv_scales")]
    data, scales = (part.view(dtype) for part, dtype in zip(sent.parts, dtypes, strict=False))
    return data, scales if sent.row_scales is None else (scales, sent.row_scales)


def _prequantised(rank: int, group: Any, word: str) -> dict[str, Any]:
    case = case_of(word)
    inputs = draw_inputs(case, rank, False)
    x, x_scales = encoded_inputs(case, rank)
    weights = inputs.topk_weights.clone().requires_grad_()
    with open_arena(case, group) as arena, arena.acquire() as lease:
        poison(arena)
        recv = epbuf.dispatch(lease, x, inputs.topk_idx, weights, x_scales=x_scales)
        got = copies(recv.tokens, recv.scales, recv.row_scales)
        y = epbuf.combine(lease, recv.dequantize(), topk_weights=recv.topk_weights)
        y.backward(inputs.dy)
        return {"parts": got, "end": int(recv.offs[-1]), "dw": weights.grad}


@every_payload
@every_form
def test_rows_that_are_encoded_already(word: str) -> None:
    """x_scales=: the bytes that fused quantisation sends; weights still get their gradient."""
    case = case_of(word)
    for rank, got in enumerate(virtual(2, _prequantised, word)):
        assert_received(got["parts"], expected(case, "x", case.config.dispatch_payload)[rank], got["end"])
        assert got["dw"].isfinite().all() and got["dw"].abs().sum() > 0


def _mixed(rank: int, group: Any) -> tuple[list[Tensor], int]:
    case = case_of("mxfp8")
    x, x_scales = encoded_inputs(case, rank) if rank else (draw_inputs(case, rank, False).x, None)
    with open_arena(case, group) as arena, arena.acquire() as lease, torch.no_grad():
        poison(arena)
        recv = epbuf.dispatch(lease, x, case.topk_idx[rank], x_scales=x_scales)
        found = copies(recv.tokens, recv.scales), int(recv.offs[-1])
        del recv
    return found


def test_ranks_may_differ_in_who_encodes() -> None:
    for rank, (parts, end) in enumerate(virtual(2, _mixed)):
        assert_received(parts, expected(case_of("mxfp8"), "x", Payload.mxfp8())[rank], end)


def _faults(case: Case) -> dict[str, tuple[dict[str, Any], str]]:
    """Return wrong arguments of rank 1, and what it must say about them."""
    bf16, (data, scales) = draw_inputs(case, 1, False).x, encoded_inputs(case, 1)
    e4m3 = scales.view(torch.float8_e4m3fn)
    unaligned = torch.zeros(data.numel() + 16, dtype=torch.uint8)[1:][: data.numel()].view(data.dtype).view(data.shape)
    return {
        "data_without_scales": ({"x": data}, r"mxfp8.*needs x_scales"),
        "scales_without_data": ({"x": bf16, "x_scales": scales}, r"bfloat16.*float8_e4m3fn"),
        "other_data": ({"x": data.view(torch.float8_e5m2)}, r"float8_e5m2.*bfloat16"),
        "other_scales": ({"x": data, "x_scales": e4m3}, r"x_scales.*float8_e4m3fn.*float8_e8m0fnu"),
        "scales_of_other_blocks": ({"x": data, "x_scales": scales[:, :2].contiguous()}, r"\[12, 4\].*\[12, 2\]"),
        "scales_of_fewer_tokens": ({"x": data, "x_scales": scales[:5]}, r"\[12, 4\].*\[5, 4\]"),
        "scales_by_columns": ({"x": data, "x_scales": scales.t().contiguous().t()}, r"x_scales.*strides"),
        "row_scales": ({"x": data, "x_scales": (scales, torch.ones(12))}, r"mxfp8.*row.scales.*drop"),
        "three_scales": ({"x": data, "x_scales": (scales, scales, scales)}, r"x_scales.*tuple"),
        "fewer_columns": ({"x": data[:, :64], "x_scales": scales}, r"128.*64"),
        "misaligned": ({"x": unaligned, "x_scales": scales}, r"16 bytes"),
        "fp32": ({"x": bf16.float()}, r"float32.*bfloat16"),
    }


FAULTS = tuple(_faults(case_of("mxfp8")))


def _faulty(rank: int, group: Any, name: str) -> tuple[str, Tensor]:
    case = case_of("mxfp8")
    arguments = {"x": draw_inputs(case, rank, False).x, "topk_idx": case.topk_idx[rank]}
    with open_arena(case, group) as arena, arena.acquire() as lease, torch.no_grad():
        wrong = _faults(case)[name][0] if rank == 1 else {}
        before = plain(lease.recv_tokens)
        message = raised(ConfigError, lambda: epbuf.dispatch(lease, **(arguments | wrong)))
        assert torch.equal(plain(lease.recv_tokens), before)
        recv = epbuf.dispatch(lease, **arguments)
        y = epbuf.combine(lease, recv.dequantize())
        del recv
    return message, y


@pytest.mark.parametrize("name", FAULTS)
@every_form
def test_wrong_encoded_input_is_refused_on_every_rank(name: str) -> None:
    """What was asked, found, and what to do; nothing moved, and the next call is right."""
    (told, _), (said, _) = results = virtual(2, _faulty, name)
    assert re.search(_faults(case_of("mxfp8"))[name][1], said, re.DOTALL), said
    assert "rank 1 refused dispatch" in told
    for (_, y), wanted in zip(results, virtual(2, _identity, case_of("mxfp8")), strict=True):
        assert torch.equal(y, wanted)


def test_nvfp4_needs_both_scales() -> None:
    case = case_of("nvfp4", num_ranks=1)
    data, (scales, _) = encoded_inputs(case, 0)
    with open_arena(case, None) as arena, arena.acquire() as lease, torch.no_grad():
        message = raised(ConfigError, lambda: epbuf.dispatch(lease, data, case.topk_idx[0], x_scales=scales))
        assert "x_scales=(scales, row_scales)" in message
        every_other = torch.ones(2 * len(data))[::2]
        for given, says in (
            ([scales, torch.ones(len(data))], r"x_scales=\(scales, row_scales\) .*found list"),
            ((scales, every_other), r"row scales.*strides \(2,\)"),
        ):
            send = functools.partial(epbuf.dispatch, lease, data, case.topk_idx[0], x_scales=given)
            assert re.search(says, raised(ConfigError, send))


@every_form
def test_raw_rows_are_bytes() -> None:
    """raw takes uint8 rows of its size, with scales if and only if the payload has them."""
    case = named_case("some_negative", 1, 16, hidden=128, dispatch_payload=Payload.raw(48, 16))
    rows, scales = torch.zeros(12, 48, dtype=torch.uint8), torch.zeros(12, 16, dtype=torch.uint8)
    bf16, ids = torch.zeros(12, 128, dtype=torch.bfloat16), case.topk_idx[0]
    with open_arena(case, None) as arena, arena.acquire() as lease, torch.no_grad():
        for x, x_scales, says in (
            (bf16, scales, r"\[rows, 48\].*\[12, 128\]"),
            (rows.to(torch.int8), scales, r"int8.*uint8"),
            (rows, None, r"raw.*needs x_scales"),
            (rows, scales[:, :8].contiguous(), r"\[12, 16\].*\[12, 8\]"),
        ):
            assert re.search(
                says, raised(ConfigError, functools.partial(epbuf.dispatch, lease, x, ids, x_scales=x_scales))
            )
        recv = epbuf.dispatch(lease, rows, ids, x_scales=scales)
        del recv


@every_form
def test_raw_gradients_with_weights_are_refused() -> None:
    """raw_grad=True with topk_weights: on every rank, and the same call without either is right."""
    case = case_of("mxfp8", num_ranks=1)
    inputs = draw_inputs(case, 0, False)
    with open_arena(case, None) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
        wrong = {"topk_weights": recv.topk_weights, "raw_grad": True}
        message = raised(ConfigError, lambda: epbuf.combine(lease, inputs.expert_out, **wrong))
        assert re.search(r"raw_grad=True with topk_weights.*mxfp8", message)
        assert epbuf.combine(lease, inputs.expert_out).shape == (12, 128)
        del recv


def test_carve_refuses_what_it_cannot_cut() -> None:
    """One byte short, one byte past an aligned address, another dtype or shape: an error with both numbers."""
    plan = epbuf.Plan.build(case_of("mxfp8").config)
    nbytes = plan.window_nbytes(32)
    assert nbytes == 32 * (128 + 16)
    buffer = torch.empty(nbytes + 16, dtype=torch.uint8)
    for bad, says in (
        (buffer[: nbytes - 1], rf"{nbytes} bytes for 32 rows.*{nbytes - 1}"),
        (buffer[1:], r"multiple of 16 bytes.*1 past"),
        (buffer.float(), r"uint8.*float32"),
        (buffer[:nbytes].view(32, -1), r"\[32, 144\]"),
        (bytearray(nbytes), r"torch tensor.*bytearray"),
    ):
        assert re.search(says, raised(ConfigError, functools.partial(plan.carve, bad, 32)))
    data, scales = plan.carve(buffer[16:], 32)
    assert (data.dtype, data.shape, scales.dtype, scales.shape, scales.stride()) == (
        torch.float8_e4m3fn, (32, 128), torch.float8_e8m0fnu, (32, 4), (16, 1),
    )  # fmt: skip
    assert scales.data_ptr() == data.data_ptr() + data.nbytes == buffer.data_ptr() + 16 + 32 * 128


def test_carve_gives_what_the_format_has() -> None:
    """Scales are None for payload "same", and nvfp4 has row scales as a third view."""
    buffer = torch.empty(2**16, dtype=torch.uint8)
    same = epbuf.Plan.build(case_of("mxfp8", dispatch_payload="same").config).carve(buffer, 4)
    assert same[0].shape == (4, 128) and same[0].dtype == torch.bfloat16 and same[1:] == (None,)
    data, scales, row_scales = epbuf.Plan.build(case_of("nvfp4").config).carve(buffer, 4)
    assert (data.shape, scales.shape, row_scales.shape) == ((4, 64), (4, 8), (4,))
    assert row_scales.dtype == torch.float32 and row_scales.data_ptr() == buffer.data_ptr() + 4 * (64 + 16)


def raw_case(scale_row_bytes: int) -> Case:
    return named_case("some_negative", 2, 16, hidden=128, dispatch_payload=Payload.raw(48, scale_row_bytes))


def raw_bytes(rank: int, scale_row_bytes: int) -> tuple[Tensor, Tensor]:
    """Draw what a rank sends: x [T, 48] and scales [T, scale_row_bytes], uint8."""
    generator = torch.Generator().manual_seed(rank)
    x, scales = (torch.randint(0, 256, (12, width), generator=generator) for width in (48, scale_row_bytes))
    return x.to(torch.uint8), scales.to(torch.uint8)


def raw_round(arena: epbuf.Arena, scale_row_bytes: int) -> dict[str, Any]:
    """Send raw rows forward, and gradients of their weights back."""
    inputs = draw_inputs(raw_case(scale_row_bytes), arena.rank, False, arena.device.type)
    x, scales = (part.to(arena.device) for part in raw_bytes(arena.rank, scale_row_bytes))
    weights = inputs.topk_weights.clone().requires_grad_()
    poison(arena)
    with arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, inputs.topk_idx, weights, x_scales=scales if scale_row_bytes else None)
        parts, end = [part.cpu() for part in copies(recv.tokens, recv.scales)], int(recv.offs[-1])
        refusal = raised(ConfigError, recv.dequantize)
        rows = torch.ones(recv.carrier.shape, dtype=torch.bfloat16, device=arena.device)
        epbuf.combine(lease, rows, topk_weights=recv.topk_weights).sum().backward()
        assert weights.grad is not None and recv.carrier.stride() == (0, 0)
    return {"parts": parts, "end": end, "dequantize": refusal}


def assert_raw(results: list[dict[str, Any]], scale_row_bytes: int) -> None:
    case = raw_case(scale_row_bytes)
    capacity = epbuf.Plan.build(case.config).capacity_rows
    routing = reference.route(case.config, capacity, case.topk_idx)
    sent = zip(*(raw_bytes(rank, scale_row_bytes) for rank in range(2)), strict=True)
    parts = list(sent)[: 2 if scale_row_bytes else 1]
    for rank, got in enumerate(results):
        assert_received(got["parts"], [reference._place(capacity, routing, rank, part) for part in parts], got["end"])
        assert "raw" in got["dequantize"]


def _raw(rank: int, group: Any, scale_row_bytes: int) -> dict[str, Any]:
    with open_arena(raw_case(scale_row_bytes), group) as arena:
        return raw_round(arena, scale_row_bytes)


@pytest.mark.parametrize("scale_row_bytes", [0, 32])
@every_form
def test_raw_bytes_are_forwarded(scale_row_bytes: int) -> None:
    """raw: the caller's bytes and scales in their slots; nobody but the caller can decode them."""
    assert_raw(virtual(2, _raw, scale_row_bytes), scale_row_bytes)


def _raw_grad_bytes(rank: int, group: Any) -> tuple[list[Tensor], Tensor, int, str]:
    payload = Payload.raw(160, 32)  # of gradient rows of 256 bytes
    case = named_case("some_negative", 2, 16, hidden=128, combine_grad_payload=payload)
    inputs, seen = draw_inputs(case, rank, False), []
    rows = inputs.expert_out.clone().requires_grad_()
    rows.register_hook(lambda grad: seen.extend(copies(*epbuf.unpack(grad))))
    with open_arena(case, group) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
        refusal = raised(ConfigError, lambda: epbuf.combine(lease, rows))
        epbuf.combine(lease, rows, raw_grad=True).backward(inputs.dy)
        return seen, inputs.dy, int(recv.offs[-1]), refusal


@every_form
def test_raw_gradients_are_the_first_bytes_of_their_rows() -> None:
    """combine_grad_payload raw: data, then scales, are cut from the rows of y's gradient; raw_grad=True is a must."""
    results = virtual(2, _raw_grad_bytes)
    case = named_case("some_negative", 2, 16, hidden=128, combine_grad_payload=Payload.raw(160, 32))
    capacity = epbuf.Plan.build(case.config).capacity_rows
    routing = reference.route(case.config, capacity, case.topk_idx)
    sent = [dy.view(torch.uint8) for _, dy, _, _ in results]
    for rank, (parts, _, end, refusal) in enumerate(results):
        for part, columns in zip(parts, (slice(160), slice(160, 192)), strict=True):
            wanted = reference._place(capacity, routing, rank, [rows[:, columns] for rows in sent])
            assert torch.equal(part[:end], wanted[:end])
        assert "raw_grad=True" in refusal


def _without_save(rank: int, group: Any, word: str, alias: bool) -> dict[str, Any]:
    pairs = (("recv_tokens", "expert_out"),) if alias else ()
    case = case_of(word, save_recv=False, alias=pairs)
    inputs = draw_inputs(case, rank, False)
    with open_arena(case, group) as arena:
        poison(arena)
        with arena.acquire() as lease:
            x = inputs.x.clone().requires_grad_()
            recv = epbuf.dispatch(lease, x, inputs.topk_idx)
            got = {"parts": copies(recv.tokens, recv.scales, recv.row_scales), "end": int(recv.offs[-1])}
            rows = recv.dequantize()
            versions = recv.tokens._version
            y = epbuf.combine(lease, rows * 2)
            got["bumped"] = recv.tokens._version - versions
            got["late"] = raised(LeaseError, recv.dequantize)
            y.backward(inputs.dy)
    return got | {"y": y.detach(), "dx": x.grad}


@pytest.mark.parametrize("alias", [False, True], ids=["apart", "aliased"])
@every_payload
def test_received_rows_in_the_workspace(word: str, alias: bool) -> None:
    """save_recv=False: rows last until combine, may share bytes with expert_out, and results are the same."""
    case = case_of(word, save_recv=False)
    saved = virtual(2, _saved, word)
    for rank, got in enumerate(virtual(2, _without_save, word, alias)):
        assert_received(got["parts"], expected(case, "x", case.config.dispatch_payload)[rank], got["end"])
        assert "save_recv=False" in got["late"]
        assert (got["bumped"] > 0) == alias  # combine wrote over the rows: autograd must know
        assert torch.equal(got["y"], saved[rank][0]) and torch.equal(got["dx"], saved[rank][1])


def _saved(rank: int, group: Any, word: str) -> tuple[Tensor, Tensor]:
    case = case_of(word)
    inputs = draw_inputs(case, rank, False)
    with open_arena(case, group) as arena:
        with arena.acquire() as lease:
            x = inputs.x.clone().requires_grad_()
            recv = epbuf.dispatch(lease, x, inputs.topk_idx)
            y = epbuf.combine(lease, recv.dequantize() * 2)
            y.backward(inputs.dy)
        return y.detach(), x.grad


@pytest.mark.parametrize("word", ["mxfp8", "nvfp4"])
def test_aliases_share_one_version_counter(word: str) -> None:
    """recv_tokens is the end of expert_out's bytes, as the plan places it, whichever region comes first."""
    case = case_of(word, num_ranks=1, save_recv=False, alias=(("recv_tokens", "expert_out"),))
    with open_arena(case, None) as arena:
        rows, larger = arena.region("recv_tokens"), arena.region("expert_out")
        assert rows.data_ptr() == arena.address("recv_tokens") > larger.data_ptr() == arena.address("expert_out")
        before = rows._version
        larger.fill_(1.0)
        assert rows._version == before + 1
        assert torch.equal(rows.view(torch.uint8).flatten(), larger.view(torch.uint8).flatten()[-rows.nbytes :])


@every_form
def test_a_packed_view_is_data_then_scales() -> None:
    """lease.packed gives both in one buffer, which carve cuts into the views of the lease."""
    case = case_of("mxfp8", num_ranks=1)
    with open_arena(case, None) as arena, arena.acquire() as lease, torch.no_grad():
        inputs = draw_inputs(case, 0, False)
        recv = epbuf.dispatch(lease, inputs.x, inputs.topk_idx)
        packed = lease.packed("recv_tokens")
        assert len(packed) == arena.plan.window_nbytes(arena.capacity_rows)
        data, scales = arena.plan.carve(packed, arena.capacity_rows)
        for mine, theirs in ((data, recv.tokens), (scales, recv.scales)):
            assert mine.data_ptr() == theirs.data_ptr() and mine.stride() == theirs.stride()
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        del recv


def _layer(lease: epbuf.Lease, x: Tensor, ids: Tensor, weights: Tensor, scale: Tensor) -> Tensor:
    recv = epbuf.dispatch(lease, x, ids, weights)
    rows = torch.where(recv.row_mask()[:, None], recv.dequantize(), 0) * scale
    return epbuf.combine(lease, rows, topk_weights=recv.topk_weights)


def _given(lease: epbuf.Lease, x: Tensor, ids: Tensor, scales: Any) -> Tensor:
    recv = epbuf.dispatch(lease, x, ids, x_scales=scales)
    return epbuf.combine(lease, recv.dequantize())


def _compiled_encoded(rank: int, group: Any, word: str) -> list[Tensor]:
    case = case_of(word)
    x, scales = encoded_inputs(case, rank)
    torch._dynamo.reset()
    with open_arena(case, group) as arena, torch.no_grad():
        both = []
        for function in (_given, torch.compile(_given, fullgraph=True, backend="inductor")):
            with arena.acquire() as lease:
                both.append(function(lease, x, case.topk_idx[rank].long(), scales))
    return both


@pytest.mark.parametrize("word", ["mxfp8", "nvfp4"])
def test_compiled_dispatch_of_encoded_rows_equals_eager(word: str, pool: Pool) -> None:
    for eager, compiled in pool.run(2, _compiled_encoded, word, limit_s=COMPILE_LIMIT_S):
        assert torch.equal(eager, compiled)


def _compiled(rank: int, group: Any, word: str) -> list[list[Tensor]]:
    case = case_of(word, dtype="fp32")
    inputs, both = draw_inputs(case, rank, False), []
    torch._dynamo.reset()
    with open_arena(case, group) as arena:
        for function in (_layer, torch.compile(_layer, fullgraph=True, backend="inductor")):
            x, weights = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone().requires_grad_()
            with arena.acquire() as lease:
                y = function(lease, x, inputs.topk_idx.long(), weights, torch.full((128,), 2.0))
            y.backward(inputs.dy)
            both.append([y.detach().clone(), x.grad, weights.grad])
    return both


@pytest.mark.parametrize("word", ["mxfp8", "fp8_block128", "nvfp4_blocked"])
def test_compiled_layer_equals_eager(word: str, pool: Pool) -> None:
    """A training step of a quantised layer in one graph of inductor: y, dx and dw as in eager."""
    for rank, (eager, compiled) in enumerate(pool.run(2, _compiled, word, limit_s=COMPILE_LIMIT_S)):
        for name, want, got in zip(("y", "dx", "dw"), eager, compiled, strict=True):
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-5), f"{name} of rank {rank}"
