"""`CapturedStep`: warm up, capture once, call with new inputs; and the guard around what cannot be captured.

On CUDA the step is one CUDA graph. On CPU there are no graphs: a replay runs the recorded callable again, on the same
static inputs, under the same guard and with the frames that the capture took. Everything else, the state machine, the
holds and the errors, is the same code.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch.utils._pytree import tree_map

from epbuf import _C
from epbuf.arena import Arena
from epbuf.errors import CapacityError, CaptureError, ConfigError, EpbufError, LeaseError, StaleGraphError
from epbuf.generation import Generation
from epbuf.lease import Graph, caller

OnOverflow: TypeAlias = 'Literal["raise", "skip"] | Callable[[CapturedStep], None]'


class CapturedStep:
    """A step that was captured once and is called with new inputs of the same shapes.

    Attributes:
        overflow: [] float32, 1 on all ranks when a dispatch of the last call overflowed, else 0; static, like outputs.
    """

    def __init__(
        self, arenas: tuple[Arena, ...], fn: Callable[..., Any], inputs: tuple[Any, ...], graph: Graph,
        on_overflow: OnOverflow | None,
    ) -> None:  # fmt: skip
        self._arenas = arenas
        self._memories = tuple(arena.memory for arena in arenas)
        self._fn = fn
        self._inputs = inputs
        self._graph = graph
        self._on_overflow = on_overflow
        devices = [arena.device for arena in arenas]
        self._player = player_on(next((d for d in devices if d.type == "cuda"), devices[0]), "thread_local")
        self._outputs: Any = None
        self._seen = [_Counters(memory.engine.control()) for memory in self._memories]
        self.overflow = torch.zeros((), device=arenas[0].device)
        sizes = [memory.plan.schedule.num_frames for memory in self._memories]
        self._flags = torch.zeros(sum(sizes), device=arenas[0].device)
        graph.flags = dict(zip((m.handle for m in self._memories), torch.split(self._flags, sizes), strict=True))
        self._num_overflowed = torch.zeros((), dtype=torch.int64, device=arenas[0].device)  # runs of this step
        self._num_seen_overflowed = 0
        self._skipping: list[torch.optim.Optimizer] = []
        self._closed = False

    @classmethod
    def capture(
        cls, arenas: Arena | Sequence[Arena], fn: Callable[..., Any], example_inputs: Sequence[Any], *,
        warmup: int = 2, restore: Sequence[Any] = (), on_overflow: OnOverflow | None = None,
    ) -> CapturedStep:  # fmt: skip
        """Warm `fn` up, put back what that changed, and capture it.

        Collective over the group of every arena; begins and ends with a barrier of the host. Synchronises.

        Args:
            arenas: every arena that `fn` uses.
            fn: takes tensors shaped as `example_inputs`, returns tensors (any pytree).
            warmup: how often `fn` runs before the capture.
            restore: modules, optimisers, tensors and generators whose state warm-up must not change; the default
                random number generators are always put back. Optimiser state that warm-up creates is zeroed.
            on_overflow: what happens when a dispatch of the step, whichever layer's, dropped rows. "raise":
                CapacityError at the next call or check(). "skip": nothing is raised, and the optimisers of `restore`
                see `overflow` as their found_inf (a GradScaler would put its own there), so that on all ranks nothing
                changes that they update. A callable: called with the step at the next call or check(). None: "raise"
                when an arena's overflow_policy is "error", else nothing but `overflow` and recv.overflow.

        Raises:
            CaptureError: a capture is under way, `fn` made a call that cannot be captured, or a claim made inside `fn`
                outlives it.
            ConfigError: an argument of the wrong kind; on_overflow="skip" with an optimiser that has no found_inf.
        """
        owners = (arenas,) if isinstance(arenas, Arena) else tuple(arenas)
        _check_arguments(owners, example_inputs, restore, warmup, on_overflow)
        _refuse_nested(owners, "CapturedStep.capture")
        for arena in owners:
            arena.barrier()
            arena.free_unused()
        inputs = tuple(static_copy(value) for value in example_inputs)
        step = cls(owners, fn, inputs, Graph(object(), caller(), bool), on_overflow)
        itself = weakref.ref(step)
        step._graph.alive = lambda: (me := itself()) is not None and not me._closed
        if on_overflow == "skip":
            step._skipping = [item for item in restore if isinstance(item, torch.optim.Optimizer)]
        before = Snapshot(restore)
        try:
            for _ in range(warmup):
                with step._guard("warm up"), step._player.warming():
                    step._run()
            before.put_back()
            step._record()
            if step._player.record_runs:
                before.put_back()
        except BaseException:
            step.close()
            before.put_back()
            raise
        step._seen = [_Counters(memory.engine.control()) for memory in step._memories]
        step._num_seen_overflowed = int(step._num_overflowed)
        for arena in owners:
            arena.barrier()
        return step

    def __call__(self, *inputs: Any) -> Any:
        """Copy `inputs` into the static ones, launch, and return the static outputs.

        Never synchronises with the host on CUDA: what goes wrong in a replay is raised by the next call or check().

        Raises:
            ConfigError: an input of another shape, dtype or count.
            StaleGraphError: an arena has grown since the capture: capture again.
            CapacityError, LeaseError, PeerTimeoutError: what the previous replay met.
        """
        self._require_open("called")
        for arena, memory in zip(self._arenas, self._memories, strict=True):
            arena.require_open("a captured step")
            if not memory.is_closed:
                memory.raise_pending()
        self._judge([None if m.is_closed else _Counters(m.engine.status()) for m in self._memories])
        self._require_current()
        self._take(inputs)
        if self._player.record_runs:
            with self._guard("replay"):
                outputs = self._run()
            with torch.no_grad():
                tree_map(copy_into, self._outputs, outputs)
        else:
            self._player.replay()
        return self._outputs

    def rerun(self) -> Any:
        """Run the step once more, eagerly, on the inputs of the last call, in arenas that have room for it.

        For a step whose update was skipped: afterwards it is made, with every row. After an overflow the arenas grow to
        the largest demand seen, and again at each dispatch that needs still more, now that no layer before it drops
        rows; `arena.plan.capacity_rows` is then what to capture with. If an arena has grown this graph is stale: close
        it and capture again. Not for a step that uses a lease opened outside it.

        Collective; synchronises. Returns fn's outputs, which are not the static ones.

        Raises:
            CaptureError: a capture is under way, or this step is closed.
            ConfigError: an arena of engine="external", whose dispatches are not ours.
        """
        self._require_open("run again")
        _refuse_nested(self._arenas, "rerun()")
        for arena in self._arenas:
            arena.require_ops("rerun()")
        overflowed = bool(self.overflow)
        with ExitStack() as stack:
            for arena in self._arenas:
                if overflowed:
                    arena.grow_to_peak()
                stack.enter_context(arena.growing())
            return tree_map(_detached, self._fn(*self._inputs))

    def check(self) -> None:
        """Raise what replays so far met and did not raise yet.

        Raises:
            CapacityError: a dispatch overflowed and on_overflow is "raise".
            ConfigError: an id was not below num_experts, and the plan has validate_ids.
            LeaseError: a frame was used again before its backward.
            PeerTimeoutError: a rank did not arrive.
        """
        for arena in self._arenas:
            arena.check()
        self._judge([None if m.is_closed else _Counters(m.engine.control()) for m in self._memories])

    def close(self) -> None:
        """End this graph's hold on its arenas. Idempotent; local; synchronises on CUDA."""
        self._closed = True
        self._outputs = None
        self._player.close()

    def _record(self) -> None:
        books = [memory.book for memory in self._memories]
        serials = [book.newest_serial() for book in books]
        with self._guard("record"), self._player.recording():
            outputs = self._run()
        self._outputs = tree_map(_detached, outputs)
        del outputs
        gc.collect()
        left = [c for book, s in zip(books, serials, strict=True) for c in book.claims_since(s)]
        if left:
            self.close()
            raise CaptureError(
                "claims made inside the captured step are still alive after it: " + "; ".join(left) + ". Release the "
                "lease, drop the Received, and run backward (or use no_grad) inside the step; a lease opened before "
                "the capture may be used instead"
            )

    def _run(self) -> Any:
        """Run the callable, and note on the device whether it overflowed."""
        with torch.no_grad():
            self._flags.zero_()
        outputs = self._fn(*self._inputs)
        with torch.no_grad():
            self._sum_up()
            self._num_overflowed.add_(self.overflow.to(torch.int64))
        return outputs

    def _sum_up(self, *_: object) -> None:
        """Set `overflow` by what dispatches have flagged so far; also what an optimiser calls before its step."""
        torch.amax(self._flags, dim=0, out=self.overflow)

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise CaptureError(f"the step captured at {self._graph.where} is closed and was {what}; capture another")

    def _require_current(self) -> None:
        for arena, memory in zip(self._arenas, self._memories, strict=True):
            if arena.memory is not memory:
                raise StaleGraphError(
                    f"the step captured at {self._graph.where} uses generation {memory.number} of its arena "
                    f"(recv_capacity_per_rank={memory.capacity_rows}), which grew at {arena.memory.where} and is at "
                    f"generation {arena.generation} ({arena.memory.capacity_rows}): close this step and capture again"
                )

    @contextmanager
    def _guard(self, phase: Literal["warm up", "record", "replay"]) -> Iterator[None]:
        """Mark the arenas as being captured by this step, with Python's collector off."""
        collecting = gc.isenabled()
        gc.disable()
        self._graph.begin(phase)
        with ExitStack() as stack:
            for memory in self._memories:
                stack.enter_context(memory.book.recording_into(self._graph))
            for optimizer in self._skipping:
                stack.enter_context(self._skipped_by(optimizer))
            try:
                yield
            finally:
                if collecting:
                    gc.enable()

    @contextmanager
    def _skipped_by(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let a fused optimiser do nothing when a dispatch has overflowed, as a GradScaler does it.

        Source: torch/optim/adamw.py of torch 2.13, `found_inf=getattr(self, "found_inf", None)`.
        """
        hook = optimizer.register_step_pre_hook(self._sum_up)
        vars(optimizer)["found_inf"] = self.overflow
        try:
            yield
        finally:
            hook.remove()
            vars(optimizer).pop("found_inf", None)

    def _take(self, inputs: tuple[Any, ...]) -> None:
        if len(inputs) != len(self._inputs):
            raise ConfigError(f"the step was captured with {len(self._inputs)} inputs and called with {len(inputs)}")
        for position, (static, given) in enumerate(zip(self._inputs, inputs, strict=True)):
            _check_like(position, static, given)
        with torch.no_grad():
            for static, given in zip(self._inputs, inputs, strict=True):
                copy_into(static, given)

    def _judge(self, counters: list[_Counters | None]) -> None:
        """Raise, or report, what has happened since this was last called; None: the memory is gone."""
        then, self._seen = self._seen, [now or old for now, old in zip(counters, self._seen, strict=True)]
        overflowed = []
        for memory, now, before in zip(self._memories, self._seen, then, strict=True):
            if now.num_early_reuses > before.num_early_reuses:
                raise LeaseError(
                    f"a replay of the step captured at {self._graph.where} ran a backward whose dispatch had already "
                    "been followed by its backward: replay forward and backward graphs in turns, or plan more frames"
                )
            if now.num_bad_ids > before.num_bad_ids and memory.plan.config.validate_ids:
                raise now.bad_id_error(memory)
            if now.num_overflows + now.num_full_stashes > before.num_overflows + before.num_full_stashes:
                overflowed.append(memory)
        if overflowed:  # here, or in another graph or an eager step: only then is our own number worth a read
            seen, self._num_seen_overflowed = self._num_seen_overflowed, int(self._num_overflowed)
            if self._num_seen_overflowed > seen:
                self._overflowed(overflowed, self._num_seen_overflowed - seen)

    def _overflowed(self, memories: list[Generation], num_runs: int) -> None:
        action = self._on_overflow
        if action is None and any(memory.plan.config.overflow_policy == "error" for memory in memories):
            action = "raise"
        if callable(action):
            action(self)
        elif action == "raise":
            peaks = "; ".join(memory.describe_shortage() for memory in memories)
            raise CapacityError(
                f"{num_runs} replay(s) of the step captured at {self._graph.where} needed {peaks}: rows were dropped, "
                "and what the step updates has seen that. Plan more and capture again, or capture with "
                'on_overflow="skip", which leaves the update out, and repeat the step with step.rerun(), which grows '
                "the arena"
            )


class _Counters:
    """The event counters of an arena at one moment."""

    def __init__(self, control: _C.Control) -> None:
        self.num_overflows = int(control.num_overflows)
        self.num_full_stashes = int(control.num_stash_overflows)
        self.num_bad_ids = int(control.num_bad_ids)
        self.num_early_reuses = int(control.num_early_reuses)
        self.bad_id = (int(control.bad_rank), int(control.bad_token), int(control.bad_value))

    def bad_id_error(self, arena: Generation) -> EpbufError:
        rank, token, value = self.bad_id
        return ConfigError(
            f"in a replay rank {rank} routed token {token} to expert {value}; ids lie in "
            f"[0, num_experts={arena.plan.config.num_experts}), and a negative id means no expert"
        )


class Player(Protocol):
    """How a step is recorded and run again."""

    record_runs: bool
    """Whether recording executes the step, and a replay is one more call of it."""

    def warming(self) -> AbstractContextManager[Any]:
        """Surround a run before the capture."""

    def recording(self) -> AbstractContextManager[Any]:
        """Surround the run that is captured."""

    def replay(self) -> None:
        """Launch what was captured."""

    def close(self) -> None:
        """Drop what was captured."""


class _HostPlayer:
    record_runs = True

    def warming(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def recording(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def replay(self) -> None:
        raise AssertionError("the host runs the callable itself")

    def close(self) -> None:
        return None


class _CudaPlayer:
    """One torch.cuda.CUDAGraph, warmed up and captured on a stream of its own."""

    record_runs = False

    def __init__(self, device: torch.device, error_mode: str) -> None:
        self._error_mode = error_mode
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def warming(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def recording(self) -> AbstractContextManager[Any]:
        assert self._graph is not None, "a closed step is not recorded"
        return torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode=self._error_mode)

    def replay(self) -> None:
        assert self._graph is not None, "a closed step is not called"
        self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            torch.cuda.synchronize(self._stream.device)
            self._graph.reset()
        self._graph = None


def player_on(device: torch.device, error_mode: str) -> Player:
    """Return what records and replays a step on a device; `error_mode` is torch's `capture_error_mode`, on CUDA."""
    return _CudaPlayer(device, error_mode) if device.type == "cuda" else _HostPlayer()


class Snapshot:
    """The state of modules, optimisers, tensors and generators, to be put back in place.

    Addresses do not change. Gradients that were None become None again; optimiser state that did not exist is zeroed,
    because a captured optimiser needs it allocated.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._optimizers = [item for item in items if isinstance(item, torch.optim.Optimizer)]
        self._states = [_copy_state(optimizer) for optimizer in self._optimizers]
        self._generators = [(g, g.get_state()) for g in items if isinstance(g, torch.Generator)]
        self._random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        for item in items:
            self._add(item)

    def put_back(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
            for tensor, gradient in self._gradients:
                _put_back_gradient(tensor, gradient)
            for optimizer, state in zip(self._optimizers, self._states, strict=True):
                _put_back_state(optimizer, state)
        for generator, generator_state in self._generators:
            generator.set_state(generator_state)
        torch.set_rng_state(self._random)
        torch.cuda.set_rng_state_all(self._cuda_random)

    def _add(self, item: Any) -> None:
        if isinstance(item, torch.nn.Module):
            for tensor in (*item.parameters(), *item.buffers()):
                self._add(tensor)
        elif isinstance(item, torch.Tensor):
            self._tensors.append((item, item.detach().clone()))
            if item.is_leaf:
                self._gradients.append((item, None if item.grad is None else item.grad.detach().clone()))
        elif not isinstance(item, torch.optim.Optimizer | torch.Generator):
            raise ConfigError(f"restore takes modules, optimisers, tensors and generators, found {type(item).__name__}")


def _copy_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    return {
        parameter: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }


def _put_back_state(optimizer: torch.optim.Optimizer, before: dict[Any, dict[str, Any]]) -> None:
    for parameter, state in optimizer.state.items():
        known = before.get(parameter, {})
        for key in list(state):
            if isinstance(state[key], torch.Tensor):
                state[key].copy_(known[key]) if key in known else state[key].zero_()
            elif key in known:
                state[key] = known[key]
            else:
                del state[key]


def _put_back_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is None or tensor.grad is None:
        tensor.grad = gradient
    else:
        tensor.grad.copy_(gradient)


def _check_skip(restore: Sequence[Any]) -> None:
    for optimizer in (item for item in restore if isinstance(item, torch.optim.Optimizer)):
        name = type(optimizer).__name__
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ConfigError(
                f'on_overflow="skip" needs optimisers that take found_inf, found {name} without; make it with '
                "fused=True, or pass on_overflow=None and skip the update yourself where step.overflow is 1"
            )
        if getattr(optimizer, "found_inf", None) is not None:
            raise ConfigError(
                f'on_overflow="skip" sets found_inf of the optimisers in restore, and {name} has one of yours; delete '
                "it, or pass on_overflow=None and add step.overflow or recv.overflow to yours"
            )


def _check_arguments(
    arenas: tuple[Any, ...], inputs: object, restore: object, warmup: object, on_overflow: object
) -> None:  # fmt: skip
    """Check what capture() was given.

    Raises:
        ConfigError: no arena, something that is none, a tensor or module where a sequence belongs, a negative warm-up,
            or an unknown word for on_overflow.
    """
    if not arenas or not all(isinstance(arena, Arena) for arena in arenas):
        raise ConfigError(f"capture takes one arena or several, found {[type(a).__name__ for a in arenas]}")
    for name, value in (("example_inputs", inputs), ("restore", restore)):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} must be a tuple or list, found {type(value).__name__}; write ({name},)")
    if not isinstance(warmup, int) or warmup < 0:
        raise ConfigError(f"warmup must be an int of at least 0, found {warmup!r}")
    if not (on_overflow in (None, "raise", "skip") or callable(on_overflow)):
        raise ConfigError(f'on_overflow must be None, "raise", "skip" or a callable, found {on_overflow!r}')
    if on_overflow == "skip":
        assert isinstance(restore, list | tuple), "checked above"
        _check_skip(restore)


def _refuse_nested(arenas: tuple[Arena, ...], call: str) -> None:
    for arena in arenas:
        arena.require_open(call)
        if arena.book.recording is not None:
            raise CaptureError(
                f"{call} inside the capture begun at {arena.book.recording.where}: captures do not nest; "
                "capture this step on its own, before or after"
            )


def static_copy(value: Any) -> Any:
    """Return a copy of an input that is a tensor, needing a gradient if that does; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def copy_into(static: Any, given: Any) -> Any:
    """Copy a value into a static tensor, unless it is that tensor; return what is static."""
    if isinstance(static, torch.Tensor) and static is not given:
        static.copy_(given)
    return static


def _check_like(position: int, static: Any, given: Any) -> None:
    if not isinstance(static, torch.Tensor):
        if static != given:
            raise ConfigError(f"input {position} was {static!r} at capture, {given!r} now; only tensors may change")
        return
    found = (list(given.shape), given.dtype) if isinstance(given, torch.Tensor) else type(given).__name__
    if found != (list(static.shape), static.dtype):
        raise ConfigError(
            f"input {position} was captured as {(list(static.shape), static.dtype)} and is {found} now; capture a step "
            "for each shape, or pad and pass num_tokens"
        )
