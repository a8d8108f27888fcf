"""Bad input: a clear error on every rank, nothing changed, and the next correct call is right."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import raised, size_of, virtual
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf.errors import ConfigError, EpbufError, LeaseError

Spread = Callable[..., list[Any]]
PAIR = named_case("some_negative", 2, 16)  # bf16, T = 12, K = 3, H = 16, E = 8
CAPACITY = epbuf.Plan.build(PAIR.config).capacity_rows


@dataclass(frozen=True)
class Fault:
    """One wrong call on one rank.

    Attributes:
        change: good arguments -> bad ones (by name).
        says: pattern of this rank's message.
        cause: pattern of what the other ranks are told.
    """

    change: Callable[[dict[str, Any]], dict[str, Any]]
    says: str
    cause: str
    kind: type[EpbufError] = ConfigError


def _unaligned(rows: Tensor) -> Tensor:
    """Copy rows to an address that is no multiple of 16 bytes."""
    buffer = torch.empty(rows.numel() + 8, dtype=rows.dtype)
    moved = buffer[1 : 1 + rows.numel()].view(rows.shape)
    assert moved.data_ptr() % 16
    return moved.copy_(rows)


def _wide(rows: Tensor, extra: int) -> Tensor:
    """Copy rows into a tensor with `extra` more columns and return the narrow view."""
    wide = torch.zeros(len(rows), rows.shape[1] + extra, dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def _every_other_column(rows: Tensor) -> Tensor:
    return torch.stack([rows, rows], dim=2).flatten(1)[:, ::2]


# Dispatch is called with x [12, 16] bf16, topk_idx [12, 3] int64, topk_weights [12, 3] f32 and the lease.
DISPATCH = {
    "x_dtype": Fault(lambda a: {"x": a["x"].float()}, r"x.*float32.*bfloat16", "dtype"),
    "x_hidden": Fault(lambda a: {"x": a["x"][:, :8].contiguous()}, r"x.*hidden=16.*8", "shape"),
    "x_one_dimension": Fault(lambda a: {"x": a["x"][0]}, r"x.*hidden=16", "shape"),
    "x_no_tensor": Fault(lambda a: {"x": a["x"].tolist()}, r"x.*list", "argument"),
    "x_device": Fault(lambda a: {"x": a["x"].to("meta")}, r"x.*meta.*cpu", "device"),
    "x_columns": Fault(lambda a: {"x": _every_other_column(a["x"])}, r"x.*strides.*contiguous", "stride"),
    "x_row_stride": Fault(lambda a: {"x": _wide(a["x"], 1)}, r"x.*34 bytes", "stride"),
    "x_base": Fault(lambda a: {"x": _unaligned(a["x"])}, r"x.*16 bytes", "align"),
    "x_overlap": Fault(lambda a: {"x": a["lease"].recv_tokens[:12]}, r"x.*recv_tokens", "overlap"),
    "too_many_tokens": Fault(
        lambda a: {name: a[name].repeat(2, 1)[:13] for name in ("x", "topk_idx", "topk_weights")},
        r"13.*max_tokens_per_rank=12",
        "max_tokens_per_rank",
    ),
    "ids_topk": Fault(lambda a: {"topk_idx": a["topk_idx"][:, :2].contiguous()}, r"topk_idx.*=3.*2\]", "shape"),
    "ids_tokens": Fault(lambda a: {"topk_idx": a["topk_idx"][:5]}, r"topk_idx.*12.*\[5, 3\]", "shape"),
    "ids_float": Fault(lambda a: {"topk_idx": a["topk_idx"].float()}, r"topk_idx.*float32.*int64", "dtype"),
    "ids_bool": Fault(lambda a: {"topk_idx": a["topk_idx"] > 0}, r"topk_idx.*bool.*int64", "dtype"),
    "ids_columns": Fault(lambda a: {"topk_idx": a["topk_idx"].t().contiguous().t()}, r"topk_idx.*strides", "stride"),
    "ids_device": Fault(lambda a: {"topk_idx": a["topk_idx"].to("meta")}, r"topk_idx.*meta.*cpu", "device"),
    "weights_f64": Fault(lambda a: {"topk_weights": a["topk_weights"].double()}, r"weights.*float64.*float32", "dtype"),
    "weights_bf16": Fault(
        lambda a: {"topk_weights": a["topk_weights"].bfloat16()}, r"weights.*bfloat16.*float32", "dtype"
    ),
    "weights_shape": Fault(
        lambda a: {"topk_weights": a["topk_weights"][:, :2].contiguous()}, r"weights.*=3.*2\]", "shape"
    ),
    "weights_device": Fault(lambda a: {"topk_weights": a["topk_weights"].to("meta")}, r"weights.*meta.*cpu", "device"),
    "num_tokens_number": Fault(lambda a: {"num_tokens": 5}, r"num_tokens.*int", "argument"),
    "num_tokens_shape": Fault(lambda a: {"num_tokens": torch.tensor([5, 5])}, r"num_tokens.*\[1\].*\[2\]", "shape"),
    "num_tokens_float": Fault(lambda a: {"num_tokens": torch.tensor([5.0])}, r"num_tokens.*float32", "dtype"),
    "scales": Fault(lambda a: {"x_scales": torch.ones(12, 16)}, r"x_scales.*same", "argument"),
}


def _half_rows(a: dict[str, Any]) -> dict[str, Any]:
    """Make an expert_out whose rows lie half a row apart in the region that combine writes."""
    region = a["lease"].expert_out
    return {"expert_out": region.as_strided(tuple(region.shape), (8, 1))}


# Combine is called with expert_out [C, 16] bf16 and topk_weights None.
COMBINE = {
    "rows_dtype": Fault(lambda a: {"expert_out": a["expert_out"].float()}, r"expert_out.*float32.*bfloat16", "dtype"),
    "rows_hidden": Fault(lambda a: {"expert_out": a["expert_out"][:, :8].contiguous()}, r"expert_out.*16.*8", "shape"),
    "rows_missing": Fault(lambda a: {"expert_out": a["expert_out"][:-1]}, rf"{CAPACITY - 1} rows.*{CAPACITY}", "shape"),
    "rows_device": Fault(lambda a: {"expert_out": a["expert_out"].to("meta")}, r"expert_out.*meta.*cpu", "device"),
    "rows_columns": Fault(
        lambda a: {"expert_out": _every_other_column(a["expert_out"])}, r"expert_out.*strides.*contiguous", "stride"
    ),
    "rows_row_stride": Fault(lambda a: {"expert_out": _wide(a["expert_out"], 1)}, r"expert_out.*34 bytes", "stride"),
    "rows_base": Fault(lambda a: {"expert_out": _unaligned(a["expert_out"])}, r"expert_out.*16 bytes", "align"),
    "rows_overlap": Fault(_half_rows, r"expert_out overlaps.*expert_out", "overlap"),
    "rows_no_tensor": Fault(lambda a: {"expert_out": None}, r"expert_out.*None", "argument"),
    "weights_dtype": Fault(
        lambda a: {"topk_weights": torch.ones(CAPACITY, dtype=torch.bfloat16)}, r"weights.*bfloat16.*float32", "dtype"
    ),
    "weights_of_tokens": Fault(lambda a: {"topk_weights": torch.ones(12, 3)}, rf"weights.*{CAPACITY}.*12, 3", "shape"),
    "weights_strided": Fault(
        lambda a: {"topk_weights": torch.ones(2 * CAPACITY)[::2]}, r"weights.*contiguous", "stride"
    ),
    "raw_grad": Fault(lambda a: {"raw_grad": True}, r"raw_grad.*same", "argument"),
    "out_shape": Fault(lambda a: {"out": torch.empty(11, 16, dtype=torch.bfloat16)}, r"out.*11.*12", "shape"),
    "out_dtype": Fault(lambda a: {"out": torch.empty(12, 16)}, r"out.*float32.*bfloat16", "dtype"),
    "out_in_window": Fault(lambda a: {"out": a["lease"].recv_tokens[:12]}, r"out.*window", "overlap"),
}


def _dispatch_fault(rank: int, group: Any, name: str) -> tuple[str, Tensor]:
    inputs, fault = draw_inputs(PAIR, rank, True), DISPATCH[name]
    with epbuf.Arena.open(epbuf.Plan.build(PAIR.config), group) as arena, arena.acquire() as lease, torch.no_grad():
        arguments = {"x": inputs.x, "topk_idx": PAIR.topk_idx[rank], "topk_weights": inputs.topk_weights}
        wrong = fault.change({**arguments, "lease": lease}) if rank == 1 else {}
        message = raised(fault.kind, lambda: epbuf.dispatch(lease, **(arguments | wrong)))
        recv = epbuf.dispatch(lease, **arguments)
        return message, epbuf.combine(lease, recv.tokens)


def _combine_fault(rank: int, group: Any, name: str) -> tuple[str, Tensor]:
    x, fault = draw_inputs(PAIR, rank, True).x, COMBINE[name]
    with epbuf.Arena.open(epbuf.Plan.build(PAIR.config), group) as arena, arena.acquire() as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, x, PAIR.topk_idx[rank])
        arguments = {"expert_out": recv.tokens.clone()}
        wrong = fault.change({**arguments, "lease": lease}) if rank == 1 else {}
        message = raised(fault.kind, lambda: epbuf.combine(lease, **(arguments | wrong)))
        return message, epbuf.combine(lease, **arguments)


def _assert_refused_everywhere(results: list[tuple[str, Tensor]], fault: Fault) -> None:
    (told, _), (said, _) = results
    assert re.search(fault.says, said, re.DOTALL), f"rank 1 said: {said}"
    assert re.search(rf"(?i)rank 1.*{fault.cause}", told, re.DOTALL), f"rank 0 was told: {told}"
    for rank, (_, y) in enumerate(results):
        kept = (PAIR.topk_idx[rank] >= 0).sum(1, keepdim=True)
        assert_same(y, (draw_inputs(PAIR, rank, True).x * kept).to(y.dtype), f"y of the next call on rank {rank}")


@pytest.mark.parametrize("name", list(DISPATCH))
def test_dispatch_refuses_on_every_rank(name: str) -> None:
    """Bad arguments of one rank: that rank says what it found, the other who refused and why; then both succeed."""
    _assert_refused_everywhere(virtual(2, _dispatch_fault, name), DISPATCH[name])


@pytest.mark.parametrize("name", list(COMBINE))
def test_combine_refuses_on_every_rank(name: str) -> None:
    """The same for combine: the dispatch before it is not lost."""
    _assert_refused_everywhere(virtual(2, _combine_fault, name), COMBINE[name])


@pytest.mark.parametrize("name", ["x_dtype", "too_many_tokens"])
def test_dispatch_refuses_among_processes(name: str, pool: Any) -> None:
    """The same among processes, where the refusal travels through shared memory."""
    _assert_refused_everywhere(pool.run(2, _dispatch_fault, name), DISPATCH[name])


def test_combine_refuses_among_processes(pool: Any) -> None:
    """The same for combine among processes."""
    _assert_refused_everywhere(pool.run(2, _combine_fault, "rows_missing"), COMBINE["rows_missing"])


@pytest.fixture
def arena() -> Iterator[epbuf.Arena]:
    with open_arena() as arena:
        yield arena


def open_arena(num_frames: int = 1, group: Any = None, **config: Any) -> epbuf.Arena:
    sizes = base_config(size_of(group), expert_alignment=16, **config)
    return epbuf.Arena.open(epbuf.Plan.build(sizes, schedule=epbuf.Schedule(num_frames)), group)


def x_of(rank: int = 0) -> Tensor:
    return draw_inputs(PAIR, rank, True).x


def ids_of(num_ranks: int) -> Tensor:
    return torch.arange(36).view(12, 3) % (4 * num_ranks)


def assert_works(arena: epbuf.Arena, rank: int = 0) -> None:
    """Run a training step and compare y and dx."""
    x = x_of(rank).requires_grad_()
    with arena.acquire() as lease:
        y = epbuf.combine(lease, epbuf.dispatch(lease, x, ids_of(arena.plan.config.num_ranks)).tokens)
    assert_same(y.detach(), x.detach() * 3, "y of the next step")
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert_same(x.grad, torch.full_like(x, 3), "dx of the next step")


def _dispatch_twice(arena: epbuf.Arena, rank: int) -> None:
    with arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x_of(rank), ids_of(2))
        with pytest.raises(LeaseError, match=r"(?i)dispatch.*twice.*frame 0"):
            epbuf.dispatch(lease, x_of(rank) + 1, ids_of(2))
        assert_same(epbuf.combine(lease, recv.tokens).detach(), x_of(rank) * 3, "y of the first dispatch")


def _combine_twice(arena: epbuf.Arena, rank: int) -> None:
    with arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x_of(rank), ids_of(2))
        epbuf.combine(lease, recv.tokens)
        with pytest.raises(LeaseError, match=r"(?i)combine.*twice.*frame 0"):
            epbuf.combine(lease, recv.tokens)


def _combine_first(arena: epbuf.Arena, rank: int) -> None:
    rows = torch.ones(arena.plan.capacity_rows, 16, dtype=torch.bfloat16)
    with arena.acquire() as lease:
        with pytest.raises(LeaseError, match=r"(?i)combine.*before.*dispatch|dispatch.*first"):
            epbuf.combine(lease, rows)
        recv = epbuf.dispatch(lease, x_of(rank), ids_of(2))
        assert_same(epbuf.combine(lease, recv.tokens).detach(), x_of(rank) * 3, "y after the refused combine")


def _dispatch_after_release(arena: epbuf.Arena, rank: int) -> None:
    lease = arena.acquire()
    lease.release()
    with pytest.raises(LeaseError, match=r"(?i)frame 0.*released|ended"):
        epbuf.dispatch(lease, x_of(rank), ids_of(2))


def _combine_after_release(arena: epbuf.Arena, rank: int) -> None:
    lease = arena.acquire()
    recv = epbuf.dispatch(lease, x_of(rank), ids_of(2))
    lease.release()
    with pytest.raises(LeaseError, match=r"(?i)release"):
        epbuf.combine(lease, recv.tokens)


def _dispatch_on_a_stale_lease(arena: epbuf.Arena, rank: int) -> None:
    stale = arena.acquire()
    stale.release()
    with arena.acquire() as lease:
        with pytest.raises(LeaseError, match=r"(?i)frame 0.*released|ended"):
            epbuf.dispatch(stale, x_of(rank), ids_of(2))
        recv = epbuf.dispatch(lease, x_of(rank), ids_of(2))
        assert_same(epbuf.combine(lease, recv.tokens).detach(), x_of(rank) * 3, "y of the living lease")


OUT_OF_ORDER = [
    _dispatch_twice,
    _combine_twice,
    _combine_first,
    _dispatch_after_release,
    _combine_after_release,
    _dispatch_on_a_stale_lease,
]


def _out_of_order(rank: int, group: Any, number: int) -> None:
    with open_arena(1, group) as arena:
        OUT_OF_ORDER[number](arena, rank)
        assert_works(arena, rank)


@pytest.mark.parametrize("number", range(len(OUT_OF_ORDER)), ids=[f.__name__.strip("_") for f in OUT_OF_ORDER])
def test_calls_out_of_order(number: int) -> None:
    """A lease takes one dispatch and then one combine, while it lives; a wrong call changes nothing on any rank."""
    virtual(2, _out_of_order, number)


def test_double_release(arena: epbuf.Arena) -> None:
    """The second release() says which frame, and does not free somebody else's lease of the same frame."""
    lease = arena.acquire()
    lease.release()
    with arena.acquire(), pytest.raises(LeaseError, match=r"release\(\).*twice.*frame 0"):
        lease.release()
    with arena.acquire():
        with pytest.raises(LeaseError):
            lease.release()
        with pytest.raises(LeaseError, match="frame 0"):
            arena.acquire()
    assert_works(arena)


