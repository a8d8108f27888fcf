"""Run the GPU benchmark: ours and the baselines, in turns, each as R processes with a time limit of its own.

    python graphs/bench/launch.py --budget 300 --save
    python graphs/bench/launch.py --shapes 8x128,8x1024,8x4096 --alignments 128 --baselines none

For each number of ranks the process groups run one after the other: NCCL EP zero-copy, ours, NCCL EP staged, torch.
Ranks that share a GPU run under CUDA MPS, which is started in a private directory for each group and stopped after it.
A group that hangs or fails costs its time limit and nothing else; what it measured before counts. When the budget runs
short, baselines are left out first.

Baselines run at the largest alignment, NCCL EP on 2, 4 and 8 ranks (zero-copy on 4 and 8) if its packages are there.
They need NCCL >= 2.30: EPBUF_NCCL_LIBRARY names it, and is preloaded into them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).resolve().parent
SHAPES = "8x4096,8x128,4x4096,2x4096,1x4096"
FORMS = {
    "direct": ("direct", "k"),
    "dedup": ("dedup", "k"),
    "by_rank": ("direct", "by_rank"),
    "dedup+by_rank": ("dedup", "by_rank"),
}
"""Ways of rows over the wire: `wire` and `combine_order` of the config."""

NCCL_EP_RANKS = {"nccl_ep": (2, 4, 8), "nccl_ep_zero_copy": (4, 8)}

MAX_START_S, MAX_SHAPE_S = 40.0, 20.0  # a group of ours: Python, torch, CUDA and the windows; then each shape
USUAL_START_S, USUAL_SHAPE_S = 15.0, 6.0  # what a baseline leaves for a group of ours that follows
GRACE_S = 5.0  # from the first rank that fails to the end of the others
LEAST_S = 20.0  # no group is started with less
TAIL_LINES = 25

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "MASTER_ADDR": "127.0.0.1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "8",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # Multicast is not measured, and a program that dies with it on can leave a host's GPUs out of order.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


@dataclass(frozen=True)
class Job:
    """One process group: a system, and the shapes that it measures; of ours, on which window and in which form."""

    system: str
    num_ranks: int
    shapes: tuple[str, ...]
    window: str = "auto"
    form: str = "direct"

    def command(self, options: argparse.Namespace, out: Path) -> list[str]:
        """Return what each rank runs."""
        common = ["--shapes", *self.shapes, "--out", str(out), "--device", options.device]
        common += ["--samples", str(options.samples), "--repeats", str(options.repeats)]
        if self.system != "epbuf":
            return [sys.executable, str(HERE / "peers.py"), self.system, *common]
        wire, combine_order = FORMS[self.form]
        ours = ["--window", self.window, "--wire", wire, "--combine-order", combine_order]
        ours += ["--expert-hidden", str(options.expert_hidden)]
        ours += ["--host-calls", str(options.host_calls), "--payloads", *options.payloads]
        return [sys.executable, str(HERE / "gpu.py"), *common, *ours]

    def __str__(self) -> str:
        form = "" if self.system != "epbuf" else f" {self.window} {self.form}"
        return f"{self.system}{form} {' '.join(self.shapes)}"


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return the groups in the order in which they run."""
    jobs = []
    largest = max(options.alignments)
    tokens_by_ranks: dict[int, list[int]] = {}
    for num_ranks, num_tokens in options.shapes:
        tokens_by_ranks.setdefault(num_ranks, []).append(num_tokens)
    for num_ranks, tokens in tokens_by_ranks.items():

        def name(num_tokens: int, alignment: int, num_ranks: int = num_ranks) -> str:
            sizes = (num_ranks, num_tokens, options.hidden, options.topk, options.experts, alignment)
            return "-".join(f"{letter}{size}" for letter, size in zip(report.SIZES, sizes, strict=True))

        aligned = [name(t, largest) for t in tokens]
        shapes = tuple(name(t, a) for t in tokens for a in options.alignments)
        windows = options.window if num_ranks > 1 else options.window[:1]
        first, *others = [
            Job("epbuf", num_ranks, shapes, window, form)
            for window in windows for form in options.forms if num_ranks > 1 or form == options.forms[0]
        ]  # fmt: skip
        theirs = {
            system: [Job(system, num_ranks, (shape,)) for shape in aligned] if num_ranks in ranks else []
            for system, ranks in NCCL_EP_RANKS.items()
        }
        theirs["torch"] = [Job("torch", num_ranks, tuple(aligned))]
        chosen = {system: theirs[system] if system in options.baselines else [] for system in theirs}
        jobs += [*chosen["nccl_ep_zero_copy"], first, *chosen["nccl_ep"], *chosen["torch"], *others]
    return jobs


