"""Types of the native module: csrc/bindings.cpp over the structs of csrc/layout.h.

Addresses and streams cross as integers, enums as their numbers. Fields mean what layout.h says.
"""

from __future__ import annotations

import enum
from typing import Any, overload

CUDA_BUILT: bool
ANY_WORKSPACE: int
COUNT_HEADER_CELLS: int

class Op(enum.IntEnum):
    NONE = 0
    ROUTE = 1
    DISPATCH = 2
    COMBINE = 3
    COMBINE_BACKWARD = 4
    DISPATCH_BACKWARD = 5

class Phase(enum.IntEnum):
    NONE = 0
    COUNT = 1
    ARRIVED = 2
    READY = 3
    ACK = 4
    GO = 5
    GRAD_ARRIVED = 6
    GRAD_READY = 7
    GRAD_ACK = 8

class Status(enum.IntEnum):
    OK = 0
    REFUSED = 1
    TIMEOUT = 2
    MISMATCH = 3
    ABORTED = 4
    POISONED = 5

class Refusal(enum.IntEnum):
    NONE = 0
    ARGUMENT = 1
    DTYPE = 2
    SHAPE = 3
    DEVICE = 4
    STRIDES = 5
    ALIGNMENT = 6
    TOO_MANY_TOKENS = 7
    OVERLAP = 8
    CALL_ORDER = 9
    LEASE = 10
    WORKSPACE = 11
    COPIED_REGION = 12
    INTERNAL = 13
    REPEATED_EXPERT = 14

class CountColumn(enum.IntEnum):
    NUM_BAD_IDS = 1
    REFUSAL = 2
    BAD_TOKEN = 3
    BAD_TOPK = 4
    BAD_VALUE = 5

class Source(enum.IntEnum):
    TENSOR = 0
    WINDOW = 1
    ZERO = 2

class StashMove(enum.IntEnum):
    NOTHING = 0
    STASH = 1
    RESTORE = 2

class TokenDtype(enum.IntEnum):
    BF16 = 0
    FP16 = 1
    FP32 = 2

class Format(enum.IntEnum):
    SAME = 0
    MXFP8 = 1
    FP8_BLOCK128 = 2
    NVFP4 = 3
    RAW = 4

class ErrorRecord:
    status: int
    op: int
    phase: int
    peer: int
    call: int
    frame: int
    workspace: int
    expected_epoch: int
    seen_epoch: int
    peer_call: int
    peer_progress: int
    def __init__(self) -> None: ...

class Control:
    poisoned: int
    call: int
    error: ErrorRecord
    num_refusals: int
    refusing_rank: int
    refusal: int
    refused_op: int
    num_overflows: int
    num_early_reuses: int
    num_bad_ids: int
    bad_value: int
    bad_rank: int
    bad_token: int
    bad_topk: int
    staged_bytes: int
    max_demand_rows: int
    max_demand_rank: int
    stash_rank: int
    num_stash_overflows: int
    def __init__(self) -> None: ...
    @staticmethod
    def at(address: int) -> Control:
        """Copy the struct that lies at an address of this process's own memory."""

class FrameCounters:
    round: int
    open: int
    demand_peak_rows: int
    def __init__(self) -> None: ...

class ForwardCounters:
    use: int
    def __init__(self) -> None: ...

class BackwardCounters:
    use: int
    last_ready: int
    def __init__(self) -> None: ...

class ArenaOffsets:
    """Byte offsets; -1 (the start value): the plan has no such region."""

    control: int
    abort_cells: int
    progress_cells: int
    frame_counters: int
    forward_counters: int
    backward_counters: int
    stash_counters: int
    stash_free: int
    stash_pages: int
    def __init__(self) -> None: ...

class FrameOffsets:
    """Byte offsets; -1 (the start value): the plan has no such region."""

    count_cells: int
    arrived_cells: int
    slot_map: int
    offs: int
    counts: int
    overflow: int
    recv_topk_weights: int
    recv_tokens: int
    recv_scales: int
    recv_row_scales: int
    stash_table: int
    def __init__(self) -> None: ...