def test_acquire_beyond_the_frames() -> None:
    """The message names every holder and its line, and the Schedule to use."""
    with open_arena(2) as arena:
        first, second = arena.acquire(), arena.acquire()
        with pytest.raises(LeaseError, match=r"(?s)2.*frame 0.*test_bad_input\.py:\d+.*frame 1.*Schedule"):
            arena.acquire()
        first.release()
        second.release()
        assert_works(arena)


def test_acquire_of_a_frame_that_is_not_there(arena: epbuf.Arena) -> None:
    """A frame number past the plan is refused with both numbers."""
    with pytest.raises(LeaseError, match=r"frame=7.*0"):
        arena.acquire(frame=7)
    with pytest.raises(LeaseError, match=r"frame=-1"):
        arena.acquire(frame=-1)
    assert_works(arena)


def test_acquire_of_a_busy_frame() -> None:
    """The named frame is refused while it is busy, although another is free."""
    with open_arena(2) as arena:
        with arena.acquire(1), pytest.raises(LeaseError, match=r"(?s)frame=1.*test_bad_input\.py:\d+"):
            arena.acquire(frame=1)
        assert_works(arena)


def test_unknown_region_of_a_lease(arena: epbuf.Arena) -> None:
    """A region that the plan has not is an AttributeError with its name."""
    with arena.acquire() as lease, pytest.raises(AttributeError, match="recv_token"):
        _ = lease.recv_token


