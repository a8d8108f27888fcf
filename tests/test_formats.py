"""The bits of every quantised format: csrc/formats.h against torchao and against the float64 reference.

Rows are encoded by a dispatch of one rank to its one expert, into regions that are full of 0xFF before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx as torchao_to_mx
from torchao.prototype.mx_formats.utils import to_blocked

import epbuf
from epbuf import Payload, reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("mxfp8", "fp8_block128", "nvfp4")
HIDDENS = (32, 96, 2880, 7168)
NUM_ROWS = 6


def normal(rows: Tensor) -> Tensor:
    return rows


def wide(rows: Tensor) -> Tensor:
    """Spread magnitudes over as many powers of two as fp16 has."""
    return rows * torch.exp2(torch.linspace(-20, 14, rows.shape[1]).round())


def subnormal(rows: Tensor) -> Tensor:
    return rows * torch.finfo(rows.dtype).smallest_normal / 4


def zeros(rows: Tensor) -> Tensor:
    return rows * torch.linspace(-1, 1, len(rows)).sign()[:, None].to(rows.dtype) * 0


def one_huge(rows: Tensor) -> Tensor:
    rows[:, 5::64] = torch.finfo(rows.dtype).max
    return rows


def infinity(rows: Tensor) -> Tensor:
    rows[1::2, 3::64], rows[::2, 4::64] = torch.inf, -torch.inf
    return rows


def nan(rows: Tensor) -> Tensor:
    rows[:, 7::64] = torch.nan
    return rows


KINDS: tuple[Callable[[Tensor], Tensor], ...] = (normal, wide, subnormal, zeros, one_huge, infinity, nan)


@functools.cache
def draw(kind: Callable[[Tensor], Tensor], hidden: int, dtype: str) -> Tensor:
    """Draw rows of one kind. Shapes: [NUM_ROWS, hidden]."""
    generator = torch.Generator().manual_seed(hidden)
    return kind(torch.randn(NUM_ROWS, hidden, generator=generator).to(DTYPES[dtype]) * 3).to(DTYPES[dtype])


def every_number(dtype: str, hidden: int = 512) -> Tensor:
    """List every 16-bit number: neighbours first, then mixed with all others. Shapes: [256, 512]."""
    bits = torch.arange(2**16).to(torch.int16)
    mixed = bits[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
    return torch.cat([bits, mixed]).view(DTYPES[dtype]).view(-1, hidden)


def encode(payload: Payload, x: Tensor) -> tuple[reference.Quantised, Tensor]:
    """Return what a dispatch makes of rows, as bytes and floats, and what it decodes them to."""
    word = next(word for word, dtype in DTYPES.items() if dtype == x.dtype)
    alignment = 128 if payload.scale_layout == "blocked" else 1
    config = epbuf.EpConfig(
        num_ranks=1, num_experts=1, num_topk=1, hidden=x.shape[1], max_tokens_per_rank=len(x), token_dtype=word,
        recv_capacity_per_rank=-(-len(x) // alignment) * alignment, expert_alignment=alignment,
        dispatch_payload=payload,
    )  # fmt: skip
    with epbuf.Arena.open(epbuf.Plan.build(config)) as arena, arena.acquire() as lease, torch.no_grad():
        arena.window.bytes_at(arena.plan.region("recv_tokens").offset, _nbytes(arena.plan)).fill_(0xFF)
        recv = epbuf.dispatch(lease, x, torch.zeros(len(x), 1, dtype=torch.int64))
        data, scales, row_scales = (
            None if t is None else _plain(t) for t in (recv.tokens, recv.scales, recv.row_scales)
        )
        rows = recv.dequantize()[: len(x)].clone()
        assert recv.row_mask().sum() == len(x)
        cut = slice(None if payload.scale_layout == "blocked" else len(x))
        encoded = reference.Quantised(data[: len(x)], scales[cut], None if row_scales is None else row_scales[: len(x)])
        del recv
    return encoded, rows


def _nbytes(plan: epbuf.Plan) -> int:
    """Return the bytes from recv_tokens to the end of what follows it in its set."""
    frame = [region for region in plan.regions if region.lifetime == "frame"]  # the wire of scales is elsewhere
    ends = [region.end for region in frame if region.name.startswith("recv_") and region.name != "recv_topk_weights"]
    return max(ends) - plan.region("recv_tokens").offset


def _plain(tensor: Tensor) -> Tensor:
    """Copy a tensor, as bytes unless it is float32."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint8)).clone()


def assert_bits(actual: Tensor, wanted: Tensor, what: str) -> None:
    """Compare bytes, or floats by their bits with all NaN equal."""
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape), what
    differs = actual != wanted
    if actual.is_floating_point():
        differs &= ~(actual.isnan() & wanted.isnan())
    first = differs.nonzero()[:1].flatten().tolist()
    assert not first, (
        f"{what}: {int(differs.sum())} differ, first {first}: {actual[tuple(first)]}, {wanted[tuple(first)]}"
    )


def assert_equal(actual: reference.Quantised, wanted: reference.Quantised) -> None:
    names = ("data", "scales", "row_scales")
    for name, mine, theirs in zip(names, actual.parts, wanted.parts, strict=False):
        assert_bits(mine, theirs, name)
    assert len(actual.parts) == len(wanted.parts)


