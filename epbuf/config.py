"""Sizes, formats and policies of one expert-parallel buffer: frozen, complete, checked when made.

Every rank of a group must bring the same `EpConfig`: `Arena.open` compares them. Facts that follow from it
(capacity, offsets, totals) live in `Plan`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from typing_extensions import Self

from epbuf.errors import ConfigError

TokenDtype = Literal["bf16", "fp16", "fp32"]
PayloadFormat = Literal["same", "mxfp8", "fp8_block128", "nvfp4", "raw"]
ScaleLayout = Literal["compact", "blocked"]
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]

ROW_ALIGNMENT_BYTES = 16
"""Every row that a kernel copies is a multiple of this: one 128-bit load."""

TOKEN_BYTES: dict[TokenDtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element of each token dtype."""

MAX_TOPK = 64

BLOCKED_TILE_ROWS = 128
BLOCKED_TILE_SCALES = 4
"""A tile of the blocked layout. Source: cuBLAS 12.8 manual, "1D block scaling factors layout"."""

ALIASES = (("recv_tokens", "expert_out"), ("grad_expert_out", "grad_recv_tokens"))
"""Pairs of regions that may share bytes."""


@dataclass(frozen=True)
class _Quantised:
    """One quantised format: elements per block scale, bytes of a scale, what hidden must be a multiple of."""

    scale_block: int
    scale_bytes: int
    hidden_multiple: int
    has_blocked: bool


# Source: OCP Microscaling Formats (MX) v1.0, section 5 (mxfp8); DeepSeek-V3, section 3.3.2 (fp8_block128);
# NVIDIA Transformer Engine 2.x, NVFP4BlockScaling (nvfp4).
_QUANTISED = {
    "mxfp8": _Quantised(scale_block=32, scale_bytes=1, hidden_multiple=32, has_blocked=True),
    "fp8_block128": _Quantised(scale_block=128, scale_bytes=4, hidden_multiple=128, has_blocked=False),
    "nvfp4": _Quantised(scale_block=16, scale_bytes=1, hidden_multiple=32, has_blocked=True),
}


def round_up(n: int, multiple: int) -> int:
    """Round n up to a multiple."""
    return -(-n // multiple) * multiple


class _Checked(BaseModel):
    """A frozen model whose constructor raises ConfigError: what was asked, what is wrong with it, what to do."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        with _as_config_error(type(self)):
            super().__init__(**values)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Make one from a dict, with the constructor's errors."""
        with _as_config_error(cls):
            return super().model_validate(obj, **options)


@contextmanager
def _as_config_error(model: type[BaseModel]) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(model, details) for details in error.errors())) from error


def _explain(model: type[BaseModel], details: ErrorDetails) -> str:
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    field = ".".join(str(part) for part in details["loc"])
    if details["type"] == "missing":
        return f"{model.__name__}: {field} is missing; pass {field}=..."
    asked = f"{model.__name__}: {field}={details['input']!r}"
    if details["type"] == "extra_forbidden":
        return f"{asked} is not a field; {_nearest(field, list(model.model_fields))}"
    problem = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{asked} {problem}; correct {field}"


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}"