def test_use_after_close() -> None:
    """Every call on a closed arena, and on what it handed out, says that it is closed."""
    with open_arena() as arena:
        lease = arena.acquire()
    calls: dict[str, Callable[[], object]] = {
        "acquire": arena.acquire,
        "check": arena.check,
        "report": arena.report,
        "view": lambda: lease.recv_tokens,
        "dispatch": lambda: epbuf.dispatch(lease, x_of(), ids_of(1)),
        "combine": lambda: epbuf.combine(lease, x_of()),
    }
    for name, call in calls.items():
        with pytest.raises(LeaseError, match="closed"):
            call()
            pytest.fail(f"{name} worked on a closed arena")
    arena.close()


def test_backward_after_close() -> None:
    """A graph that outlives its arena raises in backward, and touches no memory."""
    x = x_of().requires_grad_()
    with open_arena() as arena, arena.acquire() as lease:
        y = epbuf.combine(lease, epbuf.dispatch(lease, x, ids_of(1)).tokens)
    with pytest.raises(LeaseError, match="closed"):
        y.backward(torch.ones_like(y))


def test_old_lease_does_not_reach_a_new_arena() -> None:
    """The handle of a closed arena is never mistaken for that of the next one."""
    with open_arena() as old:
        lease = old.acquire()
    with open_arena() as arena:
        with pytest.raises(LeaseError, match="closed"):
            epbuf.dispatch(lease, x_of(), ids_of(1))
        assert_works(arena)


