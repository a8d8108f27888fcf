"""What the ops demand of their arguments.

A check raises an `EpbufError` whose `refusal` says, in one number that fits a cell, why this rank refuses; the op then
completes the round so that no peer waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epbuf import _C
from epbuf.config import Payload
from epbuf.errors import ConfigError, EpbufError, LeaseError
from epbuf.generation import Generation
from epbuf.lease import Ticket
from epbuf.plan import Region

_Error = TypeVar("_Error", bound=EpbufError)
ROW_ALIGNMENT = 16  # bytes; the widest access of the copy kernels
_ID_DTYPES = (torch.int64, torch.int32)
_WEIGHT_DTYPES = (torch.float32,)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
SAVE_ALL_OPS = (
    "let it save all three ops: context_fn=partial(create_selective_checkpoint_contexts, [epbuf.ops.ROUTE, "
    "epbuf.ops.DISPATCH, epbuf.ops.COMBINE])"
)


def refuse(cause: _C.Refusal, error: _Error) -> NoReturn:
    """Raise `error`, marked with the cause that travels to the peers."""
    error.refusal = int(cause)
    try:
        raise error
    finally:
        del error  # or the error and this frame keep each other alive, with all tickets on the way


def refusal_of(error: BaseException | None) -> int:
    """Return the cause that travels for an error of this rank; 0 for none."""
    if error is None:
        return 0
    return getattr(error, "refusal", 0) or int(_C.Refusal.INTERNAL)


def are_placed(arena: Generation, needed: Iterable[object], optional: Iterable[object]) -> bool:
    """Tell at once what `check_places` spells out: whether each argument is a plain strided tensor on the device."""
    device, strided = arena.device, torch.strided
    given = cast(Iterable[torch.Tensor], (*needed, *(value for value in optional if value is not None)))
    return all(type(value) in _PLAIN and value.device == device and value.layout == strided for value in given)


def check_places(arena: Generation, needed: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Every argument is a tensor on the arena's device, or an optional None.

    These cannot wait for the op: its schema takes tensors only, and a meta tensor would never reach our kernel.
    """
    for name, value in (*needed.items(), *optional.items()):
        if value is None and name in optional:
            continue
        tensor = _tensor(name, value)
        if tensor.device != arena.device:
            refuse(
                _C.Refusal.DEVICE,
                ConfigError(f"{name} is on {tensor.device} and the arena on {arena.device}; move it with .to(device)"),
            )


