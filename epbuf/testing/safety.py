"""`assert_capture_safe`: whether a step may be captured, and if not, which rule it breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from epbuf.arena import Arena
from epbuf.capture import CapturedStep, Snapshot, static_copy
from epbuf.errors import CaptureError, ConfigError
from epbuf.testing.plain import PlainStep
from epbuf.testing.watch import Watch, count_allocations, foreign_pools, segments

Rule: TypeAlias = Literal["host read", "refused", "left behind", "host state", "addresses", "allocations", "values"]

_REMEDIES: dict[str, str] = {
    "host read": "a captured graph has no host, and on CUDA such a read ends the capture: keep the value on the device "
    "(torch.where, masks, recv.offs, num_tokens=), or read it after the step",
    "refused": "move that out of the step, before the capture or after a replay",
    "left behind": "a replay makes no new tensors, so whoever holds them sees the capture's, for ever: return them, or "
    "write into tensors made before the capture; gradients belong to modules or tensors given in restore=",
    "host state": "a replay runs no Python: keep what changes from call to call in tensors that the step updates in "
    "place, and name them in restore=",
    "addresses": "a graph is captured with the addresses it saw: take frames by schedule.frame(...), and reuse tensors",
    "allocations": "allocate everything before the capture",
    "values": "something the step reads is not an input, not in restore=, or garbage: rows past recv.offs[-1], an "
    "uninitialised tensor, a value computed on the host",
}


_NUM_WARM_UPS = 3  # the first may make what later ones reuse; the other two must do the same


class UnsafeStepError(AssertionError):
    """A step broke a rule of capture.

    Attributes:
        rule: which: "host read", "refused", "left behind", "host state", "addresses", "allocations" or "values".
    """

    def __init__(self, rule: Rule, found: str) -> None:
        super().__init__(f'not safe to capture, rule "{rule}": {found}\nWhat to do: {_REMEDIES[rule]}')
        self.rule = rule


def assert_capture_safe(
    fn: Callable[..., Any], *inputs: Any, vary: Callable[..., Any], arenas: Arena | Sequence[Arena] = (),
    rtol: float = 0.0, restore: Sequence[Any] = (), num_replays: int = 3,
) -> None:  # fmt: skip
    """Capture `fn`, replay it with changed inputs, and compare each replay with an eager run.

    Checks, in this order: "host read": no value of the device is read on the host. "left behind": no tensor made by a
    call outlives it unless returned. "refused": nothing is called that a capture refuses, no claim outlives the step.
    "host state": the same inputs and state give the same ops, the same window addresses, and the same bits.
    "allocations": no replay allocates (CUDA), and no window is allocated or registered. "addresses": static outputs
    stay where they are. "values": a replay gives what an eager run gives, and leaves the same in `restore`.

    On CPU a replay runs `fn` again, so what a graph would miss is found by watching the ops of each run. With arenas
    the capture is a `CapturedStep`; collective over their groups. Puts `restore` back at the end. Synchronises.

    Args:
        fn: takes tensors shaped as `inputs`, returns tensors (any pytree).
        vary: takes inputs, returns others of the same shapes; called before every replay with the last ones.
        arenas: every arena that `fn` uses.
        rtol: of the comparison with eager; 0: equal to the bit, NaN equal to NaN.
        restore: modules, optimisers, tensors and generators that `fn` changes.
        num_replays: how often inputs are varied.

    Raises:
        UnsafeStepError: an AssertionError; its `rule` is the first rule that was broken.
        ConfigError: `vary` changed nothing, or returned another number of inputs; `fn` returned no pytree of tensors.
    """
    owners = (arenas,) if isinstance(arenas, Arena) else tuple(arenas)
    trial = _Trial(fn, owners, inputs, restore, rtol)
    before = Snapshot(restore)
    try:
        trial.capture(inputs)
        for replay in range(num_replays):
            inputs = _varied(vary, inputs)
            trial.replay(replay, inputs)
    finally:
        trial.close()
        before.put_back()


class _Trial:
    """One captured step beside the eager function."""

    def __init__(
        self, fn: Callable[..., Any], arenas: tuple[Arena, ...], inputs: tuple[Any, ...], restore: Sequence[Any],
        rtol: float,
    ) -> None:  # fmt: skip
        self._fn = fn
        self._arenas = arenas
        self._restore = restore
        self._rtol = rtol
        self._device = _device_of(arenas, inputs)
        self._watch = Watch(fn, arenas, self._device, lambda: _state(restore))
        self._step: CapturedStep | PlainStep | None = None
        self._places: list[int] = []
        self._num_windows = [arena.window_allocations for arena in arenas]

    def capture(self, inputs: tuple[Any, ...]) -> None:
        """Warm up, watched, then capture."""

        def checked(*static: Any) -> Any:
            outputs = self._watch(*static)
            _check_outputs(outputs)
            self._check_run()
            return outputs

        try:
            if self._arenas:
                self._step = CapturedStep.capture(
                    self._arenas, checked, inputs, warmup=_NUM_WARM_UPS, restore=self._restore,
                    on_overflow=lambda _: None,  # an eager run that overflows goes on, too
                )  # fmt: skip
            else:
                self._step = PlainStep(checked, inputs, _NUM_WARM_UPS, self._restore, self._device)
        except CaptureError as error:
            raise UnsafeStepError("refused", str(error)) from error
        pools = foreign_pools(self._watch.segments, segments(self._device))
        if pools:
            raise UnsafeStepError("allocations", f"memory pool(s) {pools} grew inside the capture")
        self._check_windows()

    def replay(self, number: int, inputs: tuple[Any, ...]) -> None:
        """Run eagerly and replay, from the same state; compare."""
        assert self._step is not None, "captured before"
        wanted = self._eager(inputs)
        if number == 0:
            self._compare("host state", "an eager call", self._eager(inputs), "the same call before it", wanted)
        num_allocations = count_allocations(self._device)
        outputs = self._step(*inputs)
        num_allocations = count_allocations(self._device) - num_allocations
        self._step.check()
        if num_allocations:
            raise UnsafeStepError("allocations", f"replay {number} allocated {num_allocations} time(s)")
        self._check_windows()
        self._check_places(number, outputs)
        self._compare("values", f"replay {number}", (outputs, _values(self._restore)), "an eager run", wanted)

    def close(self) -> None:
        """Drop the captured step."""
        if self._step is not None:
            self._step.close()

    def _eager(self, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        """Run `fn` on copies; return what it gave and what it left in `restore`, which is then put back."""
        before = Snapshot(self._restore)
        copies = tuple(static_copy(value) for value in inputs)
        found: tuple[Any, Any] = tree_map(_copy_of_result, (self._fn(*copies), _values(self._restore)))
        before.put_back()
        return found

    def _check_run(self) -> None:
        runs = self._watch.runs
        if runs[-1].reads:
            op, place = runs[-1].reads[0]
            raise UnsafeStepError("host read", f"{op} reads a device value on the host\n  at {place}")
        if len(runs) == 1:  # which may make what later runs reuse
            return
        if runs[-1].left:
            found = "".join(f"\n  {what}" for what in runs[-1].left[:3])
            raise UnsafeStepError("left behind", f"a call leaves {len(runs[-1].left)} new tensor(s) behind:{found}")
        if len(runs) == _NUM_WARM_UPS:  # later runs begin with gradients put back, and may do other work for it
            self._check_same_ops()

    def _check_same_ops(self) -> None:
        is_place, difference = self._watch.first_difference()
        if difference:
            raise UnsafeStepError("addresses" if is_place else "host state", f"of two equal calls, {difference}")

    def _check_windows(self) -> None:
        now = [arena.window_allocations for arena in self._arenas]
        if now != self._num_windows:
            raise UnsafeStepError(
                "allocations", f"windows were allocated or registered: {self._num_windows} before, {now} now"
            )

    def _check_places(self, number: int, outputs: Any) -> None:
        places = [leaf.data_ptr() for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        if number and places != self._places:
            raise UnsafeStepError("addresses", f"outputs lay at {_hex(self._places)} and lie at {_hex(places)} now")
        self._places = places

    def _compare(self, rule: Rule, name: str, found: Any, other: str, wanted: Any) -> None:
        difference = first_difference(found, wanted, self._rtol)
        if difference:
            raise UnsafeStepError(rule, f"{name} differs from {other}: {difference}")


def _check_outputs(outputs: Any) -> None:
    unknown = [leaf for leaf in tree_leaves(outputs) if not isinstance(leaf, torch.Tensor | int | float | str | None)]
    if unknown:
        raise ConfigError(
            f"fn returned a {type(unknown[0]).__name__}, in which no tensor can be found; return tensors, in tuples, "
            "lists or dicts, or register the type with torch.utils._pytree"
        )


def first_difference(found: Any, wanted: Any, rtol: float) -> str:
    """Say where two pytrees differ first; "" if nowhere. NaN equals NaN."""
    (leaves, spec), (others, other_spec) = tree_flatten(found), tree_flatten(wanted)
    if spec != other_spec:
        return f"it returned {spec}, not {other_spec}"
    for number, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
        difference = _leaf_difference(leaf, other, rtol)
        if difference:
            return f"tensor {number}, {difference}"
    return ""


def _leaf_difference(found: Any, wanted: Any, rtol: float) -> str:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return "" if found == wanted else f"{found!r} instead of {wanted!r}"
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{list(found.shape)} {found.dtype} instead of {list(wanted.shape)} {wanted.dtype}"
    if found.dtype.is_floating_point and found.element_size() == 1:
        found, wanted = found.view(torch.uint8), wanted.view(torch.uint8)
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    if rtol and found.dtype.is_floating_point:
        same |= torch.isclose(found, wanted, rtol=rtol, atol=0)
    if bool(same.all()):
        return ""
    place = tuple((~same).nonzero()[0].tolist())
    num_different = int((~same).sum())
    return (
        f"{num_different} of {same.numel()} elements differ, the first at {list(place)}: {found[place].item()} instead "
        f"of {wanted[place].item()}"
    )


def _varied(vary: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    changed = vary(*inputs)
    changed = changed if isinstance(changed, tuple) else (changed,)
    if len(changed) != len(inputs):
        _refuse_vary(f"returned {len(changed)} inputs and fn takes {len(inputs)}")
    if not first_difference(changed, inputs, 0.0):
        _refuse_vary("changed nothing, so a replay that ignores its inputs would pass")
    return changed


def _refuse_vary(what: str) -> NoReturn:
    raise ConfigError(f"vary {what}; return a tuple of new tensors of the same shapes, one for each input")


def _device_of(arenas: tuple[Arena, ...], inputs: tuple[Any, ...]) -> torch.device:
    devices = [arena.device for arena in arenas] + [v.device for v in inputs if isinstance(v, torch.Tensor)]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _state(restore: Sequence[Any]) -> list[torch.Tensor]:
    """Return tensors that a step may replace: values, gradients, and what an optimiser keeps."""
    tensors = [t for item in restore for t in _tensors(item)]
    gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return tensors + gradients


def _values(restore: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors whose values a step must leave as an eager run does."""
    return [t.detach() for item in restore for t in _tensors(item)]


def _tensors(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.nn.Module):
        return [*item.parameters(), *item.buffers()]
    if isinstance(item, torch.optim.Optimizer):
        return [leaf for leaf in tree_leaves(list(item.state.values())) if isinstance(leaf, torch.Tensor)]
    return [item] if isinstance(item, torch.Tensor) else []


def _copy_of_result(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _hex(places: list[int]) -> str:
    return ", ".join(f"{place:#x}" for place in places)