def _wrong_size(rank: int, group: Any) -> str:
    message = raised(ConfigError, lambda: epbuf.Arena.open(epbuf.Plan.build(base_config(4)), group))
    with open_arena(1, group) as arena:
        assert_works(arena, rank)
    return message


def test_group_of_another_size(spread: Spread) -> None:
    """A plan for 4 ranks on a group of 2 is refused on both, with both numbers; the right plan then opens."""
    for message in spread(2, _wrong_size):
        assert "num_ranks=4" in message and "2" in message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param({"group": "world"}, "group.*str", id="group"),
        pytest.param({"window": "shared"}, 'window="shared".*host', id="window"),
        pytest.param({"engine": "fast"}, 'engine="fast".*native', id="engine"),
        pytest.param({"device": "meta"}, "meta.*cpu", id="device"),
    ],
)
def test_open_refuses(arguments: dict[str, Any], says: str) -> None:
    """Words that do not exist are refused with those that do."""
    with pytest.raises(ConfigError, match=says):
        epbuf.Arena.open(epbuf.Plan.build(base_config(1)), **arguments)


def test_open_takes_a_plan() -> None:
    """A config in place of a plan is refused, with what to do."""
    with pytest.raises(ConfigError, match=r"EpConfig.*Plan\.build"):
        epbuf.Arena.open(base_config(1))  # type: ignore[arg-type]