@dataclass(slots=True)
class Tokens:
    """What a dispatch sends, as its caller gave it."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    x_scales: torch.Tensor | None
    x_row_scales: torch.Tensor | None
    num_tokens: torch.Tensor | None

    @property
    def has_scales(self) -> bool:
        """Whether the caller gave scales of either kind."""
        return self.x_scales is not None or self.x_row_scales is not None


def check_sent(arena: Generation, sent: Tokens, frame: int) -> None:
    """Check all tensors of a dispatch."""
    payload = arena.recv_payload
    takes_tokens = payload.format == "same" if not arena.encodes else payload.format != "raw"
    takes_tokens = takes_tokens and not sent.has_scales
    if not (takes_tokens and is_plain_dispatch(arena, sent.x, sent.topk_idx, sent.topk_weights)):
        num_tokens = check_tokens(arena, sent, frame).shape[0]
        check_topk_idx(arena, sent.topk_idx, num_tokens)
        check_topk_weights(arena, sent.topk_weights, num_tokens)
    check_live_tokens(arena, sent.num_tokens)


def is_plain_dispatch(
    arena: Generation, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
) -> bool:  # fmt: skip
    """Tell in few reads what nearly every dispatch brings: gapless tensors that none of the checks can refuse.

    False decides nothing: the checks do, and say why.
    """
    if not _are_plain_rows(arena, x):
        return False
    num_tokens = x.shape[0]
    shape = (num_tokens, arena.num_topk)
    return (
        num_tokens <= arena.max_tokens_per_rank
        and _is_plain(topk_idx, shape, _ID_DTYPES)
        and (topk_weights is None or _is_plain(topk_weights, shape, _WEIGHT_DTYPES))
    )


def is_plain_combine(arena: Generation, expert_out: torch.Tensor, topk_weights: torch.Tensor | None) -> bool:
    """Tell in few reads what nearly every combine brings: gapless [C, H] rows outside the window, dense weights."""
    capacity = arena.capacity_rows
    return (
        _are_plain_rows(arena, expert_out)
        and expert_out.shape[0] == capacity
        and (topk_weights is None or _is_plain(topk_weights, (capacity,), _WEIGHT_DTYPES))
    )


def _are_plain_rows(arena: Generation, rows: torch.Tensor) -> bool:
    """Tell whether rows [n, H] are gapless, aligned, outside the window, and have memory."""
    if rows.stride() != arena.row_strides or rows.dtype != arena.token_dtype:
        return False
    address = rows.data_ptr()
    return (
        address != 0
        and address % ROW_ALIGNMENT == 0
        and rows.shape[1] == arena.hidden
        and not rows.is_neg()
        and not arena.covers(address)
    )


def _is_plain(tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> bool:
    """Tell whether a tensor is dense, of the shape and one of the dtypes, and has memory."""
    return (
        tensor.shape == shape
        and tensor.dtype in dtypes
        and tensor.is_contiguous()
        and tensor.data_ptr() != 0
        and not tensor.is_neg()
    )


def check_dispatch_order(arena: Generation, frame: int, lease: int) -> None:
    """One dispatch per living lease."""
    if arena.book.may_dispatch(frame, lease):
        return
    if not arena.book.is_live_lease(frame, lease):
        repeated = f"; in the checkpoint of a compiled function, {SAVE_ALL_OPS}" if _in_backward() else ""
        refuse(
            _C.Refusal.LEASE,
            LeaseError(
                f"dispatch on a lease of frame {frame} that was released; acquire another for this dispatch{repeated}"
            ),
        )
    refuse(
        _C.Refusal.CALL_ORDER,
        LeaseError(f"dispatch was called twice on one lease of frame {frame}; acquire a lease for each dispatch"),
    )


def is_encoded(arena: Generation, sent: Tokens) -> bool:
    """Tell whether a dispatch brings rows that are in the format of the payload already."""
    return arena.recv_payload.format != "same" and (sent.has_scales or sent.x.dtype != arena.token_dtype)


def check_tokens(arena: Generation, sent: Tokens, frame: int) -> torch.Tensor:
    """Check x [T, H] token dtype, or encoded with its scales; row-strided, outside the regions that dispatch writes."""
    if arena.recv_payload.format == "same":
        check_no_scales(arena, sent)
    rows = _check_encoded(arena, sent) if _brings_encoded(arena, sent) else _rows(arena, "x", sent.x)
    if rows is sent.x and arena.recv_payload.is_quantised and not arena.encodes and not sent.has_scales:
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError(
                f"x is of the token dtype, and this engine forwards {arena.recv_payload.format} rows as they are: "
                "quantise them and pass x_scales="
            ),
        )
    if rows.shape[0] > arena.max_tokens_per_rank:
        refuse(
            _C.Refusal.TOO_MANY_TOKENS,
            ConfigError(
                f"x has {rows.shape[0]} tokens and the plan was built for max_tokens_per_rank="
                f"{arena.max_tokens_per_rank}; build the plan for the longest batch"
            ),
        )
    given = {"x": rows, "x_scales": sent.x_scales, "x_row_scales": sent.x_row_scales}
    for name, tensor in given.items():
        if tensor is not None:
            _check_outside_received(arena, name, tensor, frame)
    return rows


def _check_outside_received(arena: Generation, name: str, tensor: torch.Tensor, frame: int) -> None:
    if not arena.covers(tensor.data_ptr()):
        return  # the window is an allocation of its own: what begins elsewhere does not reach into it
    written = [*arena.received_regions(frame), arena.plan.region("recv_topk_weights", frame)]
    _check_outside(arena, name, tensor, written)


def _brings_encoded(arena: Generation, sent: Tokens) -> bool:
    """Tell how to read x; refuse a mixture of both ways."""
    payload, data = arena.recv_payload, arena.received(0, 0).data
    if payload.format == "same":
        return False
    if payload.is_quantised and sent.has_scales and isinstance(sent.x, torch.Tensor) and sent.x.dtype != data.dtype:
        refuse(
            _C.Refusal.DTYPE,
            ConfigError(
                f"x_scales was given with x of {_word(sent.x.dtype)}; rows that are {payload.format} already have "
                f"dtype {_word(data.dtype)}. Pass those, or leave x_scales out and epbuf quantises x"
            ),
        )
    return payload.format == "raw" or sent.x.dtype == data.dtype


def _check_encoded(arena: Generation, sent: Tokens) -> torch.Tensor:
    """Check x [T, packed] in the payload's data dtype and its scales."""
    payload, like = arena.recv_payload, arena.received(0, 0)
    x = _rows(arena, "x", sent.x, like.data.shape[1], like.data.dtype)
    num_scales = arena.num_scales
    _check_has(payload, "x_scales", sent.x_scales, num_scales > 0)
    _check_has(payload, "row scales, x_scales=(scales, row_scales)", sent.x_row_scales, like.row_scales is not None)
    if sent.x_scales is not None and arena.recv_scale_dtype is not None:
        is_byte = arena.recv_scale_dtype.itemsize == 1
        dtypes = (arena.recv_scale_dtype, torch.uint8) if is_byte else (arena.recv_scale_dtype,)
        scales = _shaped("x_scales", sent.x_scales, (x.shape[0], num_scales), dtypes)
        if scales.shape[0] and scales.shape[1] > 1 and scales.stride(1) != 1:
            refuse(
                _C.Refusal.STRIDES,
                ConfigError(f"x_scales has strides {tuple(scales.stride())}; its rows must be dense: .contiguous()"),
            )
    if sent.x_row_scales is not None:
        row_scales = _shaped("the row scales of x_scales", sent.x_row_scales, (x.shape[0],), _WEIGHT_DTYPES)
        if not row_scales.is_contiguous():
            found = f"the row scales of x_scales have strides {tuple(row_scales.stride())}"
            refuse(_C.Refusal.STRIDES, ConfigError(f"{found}; they must be dense: .contiguous()"))
    return x


