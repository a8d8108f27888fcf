"""engine="nccl_ep" on CUDA: the contract with the refusals of epbuf/engines/README.md, captured and replayed.

Each set of ranks is a run of torchrun with NCCL >= 2.30.4 preloaded, as NCCL EP needs it where ranks share a GPU;
EPBUF_NCCL_LIBRARY names it. NCCL EP compiles its kernels at their first launch, so the first run takes minutes.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from gpus import ENVIRONMENT, mps

HERE = Path(__file__).resolve().parent
LIMIT_S = 540

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="the extra nccl-ep is not installed"),
]


def torchrun(num_ranks: int, program: str, *arguments: str) -> str:
    """Run a program of this folder on ranks that share GPUs; return what it printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--master-port", str(port), str(HERE / program), *arguments]
    preload = {"LD_PRELOAD": os.environ["EPBUF_NCCL_LIBRARY"]} if "EPBUF_NCCL_LIBRARY" in os.environ else {}
    with mps() as shared:
        environment = os.environ | ENVIRONMENT | shared | preload
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert found.returncode == 0, f"{found.stdout[-6000:]}\n{found.stderr[-6000:]}"
    return found.stdout


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_stages(num_ranks: int) -> None:
    """From open to close, one stage after the other; 100 routings through two graphs."""
    out = torchrun(num_ranks, "nccl_ep_smoke.py", "--sms", str(128 // num_ranks))
    for stage in (
        "open",
        "route",
        "dispatch",
        "combine",
        "backward",
        "weighted",
        "captured",
        "empty",
        "repeated",
        "mxfp8",
    ):
        assert f"OK {stage}" in out, out


@pytest.mark.parametrize(("num_ranks", "sheets"), [(4, ["0", "1", "2"]), (8, ["0"])])
def test_contract(num_ranks: int, sheets: list[str]) -> None:
    """The named routings of the contract suite, eager and replayed, against the reference."""
    out = torchrun(num_ranks, "nccl_ep_contract.py", *sheets)
    assert "contract holds" in out, out


@pytest.mark.parametrize("num_ranks", [4])
def test_called_by_hand_on_our_window(num_ranks: int) -> None:
    """engine="external": NCCL EP called by the user on views of our arena, captured, replayed, reused early."""
    out = torchrun(num_ranks, "../../graphs/nccl_ep_external.py")
    assert "refused, as it must be" in out and out.count("right result") >= 4, out