def test_raw_gradients_must_fit_into_a_gradient_row() -> None:
    """Raw gradient rows are the first bytes of y's gradient: open refuses larger ones with both sizes."""
    plan = epbuf.Plan.build(base_config(1, combine_grad_payload=epbuf.Payload.raw(32, 16)))
    with pytest.raises(ConfigError, match=r"32 bytes.*16 of scales.*32 bytes"):
        epbuf.Arena.open(plan)


def test_unpack_takes_raw_gradients_only() -> None:
    """unpack() of an ordinary tensor is refused, with what it takes."""
    for foreign in (torch.ones(3, 4), torch.full((), torch.nan).expand(3, 4), [1.0]):
        with pytest.raises(ConfigError, match=r"raw_grad"):
            epbuf.unpack(foreign)  # type: ignore[arg-type]


def test_open_in_inference_mode_is_refused() -> None:
    """Tensors made in inference_mode cannot be saved for backward: open says so, and works right after, outside."""
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"inside torch\.inference_mode.*outside"):
        open_arena()
    with open_arena() as arena:
        assert_works(arena)


def test_backward_with_inference_only() -> None:
    """A plan without memory for backward refuses it by name, and inference goes on."""
    with open_arena(inference_only=True) as arena:
        with pytest.raises(ConfigError, match="inference_only"):
            assert_works(arena)
        with arena.acquire() as lease, torch.no_grad():
            y = epbuf.combine(lease, epbuf.dispatch(lease, x_of(), ids_of(1)).tokens)
        assert_same(y, x_of() * 3, "y after the refused backward")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param(
            {"recv_capacity_per_rank": 64, "capacity_factor": 1.5}, "recv_capacity_per_rank=64.*capacity_factor=1.5",
            id="both_capacities",
        ),
        pytest.param({"recv_capacity_per_rank": 24, "expert_alignment": 16}, "24.*16", id="capacity_alignment"),
        pytest.param({"expert_alignment": 24}, "expert_alignment=24.*power of two", id="alignment_power"),
        pytest.param({"num_topk": 65}, "num_topk=65.*64", id="topk"),
        pytest.param({"num_experts": 7}, "num_experts=7.*num_ranks=2", id="experts"),
        pytest.param({"hiden": 16}, "hiden.*hidden", id="misspelt"),
        pytest.param({"hidden": 12}, "hidden=12.*16", id="row_bytes"),
        pytest.param({"token_dtype": "fp64"}, "token_dtype='fp64'.*bf16", id="dtype"),
        pytest.param({"overflow_policy": "trap"}, "overflow_policy='trap'.*drop", id="policy"),
        pytest.param({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0", id="tokens"),
        pytest.param({"wire": "once"}, "wire='once'.*dedup", id="wire"),
    ],
)  # fmt: skip
def test_config_refuses(changes: dict[str, object], says: str) -> None:
    """A size or word that cannot work is a ConfigError with the numbers."""
    with pytest.raises(ConfigError, match=says):
        base_config(2, **changes)


