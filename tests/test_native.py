"""The native module by itself: handles, segments, row arithmetic, failures. What the ops do is tested through them."""

from __future__ import annotations

import ast
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from epbuf import _C, EpConfig, Plan
from epbuf.engine import NativeEngine, Place, Rows
from epbuf.errors import NativeError
from epbuf.windows.group import SoloGroup
from epbuf.windows.local import LocalWindow

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CPU = torch.device("cpu")
PREFIX = "epbuf-native-test-"


def stub_names() -> dict[str, set[str]]:
    """Return the names of `_C.pyi`: for each class its members, inherited ones included, for all else nothing."""
    names: dict[str, set[str]] = {}
    for node in ast.parse(Path(__file__).parents[1].joinpath("epbuf", "_C.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            names[node.name] = set(map(declared, node.body)).union(*(names[base] for base in bases))
        else:
            names[declared(node)] = set()
    return {name: set(filter(public, members)) for name, members in names.items()}


def declared(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.AnnAssign | ast.Assign):
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def public(name: str) -> bool:
    return bool(name) and not name.startswith("_")


def test_stub_declares_what_the_module_has() -> None:
    """Every public name of the module is in the stub, with the same fields and methods."""
    stub = stub_names()
    assert {name for name in dir(_C) if public(name)} <= set(stub)
    for name in filter(public, dir(_C)):
        found = getattr(_C, name)
        if isinstance(found, type):
            inherited = set(dir(int)) if issubclass(found, int) else set()
            assert {member for member in set(dir(found)) - inherited if public(member)} == stub[name], name


def test_structs_start_empty() -> None:
    """Offsets start as -1, which means that the plan has no such region; everything else starts as 0."""
    for name in ("ArenaOffsets", "FrameOffsets", "ForwardOffsets", "BackwardOffsets"):
        assert set(fields(getattr(_C, name)()).values()) == {-1}, name
    names = "Geometry RowFormat RouteCall DispatchCall CombineCall WeightGradCall DecodeCall StashCall StashFormat"
    for name in [*names.split(), "WireFormat", "Outcome", "ErrorRecord"]:
        structs = ("recv", "grad", "stash", "wire", "grad_wire")
        values = {value for field, value in fields(getattr(_C, name)()).items() if field not in structs}
        assert values == {0}, name


def fields(struct: Any) -> dict[str, int]:
    return {name: getattr(struct, name) for name in dir(struct) if public(name)}


def test_sizeof_knows_only_what_lives_in_windows() -> None:
    with pytest.raises(KeyError, match="Geometry"):
        _C.sizeof("Geometry")


@pytest.fixture
def handle() -> Iterator[int]:
    handle = _C.handle_put("first")
    yield handle
    with contextlib.suppress(KeyError):
        _C.handle_drop(handle)


def test_handle_names_its_object(handle: int) -> None:
    assert handle > 0
    assert _C.handle_get(handle) == "first"
    assert "first" in _C.handle_objects()


def test_dropped_handle_is_stale(handle: int) -> None:
    """A handle that was dropped raises, though another object has taken its place in the table."""
    _C.handle_drop(handle)
    successor = _C.handle_put("second")
    assert successor & 0xFFFF == handle & 0xFFFF, "the test needs the same place"
    with pytest.raises(KeyError, match=str(handle)):
        _C.handle_get(handle)
    with pytest.raises(KeyError, match="stale"):
        _C.handle_drop(handle)
    assert _C.handle_get(successor) == "second"
    _C.handle_drop(successor)


@pytest.mark.parametrize("never_given", [0, -1, 0xFFFF, 1 << 40])
def test_handle_that_was_never_given(never_given: int) -> None:
    with pytest.raises(KeyError, match=str(never_given)):
        _C.handle_get(never_given)


def test_generation_never_becomes_zero(handle: int) -> None:
    """After 65535 objects in one place the generations start again at 1: no handle is ever 0."""
    _C.handle_drop(handle)
    for _ in range(0x10000):
        handle = _C.handle_put(None)
        assert handle >> 16
        _C.handle_drop(handle)


def test_object_may_come_back_while_it_is_dropped() -> None:
    """The table is usable from the destructor of an object that leaves it."""

    class Restless:
        def __del__(self) -> None:
            successors.append(_C.handle_put("successor"))

    successors: list[int] = []
    _C.handle_drop(_C.handle_put(Restless()))
    assert _C.handle_get(successors[0]) == "successor"
    _C.handle_drop(successors[0])


def test_segment_buffer_is_writable_and_keeps_the_memory() -> None:
    """A view of the bytes outlives the last name of the segment."""
    segment = _C.HostSegment.anonymous(8192)
    assert (segment.name, segment.nbytes, segment.address % 4096) == ("", 8192, 0)
    view = memoryview(segment)
    assert (view.readonly, view.nbytes, view.format) == (False, 8192, "B")
    assert not any(view)
    del segment
    view[8191] = 7
    assert view[8191] == 7


def test_unlink_twice() -> None:
    segment = _C.HostSegment.create(PREFIX, 4096)
    segment.unlink()
    segment.unlink()
    assert segment.name == ""


def test_segment_that_dies_named_takes_its_name_along() -> None:
    segment = _C.HostSegment.create(PREFIX, 4096)
    path = Path("/dev/shm") / segment.name
    assert path.exists()
    del segment
    assert not path.exists()


def test_forked_child_leaves_the_name() -> None:
    """A child that was forked has a copy of the object, whose death must not remove the parent's segment."""
    code = """
import os, sys
from epbuf import _C
segment = _C.HostSegment.create(sys.argv[1], 4096)
name = segment.name
if (child := os.fork()) == 0:
    del segment
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.path.exists("/dev/shm/" + name)
"""
    subprocess.run([sys.executable, "-c", code, PREFIX], check=True, timeout=60)


def test_sweep_counts_what_it_removes() -> None:
    """A killed process leaves its segment; the sweep removes that one and says so."""
    code = f"""
import os, signal, sys
from epbuf import _C
segment = _C.HostSegment.create({PREFIX!r}, 4096)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    living = _C.HostSegment.create(PREFIX, 4096)
    assert _C.HostSegment.sweep(PREFIX) == 1
    assert _C.HostSegment.sweep(PREFIX) == 0
    living.unlink()


def test_makers_and_sweepers_do_not_disturb_each_other() -> None:
    """Segments that are made while others sweep exist when `create` returns."""
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            _C.HostSegment.sweep(PREFIX)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(200):
            segment = _C.HostSegment.create(PREFIX, 4096)
            assert (Path("/dev/shm") / segment.name).exists()
            segment.unlink()
    finally:
        stop.set()
        sweeper.join()


@pytest.mark.parametrize("make", [_C.HostSegment.anonymous, lambda n: _C.HostSegment.create(PREFIX, n)])
def test_segment_of_nothing(make: Callable[[int], object]) -> None:
    with pytest.raises(NativeError, match="0 bytes"):
        make(0)


@pytest.mark.parametrize("prefix", ["", "a/b", "x" * 300], ids=["empty", "slash", "long"])
def test_segment_prefix_is_a_file_name(prefix: str) -> None:
    with pytest.raises(NativeError, match="file name"):
        _C.HostSegment.create(prefix, 4096)
    with pytest.raises(NativeError, match="file name"):
        _C.HostSegment.sweep(prefix)


class OneRank:
    """An engine of one rank and one expert: row t of everything belongs to token t, K = 1."""

    def __init__(self, dtype: str, hidden: int, num_tokens: int) -> None:
        self.config = EpConfig(
            num_ranks=1, num_experts=1, num_topk=1, hidden=hidden, max_tokens_per_rank=num_tokens,
            token_dtype=cast("Any", dtype),
        )  # fmt: skip
        self.plan = Plan.build(self.config)
        self.window = LocalWindow(self.plan.total_bytes, SoloGroup(), CPU)
        self.engine = NativeEngine(self.plan, 0, self.window, CPU)
        self.place = Place(0, 0)
        ids = torch.zeros(num_tokens, 1, dtype=torch.int64)
        assert self.engine.route(self.place, ids, None).status == _C.Status.OK

    def region(self, name: str) -> Tensor:
        region = self.plan.region(name)
        raw = self.window.bytes_at(region.offset, region.nbytes)
        return raw.view(getattr(torch, region.dtype)).view(region.shape)

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        out = torch.full_like(rows, float("nan"))
        assert self.engine.combine(self.place, Rows(rows), weights, out).status == _C.Status.OK
        return out


def all_patterns(dtype: str) -> Tensor:
    """Return every value of a 16-bit dtype, as rows of 64."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype]).view(-1, 64)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Compare bits; any NaN equals any other."""
    assert torch.equal(found.isnan(), expected.isnan())
    clean = [t.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")) for t in (found, expected)]
    assert torch.equal(*(t.view(torch.int16 if t.element_size() == 2 else torch.int32) for t in clean))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_value_survives_the_way_through_float(dtype: str) -> None:
    """One row summed is the row: all 65536 patterns, subnormals, infinities and NaN included."""
    values = all_patterns(dtype)
    assert_same(OneRank(dtype, 64, len(values)).combine(values), values)


@pytest.mark.parametrize(
    ("dtype", "flush"), [("bf16", False), ("fp16", False), ("fp16", True)], ids=["bf16", "fp16", "fp16-flush-to-zero"]
)
def test_products_round_to_nearest_even(dtype: str, flush: bool) -> None:
    """Every value times a factor: one multiplication in float, one rounding, as torch does it.

    The factors make ties, overflow and subnormal halves; fp16 results do not depend on the thread's flush-to-zero mode.
    """
    values = all_patterns(dtype)
    rank = OneRank(dtype, 64, len(values))
    for factor in (1 + 2**-8, 1 + 2**-11, 2**-3, 0.75 * 2**-9, 3.0, -1.0, 0.0, 65504.0, float("inf")):
        weights = torch.full((rank.plan.capacity_rows,), factor)
        expected = (values.float() * weights[: len(values), None]).to(DTYPES[dtype])
        with flushed(flush):
            found = rank.combine(values, weights)
        assert_same(found, expected)


@contextlib.contextmanager
def flushed(flush: bool) -> Iterator[None]:
    torch.set_flush_denormal(flush)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_rounding_of_random_floats(dtype: str) -> None:
    """Random factors of all magnitudes on a row of ones: the conversion by itself."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randint(-(1 << 31), 1 << 31, (20000,), generator=generator).to(torch.int32).view(torch.float32)
    ones = torch.ones(len(weights), 8, dtype=DTYPES[dtype])
    expected = weights.to(DTYPES[dtype])[:, None].expand(-1, 8).contiguous()
    assert_same(OneRank(dtype, 8, len(weights)).combine(ones, weights), expected)


@pytest.mark.parametrize("hidden", [8, 16, 24, 1000, 1024, 1032, 7168])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_weight_gradients_add_in_the_documented_order(dtype: str, hidden: int) -> None:
    """Element h goes to lane h % 16 in order of h, then the lanes are added in order; bit for bit."""
    rank = OneRank(dtype, hidden, 5)
    generator = torch.Generator().manual_seed(hidden)
    out, grad = (torch.randn(5, hidden, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    weights, found = torch.randn(rank.plan.capacity_rows, generator=generator), torch.full((5,), float("nan"))
    assert rank.engine.combine_backward(rank.place, grad, False).status == _C.Status.OK
    rank.engine.weight_grad(rank.place, out, weights, found)
    assert torch.equal(found, lane_dot(out.float() * grad.float()))
    expected = (grad.float() * weights[:5, None]).to(DTYPES[dtype])
    assert torch.equal(rank.region("grad_expert_out")[:5], expected)


def lane_dot(products: Tensor) -> Tensor:
    """Add the columns of [rows, H] in the engine's order."""
    lanes, total = torch.zeros(len(products), 16), torch.zeros(len(products))
    for begin in range(0, products.shape[1], 16):
        chunk = products[:, begin : begin + 16]
        lanes[:, : chunk.shape[1]] += chunk
    for lane in lanes.unbind(1):
        total = total + lane
    return total


def two_rank_engines(timeout_s: float) -> tuple[list[NativeEngine], list[_C.HostSegment]]:
    config = EpConfig(num_ranks=2, num_experts=2, num_topk=1, hidden=8, max_tokens_per_rank=4, timeout_s=timeout_s)
    plan = Plan.build(config)
    segments = [_C.HostSegment.anonymous(plan.total_bytes) for _ in range(2)]

    window = SimpleNamespace(peers=[segment.address for segment in segments])
    return [NativeEngine(plan, rank, cast("Any", window), CPU) for rank in range(2)], segments


def test_timeout_names_peer_and_phase() -> None:
    """The record says who was awaited, in which phase, with which epochs and what that rank did last."""
    (engine, other), _segments = two_rank_engines(0.2)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    begun = time.monotonic()
    assert engine.route(Place(0, 0), ids, None).status == _C.Status.TIMEOUT
    assert 0.2 <= time.monotonic() - begun < 2.0
    error = engine.control().error
    assert (error.peer, error.phase, error.op) == (1, _C.Phase.COUNT, _C.Op.ROUTE)
    assert (error.expected_epoch, error.seen_epoch, error.peer_call) == (1, 0, 0)
    assert engine.route(Place(0, 0), ids, None).status == _C.Status.POISONED
    assert other.route(Place(0, 0), ids, None).status == _C.Status.ABORTED
    assert (other.control().error.peer, other.control().error.phase) == (0, _C.Phase.NONE)


def test_abort_ends_the_wait_of_a_peer() -> None:
    """A rank that waits is told at once, though it could wait a minute; the waiting thread does not hold the GIL."""
    (engine, other), _segments = two_rank_engines(60)
    outcomes: list[Any] = []
    ids = torch.zeros(4, 1, dtype=torch.int64)
    waiter = threading.Thread(target=lambda: outcomes.append(engine.route(Place(0, 0), ids, None)))
    waiter.start()
    time.sleep(0.05)
    assert engine.progress()[0] == (1, _C.Op.ROUTE, 0, 0)
    other.abort()
    waiter.join(5)
    assert outcomes[0].status == _C.Status.ABORTED
    assert engine.control().error.peer == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_ranks", 2, "windows given: 1"),
        ("rank", 1, "rank is 1"),
        ("num_topk", 65, "at most 64"),
        ("token_row_bytes", 24, "multiple of 16"),
    ],
)
def test_engine_refuses_a_geometry_that_makes_no_sense(field: str, value: int, message: str) -> None:
    segment, offsets, geometry = _C.HostSegment.anonymous(4096), _C.ArenaOffsets(), _C.Geometry()
    offsets.control = 0
    for name in ("num_ranks", "num_experts", "num_local_experts", "num_topk", "expert_alignment"):
        setattr(geometry, name, 1)
    geometry.hidden, geometry.token_row_bytes, geometry.token_dtype = 8, 32, _C.TokenDtype.FP32
    _C.HostEngine(geometry, offsets, [], [], [], [segment.address])
    setattr(geometry, field, value)
    with pytest.raises(NativeError, match=message):
        _C.HostEngine(geometry, offsets, [], [], [], [segment.address])


def test_call_out_of_range_changes_nothing() -> None:
    """A frame, workspace or size that the arena does not have raises before the call counts."""
    rank = OneRank("fp32", 8, 4)
    calls = rank.engine.control().call
    with pytest.raises(NativeError, match="frame 7"):
        rank.engine.route(Place(7, 0), torch.zeros(4, 1, dtype=torch.int64), None)
    with pytest.raises(NativeError, match="workspace 5"):
        rank.engine.combine(Place(0, 5), Rows(None), None, torch.zeros(4, 8))
    with pytest.raises(NativeError, match="0 to 4"):
        rank.engine.route(Place(0, 0), torch.zeros(5, 1, dtype=torch.int64), None)
    assert rank.engine.control().call == calls
