"""One rank of a baseline of the GPU benchmark. `launch.py` starts it on every rank, beside ours.

    nccl_ep             NCCL EP, high throughput, expert-major: rows are staged by the library
    nccl_ep_zero_copy   the same with received rows in an NCCL window; needs a power of two of local experts, and its
                        combine overwrites what it reads
    torch               index_select + all_to_all_single each way; the host reads the counts, so it cannot be captured

Routing and tokens are ours; y must be K times x, because nothing is done to the rows. Ops are timed one eager call at a
time, queued one behind the other; the step of NCCL EP is a graph like ours, timed like ours, that of torch an eager
one. NCCL EP takes one shape a process. Needs NCCL >= 2.30 (LD_PRELOAD) where ranks share a GPU, and nccl4py and
nccl-extensions for NCCL EP.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from expected import draw_tokens, draw_weights
from measure import Session, Shape, captured, gather, join, time_calls, time_replays, versions, write_record
from torch import Tensor

SMS_PER_RANK = {2: 24, 4: 32, 8: 16}
"""Blocks of NCCL EP a rank. With more than the GPU can hold at once its ranks wait for ever for each other."""

MAX_ERROR = 0.01  # bf16 has 8 bits; K rows that each round differently are still nearer than this


class Baseline(Protocol):
    """One other way to dispatch and combine."""

    y: Tensor

    def route(self) -> None:
        """Work out where rows go."""

    def dispatch(self) -> None:
        """Bring the rows to their experts' ranks."""

    def combine(self) -> None:
        """Bring them back and add them into y."""


class NcclEp:
    """NCCL EP over a communicator of its own.

    Source: nccl-extensions 0.1.0 (nccl.ep) and nccl4py 0.6.0 (nccl.core).
    """

    def __init__(self, shape: Shape, session: Session, *, zero_copy: bool) -> None:
        import nccl.core as nccl
        import nccl.ep as ep

        self.stream, self.zero_copy, self.ep = session.stream, zero_copy, ep
        identity = gather(bytes(nccl.get_unique_id().as_bytes) if session.rank == 0 else None)[0]
        self.communicator = nccl.Communicator.init(
            nranks=session.num_ranks, rank=session.rank, unique_id=nccl.UniqueId.from_bytes(identity)
        )
        self.capacity_rows = max(shape.demand_rows(), shape.num_tokens)
        self.group = ep.Group.create(self.communicator, self._group_config(shape))
        self.x = draw_tokens(shape, session.rank, session.device)
        self.y = torch.zeros_like(self.x)
        rows = self._recv(shape, session)
        self._make_handle(shape, session)
        self._make_arguments(shape, session, rows)
        session.meet()

    def _group_config(self, shape: Shape) -> Any:
        ep = self.ep
        return ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=shape.num_experts,
            max_dispatch_tokens_per_rank=shape.num_tokens,
            max_recv_tokens_per_rank=self.capacity_rows,
            max_token_bytes=shape.hidden * 2,
            max_num_sms=SMS_PER_RANK[shape.num_ranks],
            num_topk=shape.num_topk,
            zero_copy=ep.ZeroCopyMode.ON if self.zero_copy else ep.ZeroCopyMode.OFF,
        )

    def _make_handle(self, shape: Shape, session: Session) -> None:
        ep, device = self.ep, session.device
        self.topk_idx = shape.topk_idx(session.rank).to(device)
        self.counts, self.offsets = (
            torch.zeros(shape.num_local_experts, device=device, dtype=torch.int64) for _ in "co"
        )
        self.total = torch.zeros(1, device=device, dtype=torch.int64)
        session.meet()
        self.ids = ep.Tensor(self.topk_idx)
        self.layout = ep.LayoutInfo(
            expert_counters=ep.Tensor(self.counts),
            expert_offsets=ep.Tensor(self.offsets),
            recv_total_counter=ep.Tensor(self.total),
        )
        self.handle = self.group.create_handle(
            ep.Layout.EXPERT_MAJOR,
            self.ids,
            layout_info=self.layout,
            stream=self.stream,
            config=ep.HandleConfig(dispatch_output_per_expert_alignment=shape.alignment),
        )
        session.meet()

    def _make_arguments(self, shape: Shape, session: Session, rows: Any) -> None:
        ep, device = self.ep, session.device
        self.weights = draw_weights(shape, session.rank).to(device)
        self.recv_weights = torch.zeros(self.capacity_rows, device=device)
        self.dispatch_in = ep.DispatchInputs(tokens=ep.Tensor(self.x), topk_weights=ep.Tensor(self.weights))
        self.dispatch_out = ep.DispatchOutputs(tokens=rows, topk_weights=ep.Tensor(self.recv_weights))
        self.combine_in, self.combine_out = ep.CombineInputs(tokens=rows), ep.CombineOutputs(tokens=ep.Tensor(self.y))

    def _recv(self, shape: Shape, session: Session) -> Any:
        sizes = (self.capacity_rows, shape.hidden)
        if not self.zero_copy:
            self.recv = torch.zeros(sizes, device=session.device, dtype=torch.bfloat16)
            return self.ep.Tensor(self.recv)
        from nccl.core.interop.torch import empty

        self.recv = empty(*sizes, dtype=torch.bfloat16, device="cuda").zero_()
        session.meet()
        return self.ep.Tensor(self.recv, window=self.communicator.register_window(self.recv), window_offset=0)

    def route(self) -> None:
        self.handle.update(self.ids, layout_info=self.layout, stream=self.stream)

    def dispatch(self) -> None:
        self.handle.dispatch(self.dispatch_in, self.dispatch_out, stream=self.stream)

    def combine(self) -> None:
        self.handle.combine(self.combine_in, self.combine_out, stream=self.stream)