@dataclass
class Run:
    """What one call of this program has to do, and what came of it."""

    options: argparse.Namespace
    folder: Path
    deadline: float
    records: list[dict[str, Any]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def play(self, jobs: Sequence[Job]) -> None:
        """Run the groups one after the other."""
        for index, job in enumerate(jobs):
            limit_s = self.limit_s(job, jobs[index + 1 :])
            if limit_s < LEAST_S:
                self.troubles.append(f"{job}: the budget of {self.options.budget:g} s is spent")
                continue
            begin = time.monotonic()
            trouble = self.play_one(job, limit_s, f"{index:02d}-{job.system}")
            print(f"{job}: {time.monotonic() - begin:.0f} s{', ' + trouble if trouble else ''}", flush=True)
            if trouble:
                self.troubles.append(f"{job}: {trouble}")

    def limit_s(self, job: Job, to_come: Sequence[Job]) -> float:
        """Return how long a group may run; a baseline leaves time for our groups that follow."""
        left = self.deadline - time.monotonic()
        if job.system == "epbuf":
            return min(left, MAX_START_S + MAX_SHAPE_S * len(job.shapes))
        ours = [len(other.shapes) for other in to_come if other.system == "epbuf"]
        return min(left - sum(USUAL_START_S + USUAL_SHAPE_S * n for n in ours), self.options.baseline_timeout)

    def play_one(self, job: Job, limit_s: float, name: str) -> str:
        """Run a group and take its records; return what went wrong."""
        out = self.folder / f"{name}.jsonl"
        with mps(job.num_ranks, self.folder / f"{name}-mps") as variables:
            environment = {**ENVIRONMENT, **os.environ, **variables, "WORLD_SIZE": str(job.num_ranks)}
            environment["MASTER_PORT"] = str(free_port())
            library = os.environ.get("EPBUF_NCCL_LIBRARY", "")
            if job.system != "epbuf" and library:
                environment["LD_PRELOAD"] = library
            group = Group(job.command(self.options, out), job.num_ranks, environment, self.folder / name)
            try:
                trouble = group.wait(limit_s)
            finally:
                group.end()
        if trouble:
            print(group.tail(), flush=True)
        if out.exists():
            self.records += [json.loads(line) for line in out.read_text().splitlines()]
        return trouble


class Group:
    """R processes of one command, each with a process group of its own, so that all they start ends with them."""

    def __init__(self, command: list[str], num_ranks: int, environment: dict[str, str], logs: Path) -> None:
        logs.mkdir()
        self.logs = [logs / f"rank{rank}.log" for rank in range(num_ranks)]
        self.first_failed: int | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self.logs):
            variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as file:
                process = subprocess.Popen(command, env=variables, stdout=file, stderr=file, preexec_fn=os.setpgrp)
            self.processes.append(process)

    def wait(self, limit_s: float) -> str:
        """Return when all have ended, or ended them after `limit_s` or a failure; say what went wrong."""
        deadline = time.monotonic() + limit_s
        trouble = ""
        while any(process.poll() is None for process in self.processes):
            self._note_failure()
            if self.first_failed is not None and not trouble:
                trouble = self._failure()
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                trouble = trouble or f"stopped after its limit of {limit_s:.0f} s"
                break
            time.sleep(0.05)
        self._note_failure()
        self.end()
        return trouble or (self._failure() if self.first_failed is not None else "")

    def end(self) -> None:
        """End what still runs, first politely."""
        for signal_number, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
            alive = [process for process in self.processes if process.poll() is None]
            for process in alive:
                os.killpg(process.pid, signal_number)
            deadline = time.monotonic() + patience_s
            while any(process.poll() is None for process in alive) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _note_failure(self) -> None:
        if self.first_failed is None:
            self.first_failed = next((rank for rank, process in enumerate(self.processes) if process.poll()), None)

    def _failure(self) -> str:
        assert self.first_failed is not None, "asked after a failure only"
        return f"rank {self.first_failed} failed with exit status {self.processes[self.first_failed].returncode}"

    def tail(self) -> str:
        """Return the end of what rank 0, and the rank that failed first, said."""
        lines = []
        for rank in sorted({0, self.first_failed or 0}):
            said = self.logs[rank].read_text(errors="replace").splitlines()[-TAIL_LINES:]
            lines += [f"  rank {rank}: {line}" for line in said]
        return "\n".join(lines)