def _check_has(payload: Payload, what: str, scales: torch.Tensor | None, wanted: bool) -> None:
    if wanted and scales is None:
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError(
                f'dispatch_payload="{payload.format}" with rows that are encoded already needs {what}; pass it'
            ),
        )
    if scales is not None and not wanted:
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError(f'dispatch_payload="{payload.format}" carries no {what}, found {list(scales.shape)}; drop it'),
        )


def _shaped(name: str, value: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    tensor = _tensor(name, value)
    _check_memory(name, tensor)
    if tensor.shape != shape:
        refuse(
            _C.Refusal.SHAPE,
            ConfigError(f"{name} must have shape {list(shape)}, found {list(tensor.shape)}"),
        )
    _check_kind(name, tensor, dtypes)
    if tensor.data_ptr() % tensor.element_size():
        refuse(
            _C.Refusal.ALIGNMENT,
            ConfigError(f"{name} begins at {tensor.data_ptr():#x}, no multiple of {tensor.element_size()}; clone it"),
        )
    return tensor


def check_topk_idx(arena: Generation, topk_idx: object, num_tokens: int) -> torch.Tensor:
    """Check topk_idx [T, K] int32 or int64 with dense rows."""
    return _per_topk(arena, "topk_idx", topk_idx, num_tokens, _ID_DTYPES)


def check_topk_weights(arena: Generation, topk_weights: object, num_tokens: int) -> torch.Tensor | None:
    """Check topk_weights [T, K] float32 with dense rows, or None."""
    if topk_weights is None:
        return None
    return _per_topk(arena, "topk_weights", topk_weights, num_tokens, (torch.float32,))


def check_live_tokens(arena: Generation, num_tokens: object) -> torch.Tensor | None:
    """Check num_tokens [1] int32 or int64 on the arena's device, or None."""
    if num_tokens is None:
        return None
    live = _tensor("num_tokens", num_tokens)
    if live.shape != (1,):
        refuse(_C.Refusal.SHAPE, ConfigError(f"num_tokens must have shape [1], found {list(live.shape)}"))
    _check_kind("num_tokens", live, _ID_DTYPES)
    _check_memory("num_tokens", live)
    return live


def check_no_scales(arena: Generation, sent: Tokens) -> None:
    """Refuse scales where the payload has none."""
    if sent.has_scales:
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError('x_scales was given and dispatch_payload="same" carries none; pass x_scales=None'),
        )


def check_combine_order(ticket: Ticket | None, frame: int) -> Ticket:
    """Combine once, after dispatch."""
    if ticket is None:
        refuse(
            _C.Refusal.CALL_ORDER,
            LeaseError(f"combine on frame {frame} before dispatch or after release(): call dispatch(lease, ...) first"),
        )
    if ticket.combined:
        repeated = f"; in a checkpoint, {SAVE_ALL_OPS}" if _in_backward() else ""
        refuse(
            _C.Refusal.CALL_ORDER,
            LeaseError(
                f"combine was called twice for one dispatch on frame {frame}; acquire a lease for another pair"
                + repeated
            ),
        )
    return ticket


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def check_expert_out(arena: Generation, expert_out: object, ticket: Ticket, workspace: int) -> bool:
    """Check expert_out [C, H] (or the rows of trim()); tell whether it is our own region."""
    rows = _rows(arena, "expert_out", expert_out)
    capacity = arena.capacity_rows
    if rows.shape[0] not in (capacity, ticket.num_rows):
        refuse(
            _C.Refusal.SHAPE,
            ConfigError(
                f"expert_out has {rows.shape[0]} rows; expected C={capacity}"
                + (f" or the {ticket.num_rows} of trim()" if ticket.num_rows != capacity else "")
                + ": one per row of recv.tokens"
            ),
        )
    if rows.data_ptr() == arena.address("expert_out", workspace) and rows.stride() == arena.row_strides:
        return True
    _check_outside(arena, "expert_out", rows, [arena.plan.region("expert_out", workspace)])
    return False