class ForwardOffsets:
    """Byte offsets; -1 (the start value): the plan has no such region."""

    ready_cells: int
    ack_cells: int
    route_base: int
    route_scratch: int
    expert_out: int
    recv_tokens: int
    recv_scales: int
    recv_row_scales: int
    recv_scales_wire: int
    wire_rows: int
    def __init__(self) -> None: ...

class BackwardOffsets:
    """Byte offsets; -1 (the start value): the plan has no such region."""

    go_cells: int
    grad_arrived_cells: int
    grad_ready_cells: int
    grad_ack_cells: int
    grad_expert_out: int
    grad_expert_out_scales: int
    grad_expert_out_row_scales: int
    grad_expert_out_scales_wire: int
    grad_recv_tokens: int
    grad_recv_topk_weights: int
    grad_wire_rows: int
    def __init__(self) -> None: ...

class RowFormat:
    format: int
    is_blocked: int
    row_bytes: int
    scale_row_bytes: int
    wire_row_bytes: int
    scale_bytes: int
    def __init__(self) -> None: ...

class StashFormat:
    num_pages: int
    page_rows: int
    page_bytes: int
    scales_offset: int
    row_scales_offset: int
    def __init__(self) -> None: ...

class WireFormat:
    row_bytes: int
    scales_offset: int
    def __init__(self) -> None: ...

class Geometry:
    rank: int
    num_ranks: int
    num_experts: int
    num_local_experts: int
    num_topk: int
    hidden: int
    expert_alignment: int
    max_tokens_per_rank: int
    token_dtype: int
    max_num_sms: int
    capacity_rows: int
    token_row_bytes: int
    route_chunk_tokens: int
    timeout_us: int
    recv: RowFormat
    grad: RowFormat
    stash: StashFormat
    wire: WireFormat
    grad_wire: WireFormat
    dedups: int
    adds_by_rank: int
    def __init__(self) -> None: ...

class RouteCall:
    frame: int
    workspace: int
    refusal: int
    check_progress: int
    stream: int
    topk_idx: int
    topk_idx_row_stride: int
    topk_idx_bytes: int
    num_tokens: int
    live_tokens: int
    live_tokens_bytes: int
    repeats: int
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(
        self,
        frame: int,
        workspace: int,
        refusal: int,
        check_progress: int,
        stream: int,
        topk_idx: int,
        topk_idx_row_stride: int,
        topk_idx_bytes: int,
        num_tokens: int,
        /,
    ) -> None: ...

class SummariseCall:
    frame: int
    num_tokens: int
    stream: int
    count_rows: int
    sent_ids: int
    mirror: int
    def __init__(self) -> None: ...

class DispatchCall:
    frame: int
    workspace: int
    refusal: int
    check_progress: int
    stream: int
    rows: int
    row_stride_bytes: int
    scales: int
    row_scales: int
    scales_row_stride_bytes: int
    topk_weights: int
    topk_weights_row_stride: int
    num_tokens: int
    expects_open: int
    repeats: int
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(
        self,
        frame: int,
        workspace: int,
        refusal: int,
        check_progress: int,
        stream: int,
        rows: int,
        row_stride_bytes: int,
        num_tokens: int,
        /,
    ) -> None: ...

class CombineCall:
    frame: int
    workspace: int
    refusal: int
    check_progress: int
    stream: int
    rows: int
    row_stride_bytes: int
    rows_source: int
    weights_source: int
    weights: int
    out: int
    out_row_stride_bytes: int
    out_weights: int
    num_tokens: int
    begins_use: int
    clears_open: int
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(
        self,
        frame: int,
        workspace: int,
        refusal: int,
        check_progress: int,
        stream: int,
        rows_source: int,
        weights_source: int,
        num_tokens: int,
        /,
    ) -> None: ...

class WeightGradCall:
    frame: int
    workspace: int
    stream: int
    expert_out: int
    expert_out_row_stride_bytes: int
    weights: int
    grad_weights: int
    grad_rows: int
    def __init__(self) -> None: ...

class DecodeCall:
    frame: int
    workspace: int
    stream: int
    data: int
    scales: int
    row_scales: int
    row_stride_bytes: int
    scales_row_stride_bytes: int
    out: int
    num_rows: int
    is_grad: int
    def __init__(self) -> None: ...

