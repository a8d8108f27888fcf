"""Ranks of one host, and the arguments that the programs of this folder share."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # of cuBLAS on every stream
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, device_type: str, *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """Call `function(device, *arguments)` on every rank of a process group; return what each of them returns.

    Gloo is enough for epbuf, which needs a group to meet in. NCCL refuses ranks that share a GPU before its 2.30.
    """
    multiprocessing.set_forkserver_preload(["torch._dynamo", "epbuf.capture", "rich.progress"])  # once, not once a rank
    with tempfile.TemporaryDirectory() as folder:
        given = (num_ranks, device_type, backend, Path(folder), function, arguments)
        torch.multiprocessing.start_processes(_be_rank, given, nprocs=num_ranks, start_method="forkserver")
        return [pickle.loads((Path(folder) / f"found{rank}").read_bytes()) for rank in range(num_ranks)]


def _be_rank(
    rank: int, num_ranks: int, device_type: str, backend: str, folder: Path, function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        os.environ.update(SAME_BITS)
        if num_ranks > torch.cuda.device_count():
            os.environ.update(SHARED_GPU)
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    (folder / f"found{rank}").write_bytes(pickle.dumps(function(device, *arguments)))
    dist.destroy_process_group()


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse with --device added, as "cpu" or "cuda"; refuse a GPU that is not there and fewer --steps than one."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if one is there")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: give at least 1")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use cpu or auto")
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    return arguments
