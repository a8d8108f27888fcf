"""Time dispatch + combine on CPU against what a user writes without an expert-parallel library.

    python graphs/bench/cpu.py                  # prints a table
    python graphs/bench/cpu.py --save           # and writes graphs/bench/results/DATE-cpu.md

Ours: `epbuf.dispatch` and `epbuf.combine`. Theirs: sort, count exchange, index_select + all_to_all_single (gloo) +
index_select each way, into contiguous buffers that are allocated once. Both move the same rows, round by round in turn,
with one thread a rank; both pay for their routing inside dispatch; neither records gradients. Expert outputs are equal
to expert inputs, and no expert is timed. Every round compares the two sides bit for bit.

Combine is timed twice: "staged" takes its rows from an ordinary tensor, as theirs does; "in place" takes them where an
expert kernel that knows epbuf has written them, in `lease.expert_out`. The time of a round is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import epbuf

STEPS = ("theirs: dispatch", "theirs: combine", "ours: dispatch", "ours: combine, staged", "ours: combine, in place")
Result = TypeVar("Result")
Times = dict[str, list[float]]  # microseconds of each round, by step


@dataclass(frozen=True)
class Shape:
    """What is moved: T tokens a rank, H float32 each, to K of E experts on R ranks."""

    num_ranks: int
    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int

    def __str__(self) -> str:
        return (
            f"R={self.num_ranks} T={self.num_tokens} H={self.hidden} K={self.num_topk} E={self.num_experts}, float32, "
            "expert ids uniform without repetition, seed = rank"
        )


@dataclass
class Routing:
    """What their combine needs to remember of their dispatch."""

    order: Tensor
    expert_major: Tensor
    num_sent: list[int]
    num_received: list[int]


class TheirExchange:
    """index_select + all_to_all_single + index_select, with every large buffer allocated once."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        num_slots = shape.num_tokens * shape.num_topk
        self.sent, self.returned, self.by_token = (torch.empty(num_slots, shape.hidden) for _ in range(3))
        self.received, self.rows = (torch.empty(shape.num_ranks * num_slots, shape.hidden) for _ in range(2))
        self.y = torch.empty(shape.num_tokens, shape.hidden)

    def route(self, topk_idx: Tensor) -> Routing:
        shape, num_local = self.shape, self.shape.num_experts // self.shape.num_ranks
        flat = topk_idx.flatten()
        sent = torch.bincount(flat, minlength=shape.num_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        by_rank = received.view(shape.num_ranks, num_local)
        expert = torch.repeat_interleave(torch.arange(num_local).repeat(shape.num_ranks), received)
        return Routing(
            order=flat.argsort(stable=True),
            expert_major=expert.argsort(stable=True),
            num_sent=sent.view(shape.num_ranks, num_local).sum(1).tolist(),
            num_received=by_rank.sum(1).tolist(),
        )

    def dispatch(self, x: Tensor, topk_idx: Tensor) -> tuple[Routing, Tensor]:
        """Return the routing and the received rows, expert-major, by (source rank, token, k) within an expert."""
        routing = self.route(topk_idx)
        num_rows = sum(routing.num_received)
        torch.index_select(x, 0, routing.order // self.shape.num_topk, out=self.sent)
        received = self.received[:num_rows]
        dist.all_to_all_single(received, self.sent, routing.num_received, routing.num_sent)
        return routing, torch.index_select(received, 0, routing.expert_major, out=self.rows[:num_rows])

    def combine(self, routing: Routing, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows."""
        back = self.received[: len(rows)]
        torch.index_select(rows, 0, inverse(routing.expert_major), out=back)
        dist.all_to_all_single(self.returned, back, routing.num_sent, routing.num_received)
        torch.index_select(self.returned, 0, inverse(routing.order), out=self.by_token)
        by_token = self.by_token.view(self.shape.num_tokens, self.shape.num_topk, -1)
        return torch.sum(by_token, 1, out=self.y)


def inverse(permutation: Tensor) -> Tensor:
    found = torch.empty_like(permutation)
    found[permutation] = torch.arange(len(permutation))
    return found


def timed(times: Times, step: str, call: Callable[[], Result]) -> Result:
    """Let all ranks start together, run `call`, and note how long this rank took."""
    dist.barrier()
    start = time.perf_counter()
    result = call()
    times[step].append((time.perf_counter() - start) * 1e6)
    return result


def play_round(arena: epbuf.Arena, theirs: TheirExchange, inputs: tuple[Tensor, Tensor], times: Times) -> None:
    """Time every step once and compare all results."""
    x, topk_idx = inputs
    out = torch.full_like(x, float("nan"))
    routing, rows = timed(times, STEPS[0], lambda: theirs.dispatch(x, topk_idx))
    y = timed(times, STEPS[1], lambda: theirs.combine(routing, rows))
    with arena.acquire() as lease:
        recv = timed(times, STEPS[2], lambda: epbuf.dispatch(lease, x, topk_idx))
        require_equal(recv.tokens[: len(rows)], rows, STEPS[2])
        require_equal(timed(times, STEPS[3], lambda: epbuf.combine(lease, recv.tokens, out=out)), y, STEPS[3])
        del recv
    with arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, topk_idx)
        lease.expert_out[: len(rows)].copy_(recv.tokens[: len(rows)])
        require_equal(timed(times, STEPS[4], lambda: epbuf.combine(lease, lease.expert_out, out=out)), y, STEPS[4])


def require_equal(ours: Tensor, theirs: Tensor, step: str) -> None:
    if not torch.equal(ours, theirs):
        raise SystemExit(f"{step}: our result is not theirs, bit for bit")


def run_rank(rank: int, shape: Shape, num_rounds: int, folder: Path) -> None:
    """Be one rank; leave the times of the slowest rank, round by round, in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=shape.num_ranks)
    config = epbuf.EpConfig(
        num_ranks=shape.num_ranks,
        num_experts=shape.num_experts,
        num_topk=shape.num_topk,
        hidden=shape.hidden,
        max_tokens_per_rank=shape.num_tokens,
        token_dtype="fp32",
    )
    times: Times = {step: [] for step in STEPS}
    torch.manual_seed(rank)
    theirs = TheirExchange(shape)
    with torch.no_grad(), epbuf.Arena.open(epbuf.Plan.build(config), dist.group.WORLD) as arena:
        for index in range(num_rounds + 2):
            if index == 2:  # the first two rounds touch every page and load every kernel
                times = {step: [] for step in STEPS}
            topk_idx = torch.rand(shape.num_tokens, shape.num_experts).topk(shape.num_topk).indices
            play_round(arena, theirs, (torch.randn(shape.num_tokens, shape.hidden), topk_idx), times)
    slowest = torch.tensor([times[step] for step in STEPS], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        (folder / "times").write_bytes(pickle.dumps(dict(zip(STEPS, slowest.tolist(), strict=True))))
    dist.destroy_process_group()


def measure(shape: Shape, num_rounds: int) -> Times:
    """Start the ranks and return the times of each step."""
    multiprocessing.set_forkserver_preload(["epbuf.capture"])  # once, not once a rank
    with tempfile.TemporaryDirectory() as folder:
        arguments = (shape, num_rounds, Path(folder))
        torch.multiprocessing.start_processes(run_rank, arguments, nprocs=shape.num_ranks, start_method="forkserver")
        return pickle.loads((Path(folder) / "times").read_bytes())


def with_sums(times: Times) -> Times:
    """Add, round by round, dispatch + combine of each way."""
    their_dispatch, their_combine, our_dispatch, staged, in_place = (times[step] for step in STEPS)
    sums = {
        "theirs: dispatch + combine": (their_dispatch, their_combine),
        "ours: dispatch + combine, staged": (our_dispatch, staged),
        "ours: dispatch + combine, in place": (our_dispatch, in_place),
    }
    return times | {name: [a + b for a, b in zip(*pair, strict=True)] for name, pair in sums.items()}


def table(times: Times) -> str:
    """Return a Markdown table: median, spread, and how many times faster than theirs."""
    lines = ["| step | median us | 10 % to 90 % | times faster |", "|---|---|---|---|"]
    medians = {step: statistics.median(values) for step, values in times.items()}
    for step, values in times.items():
        side, _, what = step.partition(": ")
        faster = medians[f"theirs: {what.partition(',')[0]}"] / medians[step]
        low, *_, high = statistics.quantiles(values, n=10, method="inclusive")
        ratio = f"{faster:.2f}" if side == "ours" else ""
        lines.append(f"| {step} | {medians[step]:.0f} | {low:.0f} to {high:.0f} | {ratio} |")
    return "\n".join(lines)


def describe_machine() -> str:
    models = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return (
        f"{len(models)} x {models[0] if models else platform.machine()}; Linux {platform.release()}; "
        f"Python {platform.python_version()}; torch {torch.__version__}; gloo over loopback"
    )


def save(text: str, folder: Path) -> Path:
    path = folder / f"{datetime.date.today()}-cpu.md"
    path.write_text(text)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; with --save, write the dated file too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("ranks", 2),
        ("tokens", 2048),
        ("hidden", 1024),
        ("topk", 2),
        ("experts", 16),
        ("rounds", 40),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    results = Path(__file__).parent / "results"
    parser.add_argument("--save", type=Path, nargs="?", const=results, help="write a dated file into this folder")
    arguments = parser.parse_args(argv)
    unusable = [f"--{name} {value}" for name, value in vars(arguments).items() if type(value) is int and value < 1]
    if unusable:
        parser.error(f"{', '.join(unusable)}: give at least 1")
    shape = Shape(arguments.ranks, arguments.tokens, arguments.hidden, arguments.topk, arguments.experts)
    times = with_sums(measure(shape, arguments.rounds))
    command = " ".join(["python graphs/bench/cpu.py", *(sys.argv[1:] if argv is None else argv)])
    paragraphs = (
        "# CPU: dispatch and combine against index_select + gloo all_to_all_single",
        str(shape),
        describe_machine(),
        f"{arguments.rounds} rounds, ours and theirs in turn, slowest rank of each round. Command: `{command}`",
        table(times),
    )
    text = "\n\n".join(paragraphs) + "\n"
    print(text)
    if arguments.save:
        print(f"written: {save(text, arguments.save)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