def test_gradient_that_is_a_misaligned_view_is_read(arena: epbuf.Arena) -> None:
    """Autograd hands over views at any address: torch.cat in front of y must not make backward refuse."""
    x = x_of().requires_grad_()
    with arena.acquire() as lease:
        y = epbuf.combine(lease, epbuf.dispatch(lease, x, ids_of(1)).tokens)
    weights = torch.arange(1.0, y.numel() + 2).to(y.dtype)
    (torch.cat([torch.zeros(1, dtype=y.dtype), y.reshape(-1)]) * weights).sum().backward()
    assert x.grad is not None
    assert_same(x.grad, (3 * weights[1:].float()).to(x.dtype).view_as(x), "dx through a shifted gradient")


def test_one_row_needs_no_row_stride(arena: epbuf.Arena) -> None:
    """A single row of a wider tensor has no next row: its stride does not matter."""
    row = _wide(x_of()[:1], 1)
    with arena.acquire() as lease, torch.no_grad():
        y = epbuf.combine(lease, epbuf.dispatch(lease, row, ids_of(1)[:1]).tokens)
    assert_same(y, x_of()[:1] * 3, "y of one strided row")


def _freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def _fake(tensor: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


@pytest.mark.parametrize("spoil", [_freed, _fake], ids=["freed", "fake"])
@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights"])
def test_tensor_without_memory_is_refused(arena: epbuf.Arena, name: str, spoil: Callable[[Tensor], Tensor]) -> None:
    """What has elements and no bytes must not reach a kernel."""
    sent = {"x": x_of(), "topk_idx": ids_of(1), "topk_weights": torch.ones(len(x_of()), 3)}
    sent[name] = spoil(sent[name])
    with arena.acquire() as lease, pytest.raises(ConfigError, match=rf"{name}.*memory"):
        epbuf.dispatch(lease, **sent)
    assert_works(arena)


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights"])
def test_sparse_tensor_is_refused(arena: epbuf.Arena, name: str) -> None:
    """What has no strides is named with its layout."""
    sent = {"x": x_of(), "topk_idx": ids_of(1), "topk_weights": torch.ones(len(x_of()), 3)}
    sent[name] = sent[name].to_sparse()
    with arena.acquire() as lease, pytest.raises(ConfigError, match=rf"{name} has layout torch.sparse_coo"):
        epbuf.dispatch(lease, **sent)
    assert_works(arena)


def test_sparse_expert_out_is_refused(arena: epbuf.Arena) -> None:
    rows = torch.zeros(arena.plan.capacity_rows, 16, dtype=torch.bfloat16)
    with arena.acquire() as lease:
        epbuf.dispatch(lease, x_of(), ids_of(1))
        with pytest.raises(ConfigError, match=r"expert_out has layout torch.sparse_coo"):
            epbuf.combine(lease, rows.to_sparse())
        epbuf.combine(lease, rows)
    assert_works(arena)


def test_lazily_negated_rows_are_refused(arena: epbuf.Arena) -> None:
    """A negated view holds the other sign in memory."""
    with arena.acquire() as lease, pytest.raises(ConfigError, match=r"x.*lazy"):
        epbuf.dispatch(lease, torch._neg_view(x_of()), ids_of(1))
    assert_works(arena)


@pytest.mark.parametrize("kind", ["expanded", "expert_out", "leaf"])
def test_out_that_combine_must_not_write(arena: epbuf.Arena, kind: str) -> None:
    """`out` has a row per token, shares nothing with expert_out, and is no leaf that needs a gradient."""
    rows = torch.zeros(arena.plan.capacity_rows, 16, dtype=torch.bfloat16)
    out = {
        "expanded": torch.empty(1, 16, dtype=torch.bfloat16).expand(len(x_of()), 16),
        "expert_out": rows[: len(x_of())],
        "leaf": torch.zeros(len(x_of()), 16, dtype=torch.bfloat16, requires_grad=True),
    }[kind]
    says = {"expanded": "share memory", "expert_out": "overlaps expert_out", "leaf": "leaf"}[kind]
    with arena.acquire() as lease:
        epbuf.dispatch(lease, x_of(), ids_of(1))
        with pytest.raises(ConfigError, match=says):
            epbuf.combine(lease, rows, out=out)
        assert_same(epbuf.combine(lease, rows).detach(), torch.zeros_like(x_of()), "y after the refused out")


def test_weights_changed_before_backward_are_noticed(arena: epbuf.Arena) -> None:
    """The frame's weights are not saved, so their version is compared: a wrong gradient would be silent."""
    with arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x_of().requires_grad_(), ids_of(1), torch.ones(len(x_of()), 3))
        y = epbuf.combine(lease, recv.tokens * 1, topk_weights=recv.topk_weights)
        with torch.no_grad():
            recv.topk_weights.mul_(3)
    with pytest.raises(LeaseError, match="modified by an in-place operation"):
        y.sum().backward()


