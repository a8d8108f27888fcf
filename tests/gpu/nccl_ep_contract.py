#!/usr/bin/env python3
"""Play the named routings of the contract on engine="nccl_ep", eager and replayed: one rank of torchrun.

    torchrun --nproc-per-node 4 tests/gpu/nccl_ep_contract.py [SHEET ...]

A graph that lives keeps the arena open, and a backward that is replayed without its forward raises. Whole numbers, so
that the library's own order of sums does not show. `slot_map` is unspecified, repeated experts are refused:
epbuf/engines/README.md.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from graphed import GraphedRound  # noqa: E402
from ranks import raised  # noqa: E402
from rounds import assert_round, draw_inputs, expected, play_round, reuse_early  # noqa: E402
from routings import NAMED, Case, named_case, padded_case  # noqa: E402

import epbuf  # noqa: E402
from epbuf.errors import LeaseError  # noqa: E402

WRITTEN = ("recv_tokens", "recv_topk_weights")  # past the last zone, too
BUT = ("slot_map",)
EAGER = [name for name in NAMED if name != "duplicates"]
REPLAYED = (
    "balanced", "some_negative", "one_rank", "different_t", "one_expert", "too_large", "num_tokens_int64",
    "one_row_over", "far_over",
)  # fmt: skip
CASE_LIMIT_S = 60
SMS = 128  # of one GPU: the kernels of all ranks that share it must find room at the same time
SHEETS = ((16, "bf16", 512), (1, "fp32", 64), (128, "fp16", 256))


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors hold NaN: what is not written shows
    num_rounds = 0
    for sheet in [SHEETS[int(number)] for number in sys.argv[1:]] or SHEETS:
        for cases in by_config([case_of(name, num_ranks, *sheet) for name in EAGER]):
            with opened(cases[0].config) as arena:
                num_rounds += play_eager(arena, cases, rank)
        for number, cases in enumerate(by_config([padded_case(case_of(n, num_ranks, *sheet)) for n in REPLAYED])):
            with opened(cases[0].config) as arena:
                num_rounds += play_replayed(arena, cases, rank)
                if number == 0:
                    with or_ends("early reuse"):
                        inputs = draw_inputs(cases[0], rank, True, "cuda")
                        message = reuse_early(arena, inputs.x, inputs.topk_idx, inputs.dy, warmup=1)
                        assert "already been followed by its backward" in message
        dist.barrier()
        if rank == 0:
            print(f"alignment, dtype, hidden {sheet}: the contract held so far in {num_rounds} rounds", flush=True)
    if rank == 0:
        print(f"contract holds in {num_rounds} rounds on {num_ranks} ranks", flush=True)
    dist.barrier()
    os._exit(0)


@contextmanager
def or_ends(what: str) -> Iterator[None]:
    """End the process where a case fails or hangs: peers may wait for this rank, and so might an orderly exit."""
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    try:
        yield
    except BaseException:
        print(f"{what} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()


def case_of(name: str, num_ranks: int, alignment: int, token_dtype: str, hidden: int) -> Case:
    sizes = {"num_experts": 4 * num_ranks, "hidden": hidden, "max_num_sms": SMS // num_ranks}
    return named_case(name, num_ranks, alignment, token_dtype, **sizes)


def by_config(cases: list[Case]) -> list[list[Case]]:
    """Group cases that one arena serves: to open the library takes seconds."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.config.model_dump_json(), []).append(case)
    return list(groups.values())


def play_eager(arena: epbuf.Arena, cases: list[Case], rank: int) -> int:
    for case in cases:
        for weighted in (False, True):
            what = f"{case.name}, eager, {'weighted, ' if weighted else ''}rank {rank}"
            with or_ends(what):
                got = play_round(arena, draw_inputs(case, rank, True, "cuda"), weighted)
                assert_round(got, expected(case, weighted, True)[rank], what, BUT, written=WRITTEN)
    return 2 * len(cases)


def play_replayed(arena: epbuf.Arena, cases: list[Case], rank: int) -> int:
    """Capture the first case, and replay all of them twice."""
    for weighted in (False, True):
        graph = GraphedRound(arena, draw_inputs(cases[0], rank, True, "cuda"), weighted, "thread_local")
        for number, case in enumerate(cases * 2):
            what = f"{case.name}, replay {number}, rank {rank}"
            with or_ends(what):
                got = graph.run(draw_inputs(case, rank, True, "cuda"))
                assert_round(got, expected(case, weighted, True)[rank], what, BUT, written=WRITTEN)
        with or_ends(f"close beside a graph, rank {rank}"):
            assert "graph" in raised(LeaseError, arena.close)
        del graph, got
    return 4 * len(cases)


def opened(config: epbuf.EpConfig) -> epbuf.Arena:
    plan = epbuf.Plan.build(config, engine="nccl_ep")
    return epbuf.Arena.open(plan, dist.group.WORLD, device="cuda", engine="nccl_ep")


if __name__ == "__main__":
    main()
