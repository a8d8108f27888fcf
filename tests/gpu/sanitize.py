"""Run the kernels under compute-sanitizer, in one process without MPS:   sanitize.py [memcheck] [initcheck] [racecheck]

Small rounds of 2, 4 and 8 virtual ranks, phase by phase, with and without refusals, and of one rank through the public
API, in every format. Results are compared with the reference as well. `sanitize.py kernels` runs just that, without the
sanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from gpus import open_arena
from graphed import VARIANTS, compare_eager
from rounds import draw_inputs
from routings import BY_WIRE, named_case, shape_case
from test_cuda_payloads import on_cpu
from test_cuda_phases import compare_refused, play_all
from test_payloads import PAYLOADS, assert_round, case_of, round_of

TOOLS = ("memcheck", "initcheck", "racecheck")
LIMIT_S = 280


def run_kernels() -> None:
    """Play every kernel in every dtype, with splits of rows, several chunks of tokens, padding and overflow."""
    few = {"hidden": 264, "max_tokens_per_rank": 5}
    play_all(0, None, [
        named_case("duplicates", 2, 16, "bf16", **few, **BY_WIRE),
        named_case("one_row_over", 4, 1, "fp16", **few, **BY_WIRE),
        named_case("num_tokens_int32", 2, 128, "fp32", hidden=72, max_tokens_per_rank=70, **BY_WIRE),
        named_case("duplicates", 2, 16, "bf16", **few),
        named_case("one_row_over", 4, 1, "fp16", **few),
        named_case("too_large", 8, 16, "fp32", **few),
        named_case("num_tokens_int32", 2, 128, "bf16", hidden=72, max_tokens_per_rank=70),
        shape_case("K64", 2),
    ])  # fmt: skip
    for op in ("route", "combine", "dispatch_backward"):
        compare_refused(0, None, op)
    for case in (named_case("some_negative", 1, 16, "bf16", hidden=264), shape_case("T_many_chunks", 1)):
        for variant in VARIANTS:  # an arena for each: under the tools torch keeps a backward's ticket for ever
            with open_arena(None, "local", case.config) as arena:
                compare_eager(arena, 0, [case], [variant])
    for word in PAYLOADS:
        case = case_of(word, num_ranks=1)
        with open_arena(None, "local", case.config) as arena:
            got = round_of(arena, draw_inputs(case, 0, False, "cuda"), True)
        assert_round(case, [{name: on_cpu(value) for name, value in got.items()}], True)
    torch.cuda.synchronize()


def main(tools: list[str]) -> int:
    """Run the tools one after the other; return how many found something."""
    if tools == ["kernels"]:
        run_kernels()
        print("all rounds equal the reference")
        return 0
    num_failed = 0
    for tool in tools or TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--print-limit", "20"]
        found = subprocess.run(
            [*command, sys.executable, __file__, "kernels"],
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        print(f"{tool}: {'clean' if found.returncode == 0 else f'exit status {found.returncode}'}", flush=True)
        num_failed += found.returncode != 0
    return num_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
