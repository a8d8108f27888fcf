"""What does the manager cost? NCCL EP used bare, NCCL EP through epbuf, and epbuf's own engine, in one run.

    torchrun --nproc-per-node 8 graphs/bench/overhead.py --shape R8-T4096-H7168-K8-E256-A128 --out FILE.jsonl

One rank of it. A step is route + dispatch + combine, captured; rows come back as they arrived (our own engine reads
them from where its experts would have written them), so y must be K times x. The three replay in turns. Printed: the
median step, what epbuf adds to the bare library, and host times of an eager step and of a launch of all steps of a
graph. Ranks that share a GPU need CUDA MPS and NCCL_MULTI_RANK_GPU_ENABLE=1, and NCCL >= 2.30.4 preloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from expected import draw_tokens, draw_weights
from measure import LEAD_BODIES, Session, Shape, captured, gather, join, time_replays, versions, write_record
from peers import MAX_ERROR, SMS_PER_RANK, NcclEp
from torch import Tensor

import epbuf
from epbuf.config import round_up

MOST_OVER = 0.03  # of the bare library's step: what the manager may add
HOST_CALLS = 10


@dataclass
class System:
    """One way to run a step, its result, and what was measured."""

    name: str
    step: Callable[[], None]
    y: Callable[[], Tensor]
    micros: list[float] = field(default_factory=list)
    host_eager_us: float = 0.0
    host_launch_us: float = 0.0


class Through:
    """A step through epbuf, on whatever engine."""

    def __init__(self, shape: Shape, session: Session, engine: Any, window: str) -> None:
        config = epbuf.EpConfig(
            num_ranks=shape.num_ranks, num_experts=shape.num_experts, num_topk=shape.num_topk, hidden=shape.hidden,
            max_tokens_per_rank=shape.num_tokens, expert_alignment=shape.alignment, inference_only=True,
            recv_capacity_per_rank=max(shape.demand_rows(), round_up(shape.num_tokens, shape.alignment)),
            max_num_sms=SMS_PER_RANK.get(shape.num_ranks) if engine == "nccl_ep" else None,
        )  # fmt: skip
        plan = epbuf.Plan.build(config, engine="nccl_ep" if engine == "nccl_ep" else "native")
        # Not closed: the process ends without the libraries' own teardown.
        self.arena = epbuf.Arena.open(plan, dist.group.WORLD, device=session.device, window=window, engine=engine)
        self.x, device = draw_tokens(shape, session.rank, session.device), session.device
        self.ids = shape.topk_idx(session.rank).to(device)
        self.weights = draw_weights(shape, session.rank).to(device)
        self.in_place = engine == "native"
        self.y = torch.empty_like(self.x)
        if self.in_place:
            self._fill()

    def _fill(self) -> None:
        """Write what experts would write, once: the steps that follow receive the same rows."""
        with torch.no_grad(), self.arena.acquire() as lease:
            recv = epbuf.dispatch(lease, self.x, self.ids, self.weights)
            lease.expert_out.copy_(recv.tokens)
            epbuf.combine(lease, lease.expert_out)

    def step(self) -> None:
        with torch.no_grad(), self.arena.acquire() as lease:
            recv = epbuf.dispatch(lease, self.x, self.ids, self.weights)
            epbuf.combine(lease, lease.expert_out if self.in_place else recv.tokens, out=self.y)


def systems(shape: Shape, session: Session, window: str) -> list[System]:
    """Make all three. Collective."""
    bare = NcclEp(shape, session, zero_copy=False)
    through = Through(shape, session, "nccl_ep", "auto")
    native = Through(shape, session, "native", window)

    def bare_step() -> None:
        bare.route()
        bare.dispatch()
        bare.combine()

    return [
        System("nccl_ep, bare", bare_step, lambda: bare.y),
        System("nccl_ep through epbuf", through.step, lambda: through.y),
        System("epbuf's own engine", native.step, lambda: native.y),
    ]


def measure(shape: Shape, session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time all three in turns. Collective."""
    right = shape.num_topk * draw_tokens(shape, session.rank, session.device).float()
    found = systems(shape, session, options.window)
    for system in found:
        system.step()
        session.meet()
        error = max(gather(float((system.y().float() - right).norm() / right.norm())))
        if not error < MAX_ERROR:
            raise SystemExit(f"{system.name}: y is {error} from K * x, more than {MAX_ERROR}")
        system.host_eager_us = host_us(system.step, session)
    with ExitStack() as stack:
        graphs = [stack.enter_context(captured(s.step, options.repeats, session)) for s in found]
        for _ in range(options.rounds):
            for system, graph in zip(found, graphs, strict=True):
                system.micros += time_replays(graph, options.samples)
        for system, graph in zip(found, graphs, strict=True):
            system.host_launch_us = host_us(graph.replay, session)
    return {"shape": str(shape), "repeats": options.repeats, "versions": versions(session)} | {
        "systems": [{k: v for k, v in vars(s).items() if k not in ("step", "y")} for s in found]
    }


def host_us(call: Callable[[], None], session: Session) -> float:
    """Time what the host spends in a call, on the slowest rank; the device is drained before each."""
    times = []
    for _ in range(HOST_CALLS):
        session.meet()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    session.meet()
    return max(gather(statistics.median(times)))


def table(record: dict[str, Any]) -> str:
    """Write the result as a table, and whether epbuf stays within MOST_OVER."""
    lines = [f"{record['shape']}, {record['repeats']} steps a graph, behind {LEAD_BODIES} that are not timed", ""]
    lines += [
        "| system | captured step, us | 10 % to 90 % | host, eager step, us | host, launch, us |",
        "|---|---|---|---|---|",
    ]
    medians = []
    for system in record["systems"]:
        samples = sorted(system["micros"])
        medians.append(statistics.median(samples))
        low, high = samples[len(samples) // 10], samples[-1 - len(samples) // 10]
        lines.append(
            f"| {system['name']} | {medians[-1]:.0f} | {low:.0f} to {high:.0f} | {system['host_eager_us']:.0f} | "
            f"{system['host_launch_us']:.0f} |"
        )
    over = medians[1] / medians[0] - 1
    verdict = "within" if over <= MOST_OVER else "more than"
    return "\n".join([*lines, "", f"through epbuf: {over:+.1%} of the bare library ({verdict} {MOST_OVER:.0%})"])


def main(argv: Sequence[str] | None = None) -> int:
    """Be one rank; leave at once, without the libraries' own teardown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape.parse("R8-T4096-H7168-K8-E256-A128"))
    parser.add_argument("--window", default="torch_symm", help="of epbuf's own engine")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(argv)
    session = join(options.device)
    with session.working():
        record = measure(options.shape, session, options)
    if session.rank == 0:
        print(table(record), flush=True)
        if options.out is not None:
            write_record(options.out, record)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
