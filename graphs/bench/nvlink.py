"""All that several GPUs of one host can show, in one command: what connects them, the GPU tests, the benchmark.

    python graphs/bench/nvlink.py --save

1. The topology, which GPUs address each other, and the rate of a copy between each two of them, one way and while
   another goes the other way: the ceiling.
2. `pytest -m gpu tests/gpu`, as far as there is a GPU for each rank.
3. `launch.py`: both kinds of window, rows directly and once for each rank, bf16 and MXFP8, beside NCCL EP and torch
   all-to-all in the same run. The dated file says what it ran on and the percentage of a copy between peers.

Needs no network. NVLink multicast stays off. One step that fails does not keep the others from running; the status is 1
then.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import launch

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENS = (128, 1024, 4096, 8192)
RANKS = (2, 4, 8)
COPY_BYTES = 2**30


def ranks_of(num_gpus: int) -> list[int]:
    """Return the numbers of ranks that have a GPU each."""
    return [ranks for ranks in RANKS if ranks <= num_gpus]


def test_command(num_gpus: int) -> list[str]:
    """Return how the GPU tests are run: those with more ranks than GPUs are left out."""
    too_many = [f"not R{ranks}" for ranks in RANKS if ranks > num_gpus]
    chosen = ["-k", " and ".join(too_many)] if too_many else []
    return [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", *chosen]


def bench_command(num_gpus: int, budget_s: float, save: Path | None) -> list[str]:
    """Return how the benchmark is run."""
    shapes = ",".join(f"{ranks}x{tokens}" for ranks in ranks_of(num_gpus) for tokens in TOKENS)
    command = [sys.executable, "graphs/bench/launch.py", "--shapes", shapes, "--alignments", "128"]
    command += ["--window", "torch_symm,nccl", "--forms", "direct", "dedup+by_rank", "--payloads", "mxfp8"]
    command += ["--repeats", "10", "--budget", f"{budget_s:g}"]
    return [*command, "--save", str(save)] if save is not None else command


def show_topology() -> int:
    """Let nvidia-smi say what connects the GPUs."""
    if shutil.which("nvidia-smi") is None:
        print("no nvidia-smi: the topology is not known")
        return 0
    return subprocess.run(["nvidia-smi", "topo", "-m"], check=False).returncode


def show_copies() -> int:
    """Print the rate of copies between each two GPUs. In a process of its own: this one never uses CUDA."""
    return subprocess.run([sys.executable, __file__, "--copies"], check=False).returncode


def measure_copies() -> int:
    """Copy between each two GPUs, one way and both ways at once; return 1 if two of them do not address each other."""
    import torch
    from measure import peer_rate

    print("| GPUs | address each other | one way GB/s | each way of both GB/s |\n|---|---|---|---|")
    are_peers = True
    for a, b in itertools.combinations(range(torch.cuda.device_count()), 2):
        is_peer = torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)
        are_peers &= is_peer
        one, both = (peer_rate(COPY_BYTES, ways) / 1e9 for ways in ([(a, b)], [(a, b), (b, a)]))
        print(f"| {a}, {b} | {'yes' if is_peer else 'NO'} | {one:.0f} | {both:.0f} |", flush=True)
    return 0 if are_peers else 1


def run(command: Sequence[str]) -> int:
    """Run a program of the repository with multicast off."""
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, env=os.environ | launch.ENVIRONMENT, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Do all steps; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds for the benchmark")
    parser.add_argument("--save", type=Path, nargs="?", const=launch.HERE / "results", help="folder for the dated file")
    parser.add_argument("--without-tests", action="store_true")
    parser.add_argument("--copies", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.copies:
        return measure_copies()
    num_gpus = launch.num_gpus()
    if num_gpus < min(RANKS):
        parser.error(f"found {num_gpus} GPU(s), this needs {min(RANKS)} of one host; for one: make test-gpu bench-gpu")
    print(launch.describe_machine())
    steps: dict[str, Callable[[], int]] = {"topology": show_topology, "copies": show_copies}
    if not options.without_tests:
        steps["tests"] = lambda: run(test_command(num_gpus))
    steps["benchmark"] = lambda: run(bench_command(num_gpus, options.budget, options.save))
    failed = [name for name, step in steps.items() if step() != 0]
    print(f"FAILED: {', '.join(failed)}" if failed else "all steps ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