def to_mx(x: Tensor) -> reference.Quantised:
    """Quantise with torchao, in float32, which holds every 16-bit number; a block with an infinity as one with NaN."""
    blocks = x.float().view(len(x), -1, 32)
    has_infinity = blocks.isinf().any(2, keepdim=True)
    blocks = torch.where(has_infinity, torch.nan, blocks)
    scales, data = torchao_to_mx(blocks.flatten(1), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    data = data.view(torch.uint8)
    return reference.Quantised(torch.where(data == 0xFF, 0x7F, data), scales.view(torch.uint8))  # NaN has no sign here


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("hidden", HIDDENS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mxfp8_equals_torchao(kind: Callable[[Tensor], Tensor], hidden: int, dtype: str) -> None:
    x = draw(kind, hidden, dtype)
    assert_equal(encode(Payload.mxfp8(), x)[0], to_mx(x))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mxfp8_of_every_number_equals_torchao(dtype: str) -> None:
    x = every_number(dtype)
    assert_equal(encode(Payload.mxfp8(), x)[0], to_mx(x))


@pytest.mark.parametrize("hidden", HIDDENS)
def test_blocked_scales_equal_torchao(hidden: int) -> None:
    """Tiles of scales as `to_blocked` makes them, where rows that are padding have scale 0."""
    x = draw(wide, hidden, "bf16").repeat(25, 1)  # 150 rows: two tiles, the second of them mostly padding
    scales = torch.nn.functional.pad(to_mx(x).scales, (0, 0, 0, 256 - len(x)))
    encoded, rows = encode(Payload.mxfp8(scale_layout="blocked"), x)
    wanted = to_blocked(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert_bits(encoded.scales.flatten(), wanted.flatten(), "blocked scales")
    assert_bits(encoded.scales, reference.blocked(scales), "blocked scales of the reference")
    assert_bits(rows, encode(Payload.mxfp8(), x)[1], "rows decoded from blocked scales")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("word", FORMATS)
def test_formats_equal_the_reference(word: str, kind: Callable[[Tensor], Tensor], dtype: str) -> None:
    """Data, scales and row scales, and the rows that they decode to."""
    payload = Payload(format=word)
    for hidden in (128, 7168) if word == "fp8_block128" else HIDDENS:
        x = draw(kind, hidden, dtype)
        encoded, rows = encode(payload, x)
        assert_equal(encoded, reference.quantise(payload, x))
        assert_bits(rows, reference.dequantise(payload, encoded, x.dtype), "decoded rows")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("word", FORMATS)
def test_every_number_equals_the_reference(word: str, dtype: str) -> None:
    x, payload = every_number(dtype), Payload(format=word)
    encoded, rows = encode(payload, x)
    assert_equal(encoded, reference.quantise(payload, x))
    assert_bits(rows, reference.dequantise(payload, encoded, x.dtype), "decoded rows")


def test_nvfp4_rounds_halfway_to_even() -> None:
    """With scales of 1 every element halfway between two values, and its neighbours, goes where float64 puts it."""
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    steps = torch.tensor([1 - 2**-23, 1.0, 1 + 2**-23])
    elements = (halfway[:, None] * steps).flatten()
    x = torch.zeros(1, 64)
    x[0, :6] = torch.tensor([2688.0, 0, 0, 0, 0, 0])
    x[0, 16:31], x[0, 31], x[0, 32:38], x[0, 47] = elements[:15], 6.0, -elements[15:], 6.0
    encoded, _ = encode(Payload.nvfp4(), x)
    assert encoded.row_scales.item() == 1.0 and encoded.scales[0, :3].tolist() == [0x7E, 0x38, 0x38]
    codes = torch.stack([encoded.data & 15, encoded.data >> 4], 2).flatten().tolist()
    assert codes[16:31] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4, 5]
    assert codes[32:38] == [8 + code for code in (5, 6, 6, 6, 6, 7)]
    assert_equal(encoded, reference.quantise(Payload.nvfp4(), x))


def test_nvfp4_is_exact_where_float32_is_not() -> None:
    """Random rows in float32, whose quotients fall close to halfway: float64 decides, and so does the engine."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 4096, generator=generator)
    assert_equal(encode(Payload.nvfp4(), x)[0], reference.quantise(Payload.nvfp4(), x))


def test_scales_are_padded_with_zeros() -> None:
    """H = 2880 in mxfp8: 90 scales in a row of 96 bytes, of which the view shows 90."""
    config = epbuf.EpConfig(
        num_ranks=1, num_experts=1, num_topk=1, hidden=2880, max_tokens_per_rank=2, dispatch_payload="mxfp8"
    )
    with epbuf.Arena.open(epbuf.Plan.build(config)) as arena, arena.acquire() as lease, torch.no_grad():
        lease.recv_scales.view(torch.uint8).fill_(0xFF)
        recv = epbuf.dispatch(lease, draw(normal, 2880, "bf16")[:2], torch.zeros(2, 1, dtype=torch.int64))
        assert lease.recv_scales.shape == (2, 96) and recv.scales.shape == (2, 90) and recv.scales.stride() == (96, 1)
        assert lease.recv_scales.view(torch.uint8)[:, 90:].eq(0).all()
        del recv


@pytest.mark.parametrize("word", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_saturates(word: str, dtype: str) -> None:
    """The largest number of a dtype, rounded up when it is encoded, comes back finite."""
    x = torch.full((1, 128), torch.finfo(DTYPES[dtype]).max, dtype=DTYPES[dtype])
    rows = encode(Payload(format=word), x)[1]
    assert rows.isfinite().all() and (rows.double() / x.double()).min() >= 0.8


def test_the_reference_knows_torch_dtypes() -> None:
    """The tables of E4M3 and E8M0 are those of torch's own dtypes."""
    codes = torch.arange(256).to(torch.uint8)
    assert_bits(
        reference._signed(codes.long(), reference.E4M3, 128).float(), codes.view(torch.float8_e4m3fn).float(), ""
    )
    assert_bits(reference._powers(codes), codes.view(torch.float8_e8m0fnu).float(), "")
