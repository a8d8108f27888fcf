"""Experts that write where they are told to, as Transformer Engine's fused ones do."""

from __future__ import annotations

from typing import Any

import torch
from megatron_layers import GroupedExperts
from torch import Tensor


class _Into(torch.autograd.Function):
    """Put rows into a buffer on the way forward, and their gradient into another one on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, output: Tensor | None, grad_input: Tensor | None) -> Tensor:
        ctx.grad_input = grad_input
        return rows.view_as(rows) if output is None else output.copy_(rows).view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.grad_input is None else ctx.grad_input.copy_(grad)), None, None


class WritingExperts(GroupedExperts):
    """Experts that take `output_buffer` and `grad_input_buffer`."""

    def forward(
        self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor, output_buffer: Tensor | None = None,
        grad_input_buffer: Tensor | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert output_buffer is not None and grad_input_buffer is not None
        rows = _Into.apply(rows, None, grad_input_buffer)
        out, _ = super().forward(rows, tokens_per_expert, probs)
        return _Into.apply(out, output_buffer, None), None