@dataclass
class Splits:
    """What the torch baseline works out of a routing."""

    token: Tensor
    num_sent: list[int]
    num_received: list[int]
    expert_major: Tensor


class TorchAllToAll:
    """What a user writes without an expert-parallel library."""

    def __init__(self, shape: Shape, session: Session) -> None:
        self.shape, self.device = shape, session.device
        self.x = draw_tokens(shape, session.rank, session.device)
        self.topk_idx = shape.topk_idx(session.rank).to(session.device)

    def route(self) -> None:
        shape, ids = self.shape, self.topk_idx.flatten()
        sent = ids.bincount(minlength=shape.num_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        local = torch.arange(shape.num_local_experts, device=self.device).repeat(shape.num_ranks)
        self.splits = Splits(
            token=ids.argsort(stable=True) // shape.num_topk,
            num_sent=sent.view(shape.num_ranks, -1).sum(1).tolist(),
            num_received=received.view(shape.num_ranks, -1).sum(1).tolist(),
            expert_major=local.repeat_interleave(received).argsort(stable=True),
        )

    def dispatch(self) -> None:
        splits = self.splits
        recv = self.x.new_empty(sum(splits.num_received), self.shape.hidden)
        dist.all_to_all_single(recv, self.x[splits.token], splits.num_received, splits.num_sent)
        self.rows = recv[splits.expert_major]

    def combine(self) -> None:
        splits = self.splits
        back = torch.empty_like(self.rows).index_copy_(0, splits.expert_major, self.rows)
        mine = self.x.new_empty(len(splits.token), self.shape.hidden)
        dist.all_to_all_single(mine, back, splits.num_sent, splits.num_received)
        total = torch.zeros(self.x.shape, device=self.device)
        self.y = total.index_add_(0, splits.token, mine.float()).to(self.x.dtype)


def relative_error(baseline: Baseline, x: Tensor, num_topk: int) -> float:
    """Return how far y is from K * x; in zero-copy mode true for the first combine after a dispatch only."""
    right = num_topk * x.float()
    return float((baseline.y.float() - right).norm() / right.norm())


def measure(baseline: Baseline, shape: Shape, session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time one shape. Collective."""
    for op in (baseline.route, baseline.dispatch, baseline.combine):
        op()
        session.meet()
    error = max(gather(relative_error(baseline, draw_tokens(shape, session.rank, session.device), shape.num_topk)))
    if not error < MAX_ERROR:
        raise SystemExit(f"{options.system}: y is {error} from K * x, more than {MAX_ERROR}")
    times = {
        op.__name__: time_calls(op, options.samples, session)
        for op in (baseline.route, baseline.dispatch, baseline.combine)
    }
    times["step"] = time_steps(baseline, session, options)
    found = {"system": options.system, "shape": str(shape), "times_us": times, "relative_error": error}
    return found | {"versions": versions(session)}


def time_steps(baseline: Baseline, session: Session, options: argparse.Namespace) -> list[float]:
    """Time route + dispatch + combine: captured, but for torch."""

    def step() -> None:
        baseline.route()
        baseline.dispatch()
        baseline.combine()

    if options.system == "torch":
        return time_calls(step, options.samples, session)
    with captured(step, options.repeats, session) as graph:
        return time_replays(graph, options.samples)


def make(system: str, shape: Shape, session: Session) -> Baseline:
    if system == "torch":
        return TorchAllToAll(shape, session)
    return NcclEp(shape, session, zero_copy=system == "nccl_ep_zero_copy")


def main(argv: Sequence[str] | None = None) -> int:
    """Be one rank of one system: measure its shapes, then leave at once, without the libraries' own teardown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=("nccl_ep", "nccl_ep_zero_copy", "torch"))
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(argv)
    session = join(options.device, "nccl" if options.system == "torch" and options.device == "cuda" else "gloo")
    with session.working():
        for shape in options.shapes:
            record = measure(make(options.system, shape, session), shape, session, options)
            if session.rank == 0:
                write_record(options.out, record)
    session.meet()
    sys.stdout.flush()
    os._exit(0)  # no return: it would run destructors that wait for peers


if __name__ == "__main__":
    sys.exit(main())
