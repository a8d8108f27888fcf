"""One rank of the GPU benchmark of epbuf. `launch.py` starts it on every rank, beside the baselines.

    torchrun --nproc-per-node 8 graphs/bench/gpu.py --shapes R8-T4096-H7168-K8-E256-A128 --out results.jsonl

Each time is of replays of a CUDA graph that holds a chain of ops several times, between two events that are nodes of
the graph. Two runs of the chain ahead of the first event bring the ranks in step. What is in a chain:

    route                      route on two frames in turns: one frame alone may not route twice, because a peer may
                               still read the counts of the first round
    route + dispatch           both, on two frames in turns
    dispatch                   (route + dispatch) - route. It cannot stand alone: only a route opens the next round
    combine                    combine on two workspaces in turns, for the same reason; the rows lie in the window
    combine, staged            the rows lie in an ordinary tensor and are multiplied by their weights while staged
    step                       epbuf.dispatch and epbuf.combine, acquire and release: what a user captures. The producer
                               has written into lease.expert_out
    step, staged               the same with rows of an ordinary tensor, and weights
    step, experts              the same with experts by torch._grouped_mm between (with --expert-hidden)
    combine backward + dispatch backward     gradients of rows and weights lie in the window
    copy of live rows          one copy of the rows below offs[-1], as all ranks do it at once: combine, ahead of it,
                               brings them in step
    dispatch, FORMAT           like dispatch, quantised on the way (with --payloads)

Every result is compared bit for bit with plain torch (expected.py): one eager step before anything is timed, and what
the last replay of each chain left. The capacity is what the fullest rank needs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from expected import draw_tokens, draw_weights, expect, require_equal
from measure import Session, Shape, captured, gather, join, rates, time_replays, versions, write_record
from torch import Tensor

import epbuf
from epbuf.accounting import kept_rows, traffic
from epbuf.config import BLOCKED_TILE_ROWS
from epbuf.engine import Place, Rows
from epbuf.reference import quantise

BOTH = (0, 1)
IN_WINDOW = Rows(in_window=True)
TIMEOUT_S = 20.0
CHECKED_ROWS = 2048  # at a time: the reference works in float64
HOST_CALLS_IN_FLIGHT = 10  # eager steps before the host lets the device catch up: a full launch queue would block it


@dataclass(frozen=True)
class Chain:
    """Ops that are captured together.

    Attributes:
        body: issues them.
        num_ops: ops, or steps, that one call of `body` issues.
        leaves: (result, right value) pairs that hold when it has run.
        lead: what brings the ranks in step ahead of it, where `body` does not.
    """

    body: Callable[[], None]
    num_ops: int = 1
    leaves: tuple[tuple[Tensor, Tensor], ...] = ()
    lead: Callable[[], None] | None = None


class Bench:
    """One arena of two frames and two workspaces, its inputs, and the chains over it."""

    def __init__(self, shape: Shape, session: Session, options: argparse.Namespace) -> None:
        self.shape, self.session = shape, session
        config = make_config(shape, wire=options.wire, combine_order=options.combine_order)
        self.plan = epbuf.Plan.build(config, epbuf.Schedule(num_frames=2, num_workspaces=2))
        group, kind = (dist.group.WORLD, options.window) if shape.num_ranks > 1 else (None, "local")
        self.arena = epbuf.Arena.open(self.plan, group, device=session.device, window=kind)
        self.engine = self.arena.engine
        self.x = draw_tokens(shape, session.rank, session.device)
        self.topk_idx = shape.topk_idx(session.rank).to(session.device)
        self.topk_weights = draw_weights(shape, session.rank).to(session.device)
        self.y, self.dx, self.dw = (torch.empty_like(like) for like in (self.x, self.x, self.topk_weights))
        self.right = expect(shape, session.rank, self.plan.capacity_rows, session.device, options.combine_order)

    def route(self) -> None:
        for frame in BOTH:
            self.engine.route(Place(frame, frame), self.topk_idx, None)

    def route_and_dispatch(self) -> None:
        for frame in BOTH:
            self.engine.route(Place(frame, frame), self.topk_idx, None)
            self.engine.dispatch(Place(frame, frame), self.x, self.topk_weights)

    def combine(self) -> None:
        for workspace in BOTH:
            self.engine.combine(Place(workspace, workspace), IN_WINDOW, None, self.y)

    def combine_staged(self) -> None:
        for workspace in BOTH:
            weights = self.arena.region("recv_topk_weights", workspace)
            self.engine.combine(Place(workspace, workspace), Rows(self.right.expert_rows), weights, self.y)

    def step(self) -> None:
        with torch.no_grad(), self.arena.acquire(0) as lease:
            epbuf.dispatch(lease, self.x, self.topk_idx, self.topk_weights)
            epbuf.combine(lease, lease.expert_out, out=self.y)

    def step_staged(self) -> None:
        with torch.no_grad(), self.arena.acquire(0) as lease:
            recv = epbuf.dispatch(lease, self.x, self.topk_idx, self.topk_weights)
            epbuf.combine(lease, self.right.expert_rows, topk_weights=recv.topk_weights, out=self.y)

    def backward(self) -> None:
        place = Place(0, 0)
        self.engine.combine_backward(place, self.x, expects_open=False)
        self.engine.dispatch_backward(
            place, (IN_WINDOW, IN_WINDOW), self.dx, self.dw, num_tokens=len(self.x), begins_use=False, clears_open=False
        )

    def copy_live_rows(self) -> None:
        num_rows = self.right.num_rows
        self.arena.region("expert_out", 0)[:num_rows].copy_(self.right.expert_rows[:num_rows])

    def step_with_experts(self, expert_hidden: int) -> Callable[[], None]:
        """Return a step whose rows go up to `expert_hidden`, through SiLU, and down again."""
        sizes = (self.shape.num_local_experts, self.shape.hidden, expert_hidden)
        up = torch.randn(sizes, dtype=torch.bfloat16, device=self.session.device) / self.shape.hidden**0.5
        down = torch.randn(sizes, dtype=torch.bfloat16, device=self.session.device).mT.contiguous() / expert_hidden**0.5

        def step() -> None:
            with torch.no_grad(), self.arena.acquire(0) as lease:
                recv = epbuf.dispatch(lease, self.x, self.topk_idx, self.topk_weights)
                hidden = F.silu(torch._grouped_mm(recv.tokens, up, offs=recv.offs))
                rows = torch._grouped_mm(hidden, down, offs=recv.offs)
                epbuf.combine(lease, rows, topk_weights=recv.topk_weights, out=self.y)

        return step

    def chains(self, expert_hidden: int) -> dict[str, Chain]:
        """Return everything that is timed; those that overwrite lease.expert_out come last."""
        right = self.right
        backward = ((self.dx, right.y), (self.dw, self.topk_weights))
        chains = {
            "route": Chain(self.route, 2),
            "route + dispatch": Chain(self.route_and_dispatch, 2),
            "combine": Chain(self.combine, 2, ((self.y, right.y),)),
            "step": Chain(self.step, 1, ((self.y, right.y),)),
            "combine backward + dispatch backward": Chain(self.backward, 1, backward),
            "copy of live rows": Chain(self.copy_live_rows, lead=self.combine),
            "combine, staged": Chain(self.combine_staged, 2, ((self.y, right.weighted_y),)),
            "step, staged": Chain(self.step_staged, 1, ((self.y, right.weighted_y),)),
        }
        if expert_hidden:
            chains["step, experts"] = Chain(self.step_with_experts(expert_hidden))
        return chains

    def check(self) -> None:
        """Run one eager step forward and backward on poisoned memory; leave the right rows in every region."""
        right, num_rows = self.right, self.right.num_rows
        poison(self.arena.region("recv_tokens", 0), self.arena.region("recv_topk_weights", 0), self.y)
        with self.arena.acquire(0) as lease:
            recv = epbuf.dispatch(lease, self.x, self.topk_idx, self.topk_weights)
            require_equal("offs", recv.offs, right.offs)
            require_equal("recv.tokens", recv.tokens[:num_rows], right.recv)
            require_equal("recv.topk_weights", recv.topk_weights[:num_rows], right.recv_weights)
            for workspace in BOTH:
                self.arena.region("expert_out", workspace).copy_(right.expert_rows)
            epbuf.combine(lease, lease.expert_out, out=self.y)
            require_equal("y", self.y, right.y)
            del recv
        self.arena.region("grad_recv_tokens", 0).copy_(right.expert_rows)
        self.arena.region("grad_recv_topk_weights", 0)[:num_rows].copy_(right.recv_weights)
        grad_rows = self.arena.region("grad_expert_out", 0)
        poison(grad_rows, self.dx, self.dw)
        self.backward()
        require_equal("grad_expert_out", grad_rows[:num_rows], right.recv)
        require_equal("dx", self.dx, right.y)
        require_equal("dw", self.dw, self.topk_weights)
        right.recv = right.recv[:0]  # its memory is needed elsewhere
        self.route_and_dispatch()  # both frames have a routing from here on
        self.arena.check()

    def time(self, chain: Chain, num_samples: int, repeats: int) -> list[float]:
        """Return microseconds per op, sample by sample, in the mean of the ranks."""
        with captured(chain.body, repeats, self.session, chain.lead) as graph:
            poison(*(result for result, _ in chain.leaves))
            samples = time_replays(graph, num_samples)
            for result, value in chain.leaves:
                require_equal("what the last replay left", result, value)
        self.arena.check()
        return [sample / chain.num_ops for sample in samples]

    def host_times(self, num_calls: int, mode: AbstractContextManager[Any]) -> dict[str, list[float]]:
        """Return what eager calls cost on the host, in microseconds: no synchronisation is in them."""
        times: dict[str, list[float]] = {"dispatch": [], "combine": []}
        for call in range(num_calls):
            if call % HOST_CALLS_IN_FLIGHT == 0:
                self.session.meet()
            with mode, self.arena.acquire(0) as lease:
                begin = time.perf_counter()
                recv = epbuf.dispatch(lease, self.x, self.topk_idx, self.topk_weights)
                middle = time.perf_counter()
                epbuf.combine(lease, lease.expert_out)
                end = time.perf_counter()
                del recv
            times["dispatch"].append((middle - begin) * 1e6)
            times["combine"].append((end - middle) * 1e6)
        self.session.meet()
        return times

    def moved(self) -> dict[str, Any]:
        """Count what a step moves, by the library's own accounting, over all ranks; and the busiest wires."""
        counts, row_bytes = self.shape.counts().tolist(), self.plan.token_row_bytes
        once, each = tokens_sent(self.shape, 1), kept_rows(self.plan, counts)
        found = traffic(self.plan, counts, [self.shape.num_tokens] * self.shape.num_ranks, num_by_wire(self.shape))
        return {
            "traffic": asdict(found),
            "wire_bytes": busiest(once if self.plan.dedups else each) * row_bytes,
            "pull_wire_bytes": busiest(once if self.plan.adds_by_rank else each) * row_bytes,
        }

    def close(self) -> None:
        """Give the window back and check that nothing went wrong unseen."""
        report = self.arena.report()
        wrong = {name: report[name] for name in ("num_refusals", "num_overflows", "num_bad_ids") if report[name]}
        if wrong:
            raise SystemExit(f"{self.shape}: the arena reports {wrong}")
        self.arena.close()


