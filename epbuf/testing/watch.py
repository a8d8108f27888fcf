"""What one run of a step does: the ops it issues, the host reads it makes, the tensors it leaves behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from epbuf.arena import Arena
from epbuf.lease import caller

_ATEN = torch.ops.aten
_READS_IF_MASKED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default}  # nonzero() of the mask
_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READING_CALLS = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "__array__",
    torch.Tensor.cpu: "cpu",  # .to("cpu") may be what .to(device) is on this machine
}


class Run:
    """What a run did.

    Attributes:
        calls: every op in order: name and shapes of its tensors; which bytes of which arena's window they are.
        reads: (op, place in the user's code) of every device value that was read on the host.
        left: descriptions of tensors that the run made, that live after it, and that it does not return.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.reads: list[tuple[str, str]] = []
        self.left: list[str] = []


class Watch:
    """Runs a step and keeps a `Run` of each call. `kept` returns tensors that a run may leave behind.

    Attributes:
        runs: of all calls, the last one last.
        segments: of the CUDA allocator, after the last call that was not captured.
    """

    def __init__(
        self, fn: Callable[..., Any], arenas: Sequence[Arena], device: torch.device, kept: Callable[[], list[Any]]
    ) -> None:
        self._fn = fn
        self._arenas = arenas
        self._device = device
        self._kept = kept
        self.runs: list[Run] = []
        self.segments: list[dict[str, Any]] = []

    def __call__(self, *inputs: Any) -> Any:
        """Run the step; return what it returns, detached."""
        run = Run()
        self.runs.append(run)
        modes = _Ops(run, self._arenas, self._device), _Reads(run, self._device)
        with modes[0], modes[1]:
            outputs = self._fn(*inputs)
        outputs = tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, outputs)
        if not _is_capturing(self._device):
            gc.collect()
            run.left = modes[0].left_but([outputs, inputs, self._kept()])
            self.segments = segments(self._device)
        return outputs

    def first_difference(self) -> tuple[bool, str]:
        """Compare the last two runs: whether the first op that differs does so in places only, and how; "": in none."""
        before, now = (run.calls for run in self.runs[-2:])
        for number, ((old, old_places), (new, new_places)) in enumerate(zip(before, now, strict=False)):
            if old != new:
                return False, f"op {number} was {old} and is {new}"
            if old_places != new_places:
                return True, f"op {number}, {new}, had {old_places} and has {new_places}"
        return False, "" if len(before) == len(now) else f"one issued {len(before)} ops, the next {len(now)}"


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every op that reaches the dispatcher, also those of backward."""

    def __init__(self, run: Run, arenas: Sequence[Arena], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._arenas = arenas
        self._device = device
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}
        self._seen: set[int] = {0}  # storages that were there before, and those of sparse tensors

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shapes = ", ".join(str(list(tensor.shape)) for tensor in given)
        self._run.calls.append((f"{func}({shapes})", ", ".join(self._window_places(given))))
        if _reads(func, given) and any(tensor.device.type == self._device.type for tensor in given):
            self._run.reads.append((str(func), caller()))
        found = func(*args, **(kwargs or {}))
        if func.namespace != "epbuf":  # what its ops return is claims, which a capture checks itself
            self._note_made(func, given, found)
        return found

    def left_but(self, allowed: Any) -> list[str]:
        """Return descriptions of storages that were made, still live, and belong to no tensor of `allowed`."""
        returned = {_storage(t) for t in tree_leaves(allowed) if isinstance(t, torch.Tensor)}
        made = [(ref, what) for key, (ref, what) in self._made.items() if key not in returned]
        return [what for ref, what in made if not ref.expired()]  # type: ignore[no-untyped-call]

    def _note_made(self, func: Any, given: list[torch.Tensor], found: Any) -> None:
        self._seen |= {_storage(tensor) for tensor in given} - self._made.keys()
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in self._seen:
                what = f"{list(tensor.shape)} {tensor.dtype} made by {func} at {caller() or 'a backward pass'}"
                reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._made[_storage(tensor)] = reference, what

    def _window_places(self, tensors: list[torch.Tensor]) -> Iterator[str]:
        for tensor in tensors:
            address = tensor.data_ptr() if tensor.layout == torch.strided and not tensor.is_meta else 0
            for number, arena in enumerate(self._arenas):
                if arena.covers(address):
                    yield f"byte {address - arena.window.peers[arena.rank]} of window {number}"


class _Reads(TorchFunctionMode):
    """Notes host reads that never reach the dispatcher."""

    def __init__(self, run: Run, device: torch.device) -> None:
        super().__init__()
        self._run = run
        self._device = device

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _READING_CALLS.get(func) if callable(func) else None
        if name is not None and args[0].device.type == self._device.type and not _is_own_call():
            self._run.reads.append((name, caller()))
        return func(*args, **(kwargs or {}))


def _reads(func: Any, given: list[torch.Tensor]) -> bool:
    if func in _READS_IF_MASKED:
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
    return not _READING_TAGS.isdisjoint(func.tags)


def _is_own_call() -> bool:
    """Tell whether epbuf itself made the call that is intercepted: its tokens and tickets lie on the host."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch"):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("epbuf.")


def _storage(tensor: torch.Tensor) -> int:
    """Identify the storage of a tensor; 0 for one that has none of its own."""
    if tensor.layout != torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def count_allocations(device: torch.device) -> int:
    """Return how often torch's CUDA allocator has allocated; 0 on CPU, whose allocator cannot be watched."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))


def segments(device: torch.device) -> list[dict[str, Any]]:
    """Return the segments of torch's CUDA allocator; none on CPU."""
    if device.type != "cuda":
        return []
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return found


def foreign_pools(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the memory pools, other than a graph's own, that grew during a capture, given the segments around it.

    A capture allocates from one pool that did not exist before it, with an id (0, n); pools that a user makes have ids
    (n, 0). A symmetric-memory pool that grows has allocated and registered memory inside the capture. The default pool
    (0, 0) serves other threads. torch frees unused segments when a capture begins, so that an address may come back in
    another pool.
    """
    old = {(tuple(segment["segment_pool_id"]), segment["address"]) for segment in before}
    now = {(tuple(segment["segment_pool_id"]), segment["address"]) for segment in after}
    old_pools, grown = {pool for pool, _ in old}, {pool for pool, _ in now - old} - {(0, 0)}
    return sorted(grown & old_pools) + sorted(grown - old_pools)[1:]
