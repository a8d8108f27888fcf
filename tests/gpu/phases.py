"""R virtual ranks on one GPU in one process, driven phase by phase: no wait is issued before what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from rounds import JUNK, NAN, Inputs
from torch import Tensor

import epbuf
from epbuf import _C
from epbuf.engine import NativeEngine, Place, Rows

POISON = dict.fromkeys(("offs", "counts"), JUNK) | dict.fromkeys(("overflow", "recv_topk_weights", "recv_tokens"), NAN)
POISON |= {"slot_map": 1, "wire_rows": 0xFF, "grad_wire_rows": 0xFF}  # slots that look live, rows of NaN
PLACE = Place(frame=0, workspace=0)


class _Note:
    """Stands for a rank's native engine: keeps the call that NativeEngine fills, instead of running it."""

    def __init__(self) -> None:
        self.op, self.call = "", None

    def __getattr__(self, op: str) -> Callable[[Any], Any]:
        def keep(call: Any) -> Any:
            self.op, self.call = op, call
            return _C.Outcome()

        return keep


class VirtualRanks:
    """The windows and engines of all ranks of a configuration."""

    def __init__(self, config: epbuf.EpConfig) -> None:
        self.plan = plan = epbuf.Plan.build(config.model_copy(update={"timeout_s": 2}))
        device = torch.device("cuda", torch.cuda.current_device())
        self.ranks = range(plan.config.num_ranks)
        self._windows = [torch.zeros(plan.total_bytes, dtype=torch.uint8, device=device) for _ in self.ranks]
        torch.cuda.synchronize()
        peers: Any = SimpleNamespace(peers=[window.data_ptr() for window in self._windows])
        self._engines = [NativeEngine(plan, rank, peers, device) for rank in self.ranks]
        self._natives: list[Any] = [engine.native for engine in self._engines]
        for engine in self._engines:
            engine.native = _Note()  # type: ignore[assignment]

    def __enter__(self) -> VirtualRanks:
        return self

    def __exit__(self, *exc: object) -> None:
        torch.cuda.synchronize()
        for native in self._natives:
            native.close()

    def region(self, rank: int, name: str) -> Tensor:
        """Return a region of frame 0 or workspace 0, or of the arena."""
        region = self.plan.region(name)
        memory = self._windows[rank][region.offset : region.end]
        return memory.view(getattr(torch, region.dtype)).view(region.shape)

    def regions(self, name: str) -> list[Tensor]:
        return [self.region(rank, name) for rank in self.ranks]

    def run(self, op: Callable[[int, NativeEngine], object]) -> None:
        """Issue one op of every rank: phase by phase, or at once if it talks to nobody."""
        for rank, engine in enumerate(self._engines):
            op(rank, engine)
        notes = [engine.native for engine in self._engines]
        if notes[0].op == "weight_grad":
            for native, note in zip(self._natives, notes, strict=True):
                native.weight_grad(note.call)
            return
        number = int(_C.Op[notes[0].op.upper()])
        for phase in range(_C.CudaEngine.phases(number)):  # type: ignore[attr-defined]
            for native, note in zip(self._natives, notes, strict=True):
                native.run_phase(number, phase, note.call)

    def controls(self) -> list[_C.Control]:
        """Read every rank's words; fail if one is poisoned."""
        controls = [native.control() for native in self._natives]
        for rank, control in enumerate(controls):
            error = control.error
            assert not control.poisoned, f"rank {rank} waited in vain for {_C.Phase(error.phase)} of rank {error.peer}"
        return controls


def route(ranks: VirtualRanks, inputs: Sequence[Inputs]) -> None:
    """Poison what route and dispatch write, then route."""
    for name in POISON.keys() & ranks.plan.lifetimes.keys():
        for region in ranks.regions(name):
            region.fill_(POISON[name])
    ranks.run(lambda rank, engine: engine.route(PLACE, inputs[rank].topk_idx, inputs[rank].num_tokens))


def dispatch(ranks: VirtualRanks, inputs: Sequence[Inputs]) -> None:
    ranks.run(lambda rank, engine: engine.dispatch(PLACE, inputs[rank].x, inputs[rank].topk_weights))