def check_row_weights(arena: Generation, topk_weights: object, num_rows: int, in_window: bool) -> torch.Tensor | None:
    """Check combine's topk_weights [C] float32 (or the rows of trim()), or None."""
    if topk_weights is None:
        return None
    weights = _tensor("topk_weights", topk_weights)
    if in_window:
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError(
                "topk_weights together with the window's own lease.expert_out: nothing is staged there, so nothing "
                "would be multiplied; multiply in the kernel that writes lease.expert_out"
            ),
        )
    if weights.shape != (num_rows,):
        refuse(
            _C.Refusal.SHAPE,
            ConfigError(
                f"combine takes topk_weights [{num_rows}], one per row of expert_out (recv.topk_weights), "
                f"found {list(weights.shape)}"
            ),
        )
    _check_kind("topk_weights", weights, (torch.float32,))
    _check_memory("topk_weights", weights)
    if not weights.is_contiguous():
        refuse(_C.Refusal.STRIDES, ConfigError("topk_weights of combine must be contiguous; call .contiguous()"))
    return weights


def check_raw_grad(arena: Generation, raw_grad: bool, topk_weights: object) -> None:
    """Raw gradients exist for an encoded payload only, and nobody could multiply them; raw bytes are always raw."""
    payload = arena.grad_payload.format
    if not raw_grad:
        if payload == "raw" and torch.is_grad_enabled() and not arena.plan.config.inference_only:
            refuse(
                _C.Refusal.ARGUMENT,
                ConfigError(
                    'combine_grad_payload="raw" sends bytes that only their maker can read; pass raw_grad=True and '
                    "epbuf.unpack the gradient"
                ),
            )
        return
    if payload == "same":
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError(f'raw_grad=True needs a quantised combine_grad_payload, found "{payload}"; leave it out'),
        )
    if topk_weights is not None:
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError(
                f'raw_grad=True with topk_weights: the "{payload}" gradient would have to be multiplied; multiply by '
                "the weights in the experts, and their gradients there"
            ),
        )


def check_out(arena: Generation, out: object, num_tokens: int, expert_out: torch.Tensor) -> torch.Tensor:
    """Check a caller's y [T, H]: outside the window and expert_out, each row its own."""
    rows = _rows(arena, "out", out)
    if rows.shape[0] != num_tokens:
        refuse(_C.Refusal.SHAPE, ConfigError(f"out has {rows.shape[0]} rows and x of the dispatch had {num_tokens}"))
    if arena.covers(rows.data_ptr()) and rows.numel() > 0:
        refuse(_C.Refusal.OVERLAP, ConfigError("out lies in the arena's window; pass an ordinary tensor, or out=None"))
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        refuse(
            _C.Refusal.OVERLAP,
            ConfigError(
                f"rows of out share memory (strides {tuple(rows.stride())}); pass a tensor that is not expanded"
            ),
        )
    if _overlaps(rows, expert_out.data_ptr(), _span(expert_out)):
        refuse(_C.Refusal.OVERLAP, ConfigError("out overlaps expert_out, which combine never changes; pass another"))
    return rows


def check_out_grad(out: torch.Tensor) -> None:
    """Check before autograd does, which would raise only after the round: no leaf that needs a gradient."""
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        refuse(_C.Refusal.ARGUMENT, ConfigError("out is a leaf that requires grad and would be overwritten; detach it"))


def check_gradient(arena: Generation, name: str, grad: object, num_rows: int) -> torch.Tensor:
    """Check a gradient of rows [num_rows, H] of the token dtype."""
    rows = _rows(arena, name, grad)
    if rows.shape[0] != num_rows:
        refuse(_C.Refusal.SHAPE, ConfigError(f"{name} has {rows.shape[0]} rows, expected {num_rows}"))
    return rows


