"""Size and slice buffers of received rows in Megatron's terms, for who keeps its own. Needs no Megatron."""

from __future__ import annotations

from typing import Any, get_args

from epbuf.config import EpConfig, Payload, ScaleLayout, TokenDtype
from epbuf.errors import ConfigError
from epbuf.plan import Plan

_QUANTISED = ("mxfp8", "fp8_block128", "nvfp4")


def window_nbytes(rows: int, hidden: int, format: str, *, scale_layout: ScaleLayout = "compact") -> int:
    """Return the bytes of `rows` received rows: data, then scales, without gaps.

    Args:
        rows: a capacity, in rows.
        hidden: elements of a row: moe_latent_size or hidden_size.
        format: "bf16", "fp16", "fp32", "mxfp8", "fp8_block128" or "nvfp4".
        scale_layout: rows of scales, or the tiles that block-scaled GEMMs read.

    Raises:
        ConfigError: an unknown format, or sizes that it cannot cut into blocks.
    """
    return _plan(hidden, format, scale_layout).window_nbytes(rows)


def carve(
    buffer: Any, rows: int, hidden: int, format: str, *, scale_layout: ScaleLayout = "compact"
) -> tuple[Any, ...]:  # fmt: skip
    """Slice a buffer of the caller's into received rows, as `window_nbytes` sizes it; further arguments as there.

    Args:
        buffer: [n] uint8 tensor, contiguous, at a multiple of 16 bytes.

    Shapes: data [rows, H or packed], scales [rows, S] or None, and, for nvfp4 only, row_scales [rows] float32.

    Raises:
        ConfigError: no such buffer, or too short; as `window_nbytes`.
    """
    return _plan(hidden, format, scale_layout).carve(buffer, rows)


def payload_of(format: str, token_dtype: TokenDtype, scale_layout: ScaleLayout = "compact") -> Payload:
    """Return the payload that a format's name means where rows are made in `token_dtype`.

    Raises:
        ConfigError: an unknown format, or another dtype than the rows have.
    """
    if format in _QUANTISED:
        return Payload.model_validate({"format": format, "scale_layout": scale_layout})
    if format == token_dtype:
        return Payload.same(scale_layout=scale_layout)
    known = ", ".join((*get_args(TokenDtype), *_QUANTISED))
    problem = f"where rows are {token_dtype}" if format in get_args(TokenDtype) else "is not known"
    raise ConfigError(f"format {format!r} {problem}; the formats are {known}, the first three for rows of that dtype")


def _plan(hidden: int, format: str, scale_layout: ScaleLayout) -> Plan:
    """Make the smallest plan whose received rows have that size and format."""
    dtype: TokenDtype = format if format in get_args(TokenDtype) else "bf16"  # type: ignore[assignment]
    config = EpConfig(
        num_ranks=1, num_experts=1, num_topk=1, hidden=hidden, max_tokens_per_rank=1, token_dtype=dtype,
        dispatch_payload=payload_of(format, dtype, scale_layout),
        expert_alignment=128 if scale_layout == "blocked" else 1,
    )  # fmt: skip
    return Plan.build(config)
