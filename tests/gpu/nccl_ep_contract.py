#!/usr/bin/env python3
"""Play the named routings of the contract on engine="nccl_ep", eager and replayed: one rank of torchrun.

Whole numbers, so that the library's own order of sums does not show. `slot_map` is not written, repeated experts are
refused: epbuf/engines/README.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from graphed import GraphedRound  # noqa: E402
from rounds import assert_round, draw_inputs, expected, play_round  # noqa: E402
from routings import NAMED, named_case, padded_case  # noqa: E402

import epbuf  # noqa: E402

WRITTEN = ("recv_tokens", "recv_topk_weights")  # past the last zone, too
BUT = ("slot_map",)
EAGER = [name for name in NAMED if name != "duplicates"]
REPLAYED = ("balanced", "some_negative", "one_rank", "different_t", "one_expert")
SHEETS = ((16, "bf16", 512), (1, "fp32", 64), (128, "fp16", 256))


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    num_rounds = 0
    for alignment, token_dtype, hidden in SHEETS:
        for name in EAGER:
            case = named_case(name, num_ranks, alignment, token_dtype, num_experts=4 * num_ranks, hidden=hidden)
            with opened(case.config) as arena:
                for weighted in (False, True):
                    got = play_round(arena, draw_inputs(case, rank, True, "cuda"), weighted)
                    assert_round(
                        got,
                        expected(case, weighted, True)[rank],
                        f"{case.name}, eager, rank {rank}",
                        BUT,
                        written=WRITTEN,
                    )
                    num_rounds += 1
        cases = [
            padded_case(named_case(name, num_ranks, alignment, token_dtype, num_experts=4 * num_ranks, hidden=hidden))
            for name in REPLAYED
        ]
        with opened(cases[0].config) as arena:
            for weighted in (False, True):
                graph = GraphedRound(arena, draw_inputs(cases[0], rank, True, "cuda"), weighted, "thread_local")
                for number, case in enumerate(cases * 2):
                    got = graph.run(draw_inputs(case, rank, True, "cuda"))
                    what = f"{case.name}, replay {number}, rank {rank}"
                    assert_round(got, expected(case, weighted, True)[rank], what, BUT, written=WRITTEN)
                    num_rounds += 1
                del graph, got
        dist.barrier()
    if rank == 0:
        print(f"contract holds in {num_rounds} rounds on {num_ranks} ranks", flush=True)
    dist.barrier()
    os._exit(0)


def opened(config: epbuf.EpConfig) -> epbuf.Arena:
    plan = epbuf.Plan.build(config, engine="nccl_ep")
    return epbuf.Arena.open(plan, dist.group.WORLD, device="cuda", engine="nccl_ep")


if __name__ == "__main__":
    main()