def _rows(
    arena: Generation, name: str, value: object, width: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:  # fmt: skip
    """Check rows [n, H] of the token dtype, or of a payload: dense, base and stride multiples of 16 bytes."""
    rows = _tensor(name, value)
    _check_memory(name, rows)
    gapless = rows.stride() == arena.row_strides and rows.dtype == arena.token_dtype
    if gapless and width is None and rows.shape[1] == arena.hidden and rows.data_ptr() % ROW_ALIGNMENT == 0:
        return rows  # nearly every call: nothing below can object, as a row is a multiple of 16 bytes
    columns = f"hidden={arena.hidden}" if width is None else str(width)
    if rows.ndim != 2 or rows.shape[1] != (width or arena.hidden):
        refuse(_C.Refusal.SHAPE, ConfigError(f"{name} must be [rows, {columns}], found {list(rows.shape)}"))
    _check_kind(name, rows, (dtype or arena.token_dtype,))
    if rows.shape[0] == 0:
        return rows
    stride_bytes = rows.stride(0) * rows.element_size() if rows.shape[0] > 1 else 0  # one row has no next
    if rows.stride(1) != 1 or stride_bytes < 0 or stride_bytes % ROW_ALIGNMENT:
        refuse(
            _C.Refusal.STRIDES,
            ConfigError(
                f"{name} has strides {tuple(rows.stride())} in elements; rows must be dense and their stride a "
                f"multiple of {ROW_ALIGNMENT} bytes, found {stride_bytes} bytes; call {name}.contiguous()"
            ),
        )
    if rows.data_ptr() % ROW_ALIGNMENT:
        refuse(
            _C.Refusal.ALIGNMENT,
            ConfigError(
                f"{name} begins at address {rows.data_ptr():#x}, which is not a multiple of {ROW_ALIGNMENT} bytes; "
                f"clone it or slice it at a multiple of {ROW_ALIGNMENT // rows.element_size()} elements"
            ),
        )
    return rows


def _per_topk(
    arena: Generation, name: str, value: object, num_tokens: int, dtypes: tuple[torch.dtype, ...]
) -> torch.Tensor:
    tensor = _tensor(name, value)
    num_topk = arena.num_topk
    if tensor.shape != (num_tokens, num_topk):
        refuse(
            _C.Refusal.SHAPE,
            ConfigError(
                f"{name} must have shape [T={num_tokens} as x, num_topk={num_topk} as planned], "
                f"found {list(tensor.shape)}"
            ),
        )
    _check_memory(name, tensor)
    _check_kind(name, tensor, dtypes)
    if not tensor.is_contiguous() and tensor.shape[0] and tensor.stride(1) != 1 and num_topk > 1:
        refuse(
            _C.Refusal.STRIDES,
            ConfigError(f"{name} has strides {tuple(tensor.stride())}; rows must be dense: call {name}.contiguous()"),
        )
    return tensor


def _tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        refuse(_C.Refusal.ARGUMENT, ConfigError(f"{name} must be a torch.Tensor, found {type(value).__name__}"))
    if type(value) not in _PLAIN and (is_traceable_wrapper_subclass(value) or isinstance(value, FakeTensor)):
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError(
                f"{name} is a {type(value).__name__}, which has no memory of its own that a kernel could address; pass "
                "the plain tensor inside, for example .to_local()"
            ),
        )
    if value.layout != torch.strided:
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError(f"{name} has layout {value.layout}, expected strided memory; pass {name}.to_dense()"),
        )
    return value


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse what has elements and no bytes that hold them: resized storage, torch.func levels, lazy negation."""
    if tensor.numel() and (tensor.is_neg() or tensor.data_ptr() == 0):
        refuse(
            _C.Refusal.ARGUMENT,
            ConfigError(f"{name} has no memory that holds its values (freed storage, or a lazy view); pass a clone"),
        )


def _check_kind(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(_word(dtype) for dtype in dtypes)
        refuse(_C.Refusal.DTYPE, ConfigError(f"{name} has dtype {_word(tensor.dtype)}, expected {expected}"))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_outside(arena: Generation, name: str, tensor: torch.Tensor, regions: Sequence[Region]) -> None:
    """Refuse a tensor that shares bytes with one of the regions."""
    for region in regions:
        if _overlaps(tensor, arena.address_of(region), region.nbytes):
            refuse(
                _C.Refusal.OVERLAP,
                ConfigError(f"{name} overlaps region {region.name}[{region.index}], which this call writes; clone it"),
            )


def _overlaps(tensor: torch.Tensor, start: int, nbytes: int) -> bool:
    return tensor.data_ptr() < start + nbytes and start < tensor.data_ptr() + _span(tensor)


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