class Payload(_Checked):
    """Give the format in which rows travel and lie in the receive region: data, then block scales.

    Make one with `same()`, `mxfp8()`, `fp8_block128()`, `nvfp4()` or `raw(row_bytes, scale_row_bytes)`.
    """

    format: PayloadFormat
    """How data and scales are encoded. All ranks agree."""

    scale_layout: ScaleLayout = "compact"
    """Order of the scales: rows of [C, S], or the 128x4 tiles that block-scaled GEMMs read. All ranks agree."""

    row_bytes: int = Field(default=0, ge=0)
    """`raw` only: bytes of data per row, a multiple of 16. All ranks agree."""

    scale_row_bytes: int = Field(default=0, ge=0)
    """`raw` only: bytes of scales per row, a multiple of 16; 0 means no scales. All ranks agree."""

    @classmethod
    def same(cls, *, scale_layout: ScaleLayout = "compact") -> Payload:
        """Send rows as they are, in the token dtype."""
        return cls(format="same", scale_layout=scale_layout)

    @classmethod
    def mxfp8(cls, *, scale_layout: ScaleLayout = "compact") -> Payload:
        """Send E4M3 bytes with one E8M0 scale per 32 elements."""
        return cls(format="mxfp8", scale_layout=scale_layout)

    @classmethod
    def fp8_block128(cls, *, scale_layout: ScaleLayout = "compact") -> Payload:
        """Send E4M3 bytes with one float32 scale per 128 elements."""
        return cls(format="fp8_block128", scale_layout=scale_layout)

    @classmethod
    def nvfp4(cls, *, scale_layout: ScaleLayout = "compact") -> Payload:
        """Send pairs of E2M1 with one E4M3 scale per 16 elements and one float32 scale per row."""
        return cls(format="nvfp4", scale_layout=scale_layout)

    @classmethod
    def raw(cls, row_bytes: int, scale_row_bytes: int = 0, *, scale_layout: ScaleLayout = "compact") -> Payload:
        """Forward the caller's bytes unchanged."""
        return cls(format="raw", scale_layout=scale_layout, row_bytes=row_bytes, scale_row_bytes=scale_row_bytes)

    @property
    def is_quantised(self) -> bool:
        """Whether epbuf encodes rows, so that block scales travel with them."""
        return self.format in _QUANTISED

    @property
    def scale_block(self) -> int:
        """Elements that share one block scale; 0 when the format has none."""
        return _QUANTISED[self.format].scale_block if self.is_quantised else 0

    def row_bytes_for(self, hidden: int, token_dtype: TokenDtype) -> int:
        """Return the bytes of data in one row."""
        if self.format == "raw":
            return self.row_bytes
        if self.format == "same":
            return hidden * TOKEN_BYTES[token_dtype]
        return hidden // 2 if self.format == "nvfp4" else hidden

    def scale_row_bytes_for(self, hidden: int) -> int:
        """Return the bytes of block scales in one row, its padding included; 0 when the format has none.

        A compact row is padded to 16 bytes, a blocked row to 4 scales: H = 2880 in mxfp8 has 90 scales, so 96 bytes
        compact and 92 blocked.
        """
        if not self.is_quantised:
            return self.scale_row_bytes
        if self.scale_layout == "blocked":
            return round_up(self.scale_bytes_for(hidden), BLOCKED_TILE_SCALES)  # of one byte each
        return self.wire_scale_row_bytes_for(hidden)

    def wire_scale_row_bytes_for(self, hidden: int) -> int:
        """Return the bytes of block scales in one row as it travels: compact, whatever the layout where they lie."""
        return round_up(self.scale_bytes_for(hidden), ROW_ALIGNMENT_BYTES)

    def scale_bytes_for(self, hidden: int) -> int:
        """Return the bytes of block scales in one row without its padding."""
        if not self.is_quantised:
            return self.scale_row_bytes
        form = _QUANTISED[self.format]
        return hidden // form.scale_block * form.scale_bytes

    def check_hidden(self, field: str, hidden: int) -> None:
        """Refuse a hidden size that the format cannot cut into blocks.

        Raises:
            ConfigError: hidden is not a multiple of what the format needs.
        """
        multiple = _QUANTISED[self.format].hidden_multiple if self.is_quantised else 1
        if hidden % multiple:
            raise ConfigError(
                f"{field}={self.format!r} needs hidden % {multiple} == 0, found hidden={hidden} "
                f"({hidden} % {multiple} = {hidden % multiple}); pad hidden to {round_up(hidden, multiple)} "
                "or choose another payload"
            )

    @model_validator(mode="after")
    def _check_layout(self) -> Payload:
        blocked = [name for name, form in _QUANTISED.items() if form.has_blocked]
        if self.scale_layout == "blocked" and self.format not in blocked:
            raise ConfigError(
                f"Payload.{self.format}(scale_layout='blocked'): only {' and '.join(blocked)} have blocked scales; "
                "use scale_layout='compact'"
            )
        return self

    @model_validator(mode="after")
    def _check_raw(self) -> Payload:
        sizes = {"row_bytes": self.row_bytes, "scale_row_bytes": self.scale_row_bytes}
        if self.format != "raw":
            given = [f"{name}={size}" for name, size in sizes.items() if size]
            if given:
                raise ConfigError(
                    f"Payload(format={self.format!r}): {', '.join(given)} given, but the format fixes its own row; "
                    "drop it or use Payload.raw"
                )
            return self
        for name, size in sizes.items():
            if size % ROW_ALIGNMENT_BYTES or (name == "row_bytes" and size == 0):
                raise ConfigError(
                    f"Payload.raw: {name}={size} must be a positive multiple of {ROW_ALIGNMENT_BYTES} "
                    f"(scale_row_bytes may be 0); pad the row to {max(round_up(size, ROW_ALIGNMENT_BYTES), 16)}"
                )
        return self