def _release_one(rank: int, group: Any) -> str:
    with open_arena(1, group) as arena:
        lease = arena.acquire()
        recv = epbuf.dispatch(lease, x_of(rank), ids_of(2))
        if rank == 0:
            lease.release()
        with pytest.raises(LeaseError) as caught:
            epbuf.combine(lease, recv.tokens)
        said = str(caught.value)
        del caught, recv, lease
        assert_works(arena, rank)
        return said


def test_combine_after_release_on_one_rank_reaches_the_other() -> None:
    """The peer waits for READY: the refusal travels there, not a time-out."""
    own, peer = virtual(2, _release_one)
    assert "after release()" in own
    assert re.search(r"rank 0 refused combine.*out of order", peer)


def test_lease_cannot_be_copied(arena: epbuf.Arena) -> None:
    """A copy's death would end the claim of the original."""
    with arena.acquire() as lease:
        for copy_it in (copy.copy, copy.deepcopy):
            with pytest.raises(LeaseError, match="cannot be copied"):
                copy_it(lease)
        gc.collect()
        assert_same(
            epbuf.combine(lease, epbuf.dispatch(lease, x_of(), ids_of(1)).tokens).detach(), x_of() * 3, "y of the lease"
        )


@pytest.mark.parametrize("frame", ["0", True, 1.0], ids=str)
def test_acquire_takes_an_int(arena: epbuf.Arena, frame: Any) -> None:
    with pytest.raises(LeaseError, match="takes an int"):
        arena.acquire(frame)