def combine(ranks: VirtualRanks, inputs: Sequence[Inputs], weighted: bool) -> list[Tensor]:
    """Combine poisoned outputs; return y of every rank."""
    rows = _poison_tails(ranks, [i.expert_out for i in inputs])
    weights = ranks.regions("recv_topk_weights")
    y = [torch.full_like(i.x, NAN) for i in inputs]
    for region in ranks.regions("expert_out"):
        region.fill_(NAN)
    ranks.run(
        lambda rank, engine: engine.combine(PLACE, Rows(rows[rank]), weights[rank] if weighted else None, y[rank])
    )
    return y


def play_virtual(ranks: VirtualRanks, inputs: Sequence[Inputs], weighted: bool) -> list[dict[str, Tensor]]:
    """Run the round of tests/rounds.py on all ranks; return the same names."""
    num_local = ranks.plan.num_local_experts
    route(ranks, inputs)
    dispatch(ranks, inputs)
    names = ("slot_map", "offs", "overflow", "recv_tokens", "recv_topk_weights")
    got = [{name: ranks.region(rank, name).clone() for name in names} for rank in ranks.ranks]
    for rank, found in enumerate(got):
        counts = ranks.region(rank, "counts").clone()
        found["slot_map"] = found["slot_map"][: len(inputs[rank].x)]
        found["tokens_per_expert"], found["valid_tokens_per_expert"] = counts[:num_local], counts[num_local:-1]
        found["total_recv_tokens"] = counts[-1:]
    ys = combine(ranks, inputs, weighted)
    _combine_backward(ranks, inputs, weighted, got)
    grads = _dispatch_backward(ranks, inputs)
    for found, y, (dx, dw) in zip(got, ys, grads, strict=True):
        found |= {"y": y, "dx": dx, "dw": dw}
    ranks.controls()
    return got


def _combine_backward(
    ranks: VirtualRanks, inputs: Sequence[Inputs], weighted: bool, got: list[dict[str, Tensor]]
) -> None:
    grads, weights = ranks.regions("grad_expert_out"), ranks.regions("recv_topk_weights")
    grad_weights = ranks.regions("grad_recv_topk_weights")
    for region in (*grads, *grad_weights):
        region.fill_(NAN)
    ranks.run(lambda rank, engine: engine.combine_backward(PLACE, inputs[rank].dy, False))
    if weighted:
        rows = [i.expert_out for i in inputs]
        ranks.run(lambda rank, engine: engine.weight_grad(PLACE, rows[rank], weights[rank], grad_weights[rank]))
    for rank, found in enumerate(got):
        found["grad_expert_out"] = grads[rank].clone()
        if weighted:
            found["grad_weights"] = grad_weights[rank].clone()


def _dispatch_backward(ranks: VirtualRanks, inputs: Sequence[Inputs]) -> list[tuple[Tensor, Tensor]]:
    rows = _poison_tails(ranks, [i.grad_recv_tokens for i in inputs])
    weights = _poison_tails(ranks, [i.grad_recv_topk_weights for i in inputs])
    for name in ("grad_expert_out", "grad_recv_tokens", "grad_recv_topk_weights"):
        for region in ranks.regions(name):
            region.fill_(NAN)
    outs = [(torch.full_like(i.x, NAN), torch.full_like(i.topk_weights, NAN)) for i in inputs]
    ranks.run(
        lambda rank, engine: engine.dispatch_backward(
            PLACE, (Rows(rows[rank]), Rows(weights[rank])), *outs[rank], num_tokens=len(inputs[rank].x),
            begins_use=False, clears_open=True,
        )
    )  # fmt: skip
    return outs


def _poison_tails(ranks: VirtualRanks, values: Sequence[Tensor]) -> list[Tensor]:
    poisoned = []
    for value, offs in zip(values, ranks.regions("offs"), strict=True):
        tail = torch.arange(len(value), device=value.device) >= offs[-1]
        poisoned.append(value.masked_fill(tail.view(-1, *[1] * (value.ndim - 1)), NAN))
    return poisoned