class EpConfig(_Checked):
    """Describe one expert-parallel buffer: who takes part, how large a row is, what may happen.

    Example: EpConfig(num_ranks=8, num_experts=256, num_topk=8, hidden=7168, max_tokens_per_rank=4096)

    Raises:
        ConfigError: a value or a pair of values that cannot work; every message names the field and the remedy.
    """

    num_ranks: Size
    """R: ranks of the expert-parallel group. All ranks agree."""

    num_experts: Size
    """E: experts of one layer over all ranks, a multiple of num_ranks. All ranks agree."""

    num_topk: int = Field(ge=1, le=MAX_TOPK)
    """K: experts chosen per token, at most 64; may exceed num_experts. All ranks agree."""

    hidden: Size
    """H: elements of a token row, which must be a multiple of 16 bytes. All ranks agree."""

    max_tokens_per_rank: Size
    """T: most tokens that one rank dispatches in one call; live counts may differ. All ranks agree."""

    token_dtype: TokenDtype = "bf16"
    """Dtype of x, expert outputs, y and their gradients: bf16, fp16 or fp32. All ranks agree."""

    recv_capacity_per_rank: Size | None = None
    """C: rows that a rank can receive, a multiple of expert_alignment. All ranks agree."""

    capacity_factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """C as a multiple of T*K rows. None with no recv_capacity_per_rank: the worst case, in which every token of every
    rank chooses as many of this rank's experts as it can, none of them twice. All ranks agree."""

    expert_alignment: Size = 1
    """A: rows; each expert's zone starts at a multiple; a power of two. All ranks agree."""

    dispatch_payload: Payload = Payload(format="same")
    """Format of the rows that dispatch sends: a Payload or same, mxfp8, fp8_block128, nvfp4. All ranks agree."""

    combine_grad_payload: Payload = Payload(format="same")
    """Format of the rows that combine's backward sends: a Payload or its word. All ranks agree."""

    save_recv: bool = True
    """Keep received rows until the experts' weight gradient (per frame), else until the first GEMM. All ranks agree."""

    alias: tuple[tuple[str, str], ...] = ()
    """Pairs of regions that share bytes: recv_tokens=expert_out, grad_expert_out=grad_recv_tokens. All ranks agree."""

    inference_only: bool = False
    """Plan no memory for backward, and refuse it. All ranks agree."""

    overflow_policy: Literal["drop", "error"] = "drop"
    """When a rank needs more than C rows: drop rows and flag it, or raise CapacityError. All ranks agree."""

    validate_ids: bool = False
    """Raise ConfigError for ids >= E instead of only counting them; eager: one host read a call. All ranks agree."""

    wire: Literal["direct", "dedup", "auto"] = "direct"
    """How dispatch and combine's backward reach a rank: each row on its own ("direct"), or a token once, and that rank
    copies it to its slots ("dedup"), with the same result; "auto": the one that the plan expects to be faster.
    All ranks agree."""

    combine_order: Literal["k", "by_rank"] = "k"
    """Order of the sums of combine and of dispatch's backward: "k", or "by_rank": each rank adds its rows of a token in
    k order and rounds, and these are added in rank order: one row from each rank. All ranks agree."""

    max_num_sms: Size | None = None
    """Most SMs that a data-moving kernel uses; None: as many as it likes. Ignored on CPU. All ranks agree."""

    timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that an op waits for a peer before it gives up. All ranks agree."""

    @property
    def num_local_experts(self) -> int:
        """L: experts that one rank owns."""
        return self.num_experts // self.num_ranks

    @field_validator("dispatch_payload", "combine_grad_payload", mode="before")
    @classmethod
    def _payload_from_word(cls, value: object) -> object:
        words = ("same", "mxfp8", "fp8_block128", "nvfp4")
        if not isinstance(value, str):
            return value
        if value not in words:
            raise ConfigError(
                f"payload {value!r} is not known; use one of {', '.join(words)} or Payload.raw(row_bytes, ...)"
            )
        return Payload(format=value)  # type: ignore[arg-type]

    @field_validator("alias", mode="before")
    @classmethod
    def _alias_of_pairs(cls, value: object) -> object:
        pairs = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in _items(value))
        unknown = next((pair for pair in pairs if pair not in ALIASES), None)
        if unknown is not None:
            known = " and ".join(repr(pair) for pair in ALIASES)
            raise ConfigError(f"alias {unknown!r} is not a pair that may share bytes; the pairs are {known}")
        return pairs

    @model_validator(mode="after")
    def _check_experts(self) -> EpConfig:
        if self.num_experts % self.num_ranks:
            raise ConfigError(
                f"num_experts={self.num_experts} does not divide over num_ranks={self.num_ranks} "
                f"(remainder {self.num_experts % self.num_ranks}); "
                f"pad to {round_up(self.num_experts, self.num_ranks)} experts or use another group size"
            )
        return self

    @model_validator(mode="after")
    def _check_capacity(self) -> EpConfig:
        capacity, alignment = self.recv_capacity_per_rank, self.expert_alignment
        if alignment & (alignment - 1):
            raise ConfigError(f"expert_alignment={alignment} is not a power of two; use 1, 2, 4, ... 128")
        if capacity is not None and self.capacity_factor is not None:
            raise ConfigError(
                f"recv_capacity_per_rank={capacity} and capacity_factor={self.capacity_factor} both given; give one"
            )
        if capacity is not None and capacity % alignment:
            raise ConfigError(
                f"recv_capacity_per_rank={capacity} is not a multiple of expert_alignment={alignment} "
                f"(remainder {capacity % alignment}); use {round_up(capacity, alignment)}"
            )
        return self

    @model_validator(mode="after")
    def _check_rows(self) -> EpConfig:
        multiple = ROW_ALIGNMENT_BYTES // TOKEN_BYTES[self.token_dtype]
        if self.hidden % multiple:
            raise ConfigError(
                f"hidden={self.hidden} of {self.token_dtype} is a row of {self.hidden * TOKEN_BYTES[self.token_dtype]} "
                f"bytes, not a multiple of {ROW_ALIGNMENT_BYTES}; pad hidden to {round_up(self.hidden, multiple)}"
            )
        for field in ("dispatch_payload", "combine_grad_payload"):
            payload: Payload = getattr(self, field)
            payload.check_hidden(field, self.hidden)
            if payload.scale_layout == "blocked" and self.expert_alignment % BLOCKED_TILE_ROWS:
                raise ConfigError(
                    f"{field} has blocked scales in tiles of {BLOCKED_TILE_ROWS} rows, found "
                    f"expert_alignment={self.expert_alignment}; use a multiple of {BLOCKED_TILE_ROWS} or "
                    "scale_layout='compact'"
                )
        return self

    @model_validator(mode="after")
    def _check_alias(self) -> EpConfig:
        if ALIASES[0] in self.alias and (self.save_recv or not self.dispatch_payload.is_quantised):
            raise ConfigError(
                f"alias {ALIASES[0]!r} needs a quantised dispatch_payload and save_recv=False, found "
                f"{self.dispatch_payload.format!r} and save_recv={self.save_recv}: "
                "the received rows would be overwritten while they are needed; drop the alias or change both"
            )
        if ALIASES[1] in self.alias and self.inference_only:
            raise ConfigError(f"alias {ALIASES[1]!r} names regions that inference_only=True does not plan; drop it")
        if len(set(self.alias)) != len(self.alias):
            raise ConfigError(f"alias {self.alias!r} names a pair twice; name it once")
        return self