class PayloadBench:
    """One arena whose rows travel in a quantised format: dispatch only."""

    def __init__(self, shape: Shape, session: Session, options: argparse.Namespace, word: str) -> None:
        name, _, layout = word.partition(":")
        self.payload = epbuf.Payload.model_validate({"format": name, "scale_layout": layout or "compact"})
        self.shape, self.session = shape, session
        config = make_config(shape, dispatch_payload=self.payload, inference_only=True, wire=options.wire)
        self.plan = epbuf.Plan.build(config, epbuf.Schedule(num_frames=2, num_workspaces=2))
        group, kind = (dist.group.WORLD, options.window) if shape.num_ranks > 1 else (None, "local")
        self.arena = epbuf.Arena.open(self.plan, group, device=session.device, window=kind)
        self.x = draw_tokens(shape, session.rank, session.device)
        self.topk_idx = shape.topk_idx(session.rank).to(session.device)
        self.topk_weights = draw_weights(shape, session.rank).to(session.device)

    def route_and_dispatch(self) -> None:
        for frame in BOTH:
            self.arena.engine.route(Place(frame, frame), self.topk_idx, None)
            self.arena.engine.dispatch(Place(frame, frame), self.x, self.topk_weights)

    def check(self) -> None:
        """Compare what the last dispatch left, to the bit, with the reference's encoding of the rows of plain torch."""
        if self.payload.scale_layout == "blocked":
            return  # the bytes are those of the compact layout in another order, which the tests compare
        rows = expect(self.shape, self.session.rank, self.plan.capacity_rows, self.session.device).recv
        regions = [self.arena.region(name, 1) for name in ("recv_tokens", "recv_scales")]
        for begin in range(0, len(rows), CHECKED_ROWS):
            part = rows[begin : begin + CHECKED_ROWS]
            is_padding = part.eq(0).all(1, keepdim=True)  # scale 0 there; the reference encodes rows, not padding
            right = quantise(self.payload, part)
            for region, want in zip(regions, (right.data, right.scales), strict=False):
                ours = region[begin : begin + len(part), : want.shape[1]].view(want.dtype)
                require_equal(f"{self.payload.format} rows", ours, want.masked_fill(is_padding, 0))

    def time(self, num_samples: int, repeats: int) -> list[float]:
        """Return microseconds of route and dispatch, sample by sample, in the mean of the ranks."""
        with captured(self.route_and_dispatch, repeats, self.session) as graph:
            samples = time_replays(graph, num_samples)
        self.check()
        self.arena.check()
        return [sample / len(BOTH) for sample in samples]


