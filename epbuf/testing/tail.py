"""`assert_tail_unread`: whether expert code keeps off the rows past the last zone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from epbuf.testing.memory import poison
from epbuf.testing.safety import first_difference

_HUGE = 1e4  # fits in fp16


def assert_tail_unread(
    fn: Callable[..., Any], rows: torch.Tensor, offs: torch.Tensor, *others: Any,
    parameters: Iterable[torch.Tensor] = (),
) -> None:  # fmt: skip
    """Run `fn(rows, offs, *others)` with zeros, a huge number and NaN past `offs[-1]`; nothing else may change.

    Results of C rows are compared below `offs[-1]`, other results whole. Where they need a gradient, backward runs,
    too, with the same poison past the end of the gradients that come in: the gradients of `rows` (below the end) and of
    `parameters` must not change. Reads the device; synchronises.

    Args:
        fn: expert code; must give the same for the same arguments.
        rows: [C, ...], as `recv.tokens`; copied, and its rows past the end overwritten in the copies.
        offs: [L] int32, ends of the zones; offs[-1] must be below C.
        others: passed on.
        parameters: weights of `fn`.

    Raises:
        AssertionError: names the result or gradient that depends on those rows.
        ValueError: offs[-1] is C: there is no tail.
    """
    end = int(offs[-1])
    if end >= len(rows):
        raise ValueError(f"offs[-1] is {end} and there are {len(rows)} rows: no tail to test; pass more rows or fewer")
    weights = list(parameters)
    runs = {
        name: _run(lambda tail: fn(tail, offs, *others), rows, end, fill, weights)
        for name, fill in (("zeros", _zero), ("huge numbers", _make_huge), ("NaN", poison))
    }
    for name, found in list(runs.items())[1:]:
        for what, tensor in found.items():
            difference = first_difference(tensor, runs["zeros"].get(what), 0.0)
            if difference:
                raise AssertionError(
                    f"{what} depends on rows past offs[-1]={end}, which belong to nobody: with {name} there instead of "
                    f"zeros, {difference}. Bound the kernel by offs, or mask: recv.row_mask(), recv.trim()"
                )


def _run(
    fn: Callable[[torch.Tensor], Any], rows: torch.Tensor, end: int, fill: Callable[[torch.Tensor], None],
    weights: list[torch.Tensor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return results and gradients by name, each without its rows past the end."""
    given = rows.detach().clone()
    fill(given[end:])
    given.requires_grad_(given.dtype.is_floating_point and given.element_size() > 1)
    results = [leaf for leaf in tree_leaves(fn(given)) if isinstance(leaf, torch.Tensor)]
    found = {f"result {n}": _below(result, rows, end) for n, result in enumerate(results)}
    roots = [result for result in results if result.requires_grad]
    leaves = [leaf for leaf in (given, *weights) if leaf.requires_grad]
    if roots and leaves:
        incoming = [_gradient_for(root, rows, end, fill) for root in roots]
        grads = torch.autograd.grad(roots, leaves, incoming, allow_unused=True)
        names = ["the gradient of rows", *(f"the gradient of parameter {n}" for n in range(len(weights)))]
        needed = [name for name, leaf in zip(names, (given, *weights), strict=True) if leaf.requires_grad]
        for name, grad in zip(needed, grads, strict=True):
            if grad is not None:
                found[name] = _below(grad, rows, end) if name == names[0] else grad.clone()
    return found


def _below(result: torch.Tensor, rows: torch.Tensor, end: int) -> torch.Tensor:
    """Return a copy of what lies before the end: `fn` may give the same memory again at its next run."""
    return (result.detach()[:end] if _has_rows_of(result, rows) else result.detach()).clone()


def _gradient_for(
    root: torch.Tensor, rows: torch.Tensor, end: int, fill: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Make a gradient that differs from element to element, with `fill` past the end."""
    flat = torch.arange(root.numel(), device=root.device) % 7 - 3
    grad = flat.to(root.dtype).view(root.shape).clone()
    if _has_rows_of(root, rows):
        fill(grad[end:])
    return grad


def _has_rows_of(tensor: torch.Tensor, rows: torch.Tensor) -> bool:
    return tensor.ndim > 0 and len(tensor) == len(rows)


def _zero(tensor: torch.Tensor) -> None:
    _as_computable(tensor).zero_()


def _make_huge(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        tensor.fill_(_HUGE)
    else:
        _as_computable(tensor).fill_(1)


def _as_computable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
