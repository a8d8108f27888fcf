"""Ranks on GPUs: their processes, the CUDA MPS daemon where they share one, and arenas on them.

Nothing here may touch CUDA when it is imported: a rank imports this file before it knows where its daemon listens.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import LIMIT_S, Pool

import epbuf

NUM_RANKS = 8
ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "8",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "OMP_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same bits on every stream
}
START_LIMIT_S = 30

# Ends with its standard input: with this process, however that ends.
MPS_KEEPER = """
nvidia-cuda-mps-control -d </dev/null >/dev/null 2>&1 || exit 1
echo ready
read _
echo quit -t 5 | nvidia-cuda-mps-control >/dev/null 2>&1
rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
"""


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Start CUDA MPS of our own where ranks share a GPU; yield what its clients need in their environment."""
    shared = torch.cuda.device_count() < NUM_RANKS
    if not shared or "CUDA_MPS_PIPE_DIRECTORY" in os.environ or shutil.which("nvidia-cuda-mps-control") is None:
        yield {}
        return
    directory = tempfile.mkdtemp(prefix="mps.", dir="/tmp")  # a socket's path is short
    environment = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": f"{directory}/log"}
    os.mkdir(f"{directory}/log")
    keeper = subprocess.Popen(
        ["sh", "-c", MPS_KEEPER], env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert keeper.stdin is not None and keeper.stdout is not None
    try:
        ready, _, _ = select.select([keeper.stdout], [], [], START_LIMIT_S)
        assert ready and keeper.stdout.readline() == b"ready\n", "nvidia-cuda-mps-control -d failed"
        yield environment
    finally:
        keeper.stdin.close()
        keeper.wait(START_LIMIT_S)


class GpuPool(Pool):
    """Eight processes, each on a GPU; all are replaced when one fails, whose context may be lost."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.environment = ENVIRONMENT | environment
        super().__init__(directory, NUM_RANKS, self.environment, use_gpu)

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
        try:
            return super().run(num_ranks, function, *args, limit_s=limit_s)
        except BaseException:
            self.close()
            raise


def use_gpu(rank: int) -> None:
    """Take a GPU of one's own if there are enough of them."""
    torch.cuda.set_device(rank % torch.cuda.device_count())


def open_arena(
    group: Any, window: str, config: epbuf.EpConfig, num_frames: int = 1, num_workspaces: int = 1
) -> epbuf.Arena:
    """Open an arena on this rank's GPU."""
    plan = epbuf.Plan.build(config, schedule=epbuf.Schedule(num_frames, num_workspaces))
    return epbuf.Arena.open(plan, None if window == "local" else group, device="cuda", window=window)


def places(*found: tuple[int, str]) -> Any:
    """Parametrise a test by num_ranks and window."""
    ids = [f"R{num_ranks}-{window}" for num_ranks, window in found]
    return pytest.mark.parametrize(("num_ranks", "window"), found, ids=ids)