def measure_payload(
    shape: Shape, session: Session, options: argparse.Namespace, word: str, route: list[float]
) -> dict[str, Any]:  # fmt: skip
    """Time dispatch in one format; `route` are the times to take off. Collective."""
    bench = PayloadBench(shape, session, options, word)
    both = bench.time(options.samples, options.repeats)
    counts, num_tokens = shape.counts().tolist(), [shape.num_tokens] * shape.num_ranks
    pushed = asdict(traffic(bench.plan, counts, num_tokens, num_by_wire(shape)).dispatch)
    form = form_of(bench.arena, options)
    bench.arena.close()
    return {
        "system": "epbuf",
        "shape": str(shape),
        **form,
        "times_us": {f"dispatch, {word}": without_route(both, route)},
        "payloads": {word: pushed},
        "versions": versions(session),
    }


def form_of(arena: epbuf.Arena, options: argparse.Namespace) -> dict[str, str]:
    """Say what tells records of one shape apart."""
    wire = "dedup" if arena.plan.dedups else "direct"
    return {"window": arena.window.kind, "wire": wire, "combine_order": options.combine_order}


def fits(word: str, shape: Shape) -> bool:
    """Tell whether zones hold whole tiles of blocked scales."""
    return not word.endswith(":blocked") or shape.alignment % BLOCKED_TILE_ROWS == 0