@contextmanager
def mps(num_ranks: int, logs: Path) -> Iterator[dict[str, str]]:
    """Start CUDA MPS when ranks share a GPU, give the variables that its clients need, and stop it afterwards.

    Without it the GPU slices time between processes, and a barrier takes milliseconds.
    """
    if num_ranks <= num_gpus() or num_gpus() == 0:
        yield {}
        return
    pipes = tempfile.mkdtemp(prefix="mps.", dir="/tmp")  # short: a socket's path is at most 107 bytes
    logs.mkdir()
    variables = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    environment = os.environ | variables
    nowhere = subprocess.DEVNULL  # the daemon would keep our output open
    start = ["nvidia-cuda-mps-control", "-d"]
    subprocess.run(start, env=environment, stdout=nowhere, stderr=nowhere, check=True, timeout=30)
    try:
        yield variables
    finally:
        stop_mps(environment, Path(pipes))


def stop_mps(environment: dict[str, str], pipes: Path) -> None:
    """Ask our MPS to quit; end its daemon and servers, by their own numbers, if it does not."""
    servers = tell_mps("get_server_list", environment).split()
    number = pipes / "nvidia-cuda-mps-control.pid"
    daemon = number.read_text().split() if number.exists() else []
    tell_mps("quit", environment)
    deadline = time.monotonic() + 5.0
    ours = [int(pid) for pid in (*daemon, *servers) if pid.isdigit()]
    while any(map(is_running, ours)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in filter(is_running, ours):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(pipes, ignore_errors=True)


def is_running(pid: int) -> bool:
    """Tell whether a process exists and has not ended; one that nobody has waited for keeps its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def tell_mps(word: str, environment: dict[str, str]) -> str:
    command = ["nvidia-cuda-mps-control"]
    try:
        return subprocess.run(
            command, input=f"{word}\n", env=environment, capture_output=True, text=True, timeout=15, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        return ""


@cache
def query_gpus(fields: str) -> list[list[str]]:
    """Return the fields of each GPU as nvidia-smi tells them; nothing where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return [line.split(", ") for line in found.stdout.splitlines()] if found.returncode == 0 else []


def num_gpus() -> int:
    return len(query_gpus("name"))


def gpu_word() -> str:
    """Return the last word of the GPU's name, as in h200; cpu without one."""
    gpus = query_gpus("name")
    return gpus[0][0].split()[-1].lower() if gpus else "cpu"


def describe_machine() -> str:
    """Name hardware, driver and versions."""
    gpus = query_gpus("name,memory.total,driver_version")
    hardware = f"{len(gpus)} x {gpus[0][0]} ({gpus[0][1]}), driver {gpus[0][2]}" if gpus else platform.machine()
    packages = ("nccl4py", "nccl-extensions")
    versions = [f"{name} {found}" for name in packages if (found := _version(name))]
    python = f"Python {platform.python_version()}"
    return "; ".join((hardware, f"Linux {platform.release()}", python, *versions))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse_shapes(text: str) -> list[tuple[int, int]]:
    return [(int(ranks), int(tokens)) for ranks, tokens in (item.split("x") for item in text.split(","))]


def parse_baselines(text: str) -> list[str]:
    """Read names of baselines, or none."""
    chosen = [] if text == "none" else text.split(",")
    unknown = set(chosen) - set(report.BASELINES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}: the baselines are {list(report.BASELINES)}, or none")
    return chosen


def has_nccl_ep() -> bool:
    return importlib.util.find_spec("nccl") is not None and importlib.util.find_spec("nccl.ep") is not None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", type=parse_shapes, default=SHAPES, help="RxT, comma-separated")
    add("--alignments", type=lambda text: [int(a) for a in text.split(",")], default="16,128")
    add("--hidden", type=int, default=7168)
    add("--topk", type=int, default=8)
    add("--experts", type=int, default=256)
    add("--window", type=lambda text: text.split(","), default="auto", help="of several ranks: auto, nccl, torch_symm")
    add("--forms", nargs="+", choices=FORMS, default=["direct"], help="wire and combine order; one rank has the first")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, to test this program")
    add("--samples", type=int, default=25, help="replays that are timed")
    add("--repeats", type=int, default=4, help="runs of its chain that a graph holds and times")
    add("--host-calls", type=int, default=200)
    add("--expert-hidden", type=int, default=0, help="also time a step with torch._grouped_mm experts of this size")
    add("--payloads", nargs="*", default=[], help="formats of dispatch to time as well, mxfp8:blocked for one")
    add("--baselines", type=parse_baselines, default=",".join(report.BASELINES), help="comma-separated, or none")
    add("--baseline-timeout", type=float, default=60.0, help="seconds that each group of a baseline may take")
    add("--rounds", type=int, default=1, help="times that everything is run; samples are joined")
    add("--budget", type=float, default=240.0, help="seconds for everything")
    add("--records", type=Path, help="file to write all records into, as lines of JSON")
    add("--logs", type=Path, help="folder to keep the logs of all ranks in")
    results = HERE / "results"
    add("--save", type=Path, nargs="?", const=results, help="write a dated file and a plot into this folder")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print records in short and the table, save."""
    options = make_parser().parse_args(argv)
    deadline = time.monotonic() + options.budget
    folder = Path(tempfile.mkdtemp(prefix="epbuf-bench."))
    run = Run(options, folder, deadline)
    if not has_nccl_ep():
        lacking = [system for system in options.baselines if system in NCCL_EP_RANKS]
        run.troubles += [f"{system}: nccl4py and nccl-extensions are not installed" for system in lacking]
        options.baselines = [system for system in options.baselines if system not in lacking]
    try:
        run.play(jobs_of(options) * options.rounds)
        records = report.merged(run.records)
        for record in records:
            print(json.dumps(report.shortened(record)))
        if any(record["system"] == "epbuf" for record in records):
            command = shlex.join(["python", "graphs/bench/launch.py", *(sys.argv[1:] if argv is None else argv)])
            text = report.text_of(records, describe_machine(), command, run.troubles)
            if options.save:
                print("written:", *report.save(text, records, options.save, gpu_word()))
            print(text)
    finally:
        if options.records:
            options.records.write_text("".join(f"{json.dumps(record)}\n" for record in run.records))
        if options.logs:
            shutil.copytree(folder, options.logs, dirs_exist_ok=True)
        shutil.rmtree(folder)
    ours = {shape for job in jobs_of(options) if job.system == "epbuf" for shape in job.shapes}
    missing = ours - {record["shape"] for record in records if record["system"] == "epbuf"}
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