class StashCall:
    frame: int
    workspace: int
    stream: int
    move: int
    returns_pages: int
    def __init__(self) -> None: ...

class Outcome:
    status: int
    refusing_rank: int
    refusal: int
    overflow: int
    max_demand_rows: int
    max_demand_rank: int
    bad_rank: int
    num_bad_ids: int
    bad_value: int
    bad_token: int
    bad_topk: int
    stash_rank: int
    def __init__(self) -> None: ...

class _Engine:
    """The five ops of one rank's arena; every method releases the GIL."""

    def route(self, call: RouteCall, /) -> Outcome: ...
    def dispatch(self, call: DispatchCall, /) -> Outcome: ...
    def combine(self, call: CombineCall, /) -> Outcome: ...
    def combine_backward(self, call: DispatchCall, /) -> Outcome: ...
    def dispatch_backward(self, call: CombineCall, /) -> Outcome: ...
    def weight_grad(self, call: WeightGradCall, /) -> Outcome: ...
    def decode(self, call: DecodeCall, /) -> Outcome: ...
    def stash(self, call: StashCall, /) -> Outcome: ...
    def control(self) -> Control: ...
    def abort(self, reason: int) -> None: ...
    def progress(self) -> list[tuple[int, int, int, int]]:
        """Return (call, op, frame, workspace) of every rank, as last seen here."""

class HostEngine(_Engine):
    """Over windows in shared memory; a call returns when its round is complete."""

    def __init__(
        self,
        geometry: Geometry,
        arena_offsets: ArenaOffsets,
        frames: list[FrameOffsets],
        forwards: list[ForwardOffsets],
        backwards: list[BackwardOffsets],
        peers: list[int],
    ) -> None: ...

class HostSegment:
    """Memory of one window; exports its bytes as a writable buffer, which keeps it mapped."""

    @staticmethod
    def create(prefix: str, nbytes: int) -> HostSegment: ...
    @staticmethod
    def map(name: str, nbytes: int) -> HostSegment: ...
    @staticmethod
    def anonymous(nbytes: int) -> HostSegment: ...
    @staticmethod
    def sweep(prefix: str) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def unlink(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def sizeof(name: str) -> int: ...
def control_word(name: str) -> tuple[int, int]: ...
def handle_put(obj: Any) -> int: ...
def handle_get(handle: int) -> Any: ...
def handle_drop(handle: int) -> None: ...
def handle_objects() -> list[Any]: ...

# ---- only in a module built with CUDA (`CUDA_BUILT`) -----------------------------------------------------------------

class CudaEngine(_Engine):
    """Over device windows; a call enqueues on its stream and returns."""

    def __init__(
        self,
        geometry: Geometry,
        arena_offsets: ArenaOffsets,
        frames: list[FrameOffsets],
        forwards: list[ForwardOffsets],
        backwards: list[BackwardOffsets],
        peers: list[int],
        device: int,
    ) -> None: ...
    @staticmethod
    def phases(op: int) -> int: ...
    def count_ids(self, call: RouteCall, sent_ids: int, count_row: int) -> Outcome: ...
    def summarise(self, call: SummariseCall) -> Outcome: ...
    def run_phase(self, op: int, phase: int, call: RouteCall | DispatchCall | CombineCall) -> Outcome: ...
    def status(self) -> Control:
        """Return the control words as last mirrored to the host, without synchronising."""

    def warm_up(self) -> None: ...
    def close(self) -> None: ...

class GraphHold:
    """A hold on the graph that a stream is capturing into; `alive` until that graph and its executables are gone."""

    def __init__(self, stream: int) -> None: ...
    @property
    def alive(self) -> bool: ...

class NcclWindow:
    """Memory of NCCL that every rank of a communicator of its own can address."""

    def __init__(self, library: str, unique_id: bytes, rank: int, num_ranks: int, nbytes: int) -> None: ...
    @staticmethod
    def unique_id(library: str) -> bytes: ...
    @property
    def peers(self) -> list[int]: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def handle(self) -> int: ...
    @property
    def communicator(self) -> int: ...
    def deregister(self) -> None: ...

def capture_id(stream: int) -> int: ...
def nccl_version(path: str) -> int: ...
def nccl_in_process() -> str: ...