def make_config(shape: Shape, **changes: Any) -> epbuf.EpConfig:
    """Return what an arena of a shape is planned from: the capacity is what the fullest rank needs."""
    return epbuf.EpConfig(
        num_ranks=shape.num_ranks,
        num_experts=shape.num_experts,
        num_topk=shape.num_topk,
        hidden=shape.hidden,
        max_tokens_per_rank=shape.num_tokens,
        recv_capacity_per_rank=shape.demand_rows(),
        expert_alignment=shape.alignment,
        timeout_s=TIMEOUT_S,
        **changes,
    )


def tokens_sent(shape: Shape, num_rows: int) -> list[list[int]]:
    """Count the tokens of each rank that have `num_rows` rows or more on each rank; none is dropped."""
    ranks = range(shape.num_ranks)
    rank_of_row = [shape.topk_idx(source) // shape.num_local_experts for source in ranks]
    return [[int(((rows == rank).sum(1) >= num_rows).sum()) for rank in ranks] for rows in rank_of_row]


def busiest(sent: Sequence[Sequence[int]]) -> int:
    """Return the most rows that any rank sends to the others, or gets from them."""
    ranks = range(len(sent))
    return max(max(sum(sent[a][b] for b in ranks if b != a), sum(sent[b][a] for b in ranks if b != a)) for a in ranks)


def num_by_wire(shape: Shape) -> int:
    """Count how often a token has several rows on a rank that is not its own."""
    sent = tokens_sent(shape, 2)
    return sum(sum(row) for row in sent) - sum(sent[rank][rank] for rank in range(shape.num_ranks))


def poison(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan)


def without_route(both: list[float], route: list[float]) -> list[float]:
    """Return what dispatch takes: samples of both, less the median of route."""
    return [sample - statistics.median(route) for sample in both]


def measure(shape: Shape, session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """Check and time one shape. Collective."""
    bench = Bench(shape, session, options)
    bench.check()
    chains = bench.chains(options.expert_hidden)
    times = {name: bench.time(chain, options.samples, options.repeats) for name, chain in chains.items()}
    times["dispatch"] = without_route(times["route + dispatch"], times["route"])
    modes = {"no_grad": torch.no_grad(), "grad": nullcontext()}
    host = {name: gather(bench.host_times(options.host_calls, mode)) for name, mode in modes.items()}
    record = {
        "system": "epbuf",
        "shape": str(shape),
        "times_us": times,
        "host_us": {name: host_medians(per_rank) for name, per_rank in host.items()},
        "window_reason": bench.arena.window_reason,
        "window_bytes": bench.plan.total_bytes,
        "capacity_rows": bench.plan.capacity_rows,
        **form_of(bench.arena, options),
        "num_gpus": session.num_gpus,
        "versions": versions(session),
        **bench.moved(),
    }
    bench.close()
    return record


def host_medians(per_rank: list[dict[str, list[float]]]) -> dict[str, float]:
    """Return, by op, the median of the slowest rank."""
    return {op: max(statistics.median(times[op]) for times in per_rank) for op in per_rank[0]}


def give_memory_back(session: Session) -> str:
    """Leave the next arena all the memory there is; say how much."""
    gc.collect()
    if session.stream is None:
        return ""
    torch.cuda.empty_cache()
    session.meet()
    return f", {torch.cuda.mem_get_info(session.device)[0] / 2**30:.1f} GiB free after it"


def main(argv: Sequence[str] | None = None) -> int:
    """Be one rank: measure every shape in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, required=True, help="R..-T..-H..-K..-E..-A..")
    parser.add_argument("--out", type=Path, required=True, help="file that rank 0 appends a line of JSON per shape to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--window", default="auto", help="of several ranks; one rank takes local")
    parser.add_argument("--wire", choices=("direct", "dedup", "auto"), default="direct")
    parser.add_argument("--combine-order", choices=("k", "by_rank"), default="k")
    parser.add_argument("--samples", type=int, default=25, help="replays that are timed")
    parser.add_argument("--repeats", type=int, default=4, help="runs of its chain that a graph holds and times")
    parser.add_argument("--host-calls", type=int, default=200)
    parser.add_argument("--payloads", nargs="*", default=[], help="formats of dispatch to time, mxfp8 or mxfp8:blocked")
    parser.add_argument("--expert-hidden", type=int, default=0, help="also time a step with experts of this size")
    options = parser.parse_args(argv)
    session = join(options.device)
    with session.working():
        measured_rates = rates(session, 2**31 if options.device == "cuda" else 2**22)
        give_memory_back(session)
        for shape in options.shapes:
            begin = time.perf_counter()
            record = measure(shape, session, options)
            memory = give_memory_back(session)
            if session.rank == 0:
                write_record(options.out, record | {"rates": measured_rates})
            for word in (word for word in options.payloads if fits(word, shape)):
                one = measure_payload(shape, session, options, word, record["times_us"]["route"])
                memory = give_memory_back(session)
                if session.rank == 0:
                    write_record(options.out, one)
            print(f"{shape}: {time.perf_counter() - begin:.1f} s{memory}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