def test_unknown_device() -> None:
    with pytest.raises(ConfigError, match="tpu"):
        epbuf.Arena.open(epbuf.Plan.build(base_config(1)), device="tpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"on_overflow": "rais"}, "on_overflow"),
        ({"warmup": -1}, "warmup"),
        ({"arenas": ()}, "arena"),
        ({"example_inputs": torch.ones(2)}, "example_inputs"),
        ({"restore": torch.nn.Linear(1, 1)}, "restore"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_capture_checks_its_arguments(arena: epbuf.Arena, changes: dict[str, Any], says: str) -> None:
    good = {"arenas": arena, "fn": lambda x: x + 1, "example_inputs": (torch.ones(2),)}
    with pytest.raises(ConfigError, match=says):
        epbuf.CapturedStep.capture(**(good | changes))


def test_failed_capture_leaves_nothing(arena: epbuf.Arena) -> None:
    """Weights are put back, no graph holds the arena, and the error may be kept."""
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.weight.add_(1)
        with arena.acquire() as lease, torch.no_grad():
            epbuf.dispatch(lease, x, ids_of(1))
        raise ValueError("in the middle")

    kept = raised(ValueError, lambda: epbuf.CapturedStep.capture(arena, step, (x_of(),), restore=(model,)))
    assert_same(model.weight.detach(), before, "weights after the failed capture")
    assert arena.report()["graphs"] == [], kept
