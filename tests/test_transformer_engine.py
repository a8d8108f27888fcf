"""Transformer Engine in epbuf/engines/README.md: names against its signatures, order of calls against results.

Transformer Engine is not installed here: its two calls are played, with the signatures of its public source. They write
into the buffers that they are given, as it says.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from movers import Mover, draw, layer_results
from ranks import Pool, size_of
from rounds import assert_same
from torch import Tensor

import epbuf

TEXT = (Path(__file__).resolve().parent.parent / "epbuf" / "engines" / "README.md").read_text()
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)

# Source: transformer_engine/pytorch/ep.py of github.com/NVIDIA/TransformerEngine, as published in 2026: the names of
# the parameters, and which of them are keyword-only (after "*").
SIGNATURES = {
    "ep_dispatch": "buffer tokens topk_idx topk_weights * recv_tokens recv_topk_weights",
    "ep_combine": "buffer expert_out * num_local_tokens grad_out",
}
BUFFER = (
    "top_k max_tokens_per_rank recv_capacity_per_rank hidden_dim num_local_experts alignment payload_dtype device "
    "dispatch_quant_recipe"
)


class Buffer:
    """Holds the routing of one dispatch."""

    def __init__(self, mover: Mover, lease: list[epbuf.Lease]) -> None:
        self.mover, self.lease = mover, lease


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, buffer: Buffer, tokens: Tensor, ids: Tensor, weights: Tensor, into: Tensor, recv: Tensor
    ) -> Any:
        buffer.slots = buffer.mover.route(buffer.lease[-1], ids)  # type: ignore[attr-defined]
        buffer.mover.push((into, recv), buffer.slots, (tokens, weights))  # type: ignore[attr-defined]
        ctx.buffer = buffer
        return into.detach(), recv.detach(), torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, _: Any) -> Any:
        mover, slots = ctx.buffer.mover, ctx.buffer.slots
        dx = mover.pull(grad_rows, slots, adds=True)
        return None, dx, None, mover.pull(grad_weights[:, None], slots, adds=False)[..., 0], None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Buffer, rows: Tensor, grad_out: Tensor) -> Tensor:
        ctx.buffer, ctx.grad_out = buffer, grad_out
        return buffer.mover.pull(rows, buffer.slots, adds=True)  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        ctx.buffer.mover.push((ctx.grad_out,), ctx.buffer.slots, (dy,))
        return None, ctx.grad_out.clone(), None


def ep_dispatch(
    buffer: Buffer, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
) -> Any:  # fmt: skip
    assert recv_tokens is not None and recv_topk_weights is not None
    return _Dispatch.apply(buffer, tokens, topk_idx, topk_weights, recv_tokens, recv_topk_weights)


def ep_combine(
    buffer: Buffer, expert_out: Tensor, *, num_local_tokens: int | None = None, grad_out: Tensor | None = None
) -> Tensor:
    assert grad_out is not None and num_local_tokens is not None
    y: Tensor = _Combine.apply(buffer, expert_out, grad_out)
    assert len(y) == num_local_tokens
    return y


def spell(function: Any) -> str:
    """Write a signature as SIGNATURES does."""
    words, is_keyword = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not is_keyword:
            words.append("*")
            is_keyword = True
        words.append(name)
    return " ".join(words)


@pytest.mark.parametrize("played", [ep_dispatch, ep_combine], ids=lambda function: function.__name__)
def test_played_calls_have_the_signatures_of_the_source(played: Any) -> None:
    assert spell(played) == SIGNATURES[played.__name__]


def test_document_names_the_buffers_parameters() -> None:
    (named,) = re.findall(r"`EpBuffer\(([^)]*)\)`", TEXT)
    words = [word.strip(" =") for word in named.split(",")]
    assert words and set(words) <= set(BUFFER.split())


def _run(rank: int, group: Any) -> int:
    config = epbuf.EpConfig(
        num_ranks=size_of(group), num_experts=4, num_topk=2, hidden=4, max_tokens_per_rank=5, token_dtype="fp32"
    )
    plan = epbuf.Plan.build(config, epbuf.Schedule(2, 2))
    names: dict[str, Any] = {"torch": torch, "ep_dispatch": ep_dispatch, "ep_combine": ep_combine}
    exec(EXAMPLE, names)
    with epbuf.Arena.open(plan, group, engine="external") as arena:
        mover, leases = Mover(config, group), []
        acquire = arena.acquire

        def remember(*args: Any) -> epbuf.Lease:
            leases.append(acquire(*args))
            return leases[-1]

        arena.acquire = remember  # type: ignore[method-assign]
        kept, tickets = [], []
        for number in range(2):  # both forwards before their backwards, as in a pipeline
            x, ids, weights, dy = draw(config, 10 * number + rank)
            inputs = (x.clone().requires_grad_(), weights.clone().requires_grad_())

            def experts(rows: Tensor, row_weights: Tensor, counts: Tensor) -> Tensor:
                zone = torch.searchsorted(leases[-1].offs, torch.arange(len(rows)), right=True)
                local = zone.clamp(max=mover.num_local - 1)
                factor = (1 + mover.group.rank * mover.num_local + local)[:, None]
                return torch.where((zone < mover.num_local)[:, None], rows * factor * row_weights[:, None], 0.0)

            y, ticket = names["moe_layer"](arena, Buffer(mover, leases), inputs[0], ids, inputs[1], experts)
            kept.append((y, inputs, dy, layer_results(x, ids, weights, dy)))
            tickets.append(ticket)
        for y, inputs, dy, want in reversed(kept):
            dx, dw = torch.autograd.grad(y, inputs, dy)
            for name, mine, wanted in zip(("y", "dx", "dw"), (y.detach(), dx, dw), want, strict=True):
                assert_same(mine, wanted, name)
        kept.clear()
        tickets.clear()
        del y, ticket, dx, dw, inputs
        assert arena.report()["claims"] == []
        return len(leases)


def test_example_moves_rows_in_the_arenas_memory(pool: Pool) -> None:
    """The example of the document, run as it stands: two layers in flight, results and claims right."""
    assert pool.run(2, _run) == [2, 2]
