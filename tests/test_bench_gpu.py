"""The GPU benchmark's own logic, and the whole of it small on CPU: no MPS, no graphs, our program and one baseline."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epbuf import Plan, reference
from epbuf.accounting import traffic

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "graphs" / "bench"))  # its programs are scripts that import each other

import expected  # noqa: E402
import gpu  # noqa: E402
import launch  # noqa: E402
import measure  # noqa: E402
import nvlink  # noqa: E402
import report  # noqa: E402

SHAPE = measure.Shape.parse("R2-T48-H32-K2-E4-A16")
THREE_OF_FOUR = measure.Shape.parse("R2-T48-H32-K3-E4-A16")
TARGET = "R8-T4096-H7168-K8-E256-A128"
RATES = {"copy": 4.26e12, "write": 4.3e12, "read": 4.55e12}


def record(shape: str, system: str = "epbuf", **times: float) -> dict[str, Any]:
    """Return what a rank program writes, with every sample of an op the same."""
    found: dict[str, Any] = {"system": system, "shape": shape, "times_us": {op: [us] * 3 for op, us in times.items()}}
    found["versions"] = {"torch": "2.0"}
    if system == "epbuf":
        sizes = measure.Shape.parse(shape)
        counts = [[sizes.num_tokens * sizes.num_topk // sizes.num_experts] * sizes.num_experts] * sizes.num_ranks
        moved = traffic(Plan.build(gpu.make_config(sizes)), counts, [sizes.num_tokens] * sizes.num_ranks)
        found |= {"traffic": asdict(moved), "rates": RATES, "num_gpus": 1, "wire_bytes": 10**9}
    return found


def test_rows_by_wire_are_counted_from_the_routing() -> None:
    """R = 2, L = 2, K = 2: the reference's slots say how many tokens have both rows on the other rank, or any."""
    ids = [SHAPE.topk_idx(rank) for rank in range(2)]
    slots = reference.route(gpu.make_config(SHAPE), SHAPE.demand_rows(), ids).slot_map
    on_other = [(reference.slot_ranks(slots[rank]) == 1 - rank).sum(1) for rank in range(2)]
    assert gpu.num_by_wire(SHAPE) == sum(int((count == 2).sum()) for count in on_other) > 0
    assert [gpu.tokens_sent(SHAPE, 1)[rank][1 - rank] for rank in range(2)] == [int((n > 0).sum()) for n in on_other]


@pytest.mark.parametrize(("combine_order", "shape"), [("k", SHAPE), ("by_rank", SHAPE), ("by_rank", THREE_OF_FOUR)])
def test_expected_results_are_those_of_the_reference(combine_order: str, shape: measure.Shape) -> None:
    config, cpu = gpu.make_config(shape, combine_order=combine_order), torch.device("cpu")
    ids = [shape.topk_idx(rank) for rank in range(2)]
    x = [expected.draw_tokens(shape, rank, cpu) for rank in range(2)]
    weights = [expected.draw_weights(shape, rank) for rank in range(2)]
    capacity = shape.demand_rows()
    routing = reference.route(config, capacity, ids)
    recv, recv_weights, written = reference.dispatch(config, capacity, routing, x, weights)
    right = [expected.expect(shape, rank, capacity, cpu, combine_order) for rank in range(2)]
    rows = [each.expert_rows for each in right]
    y = reference.combine(config, routing, rows)
    weighted_y = reference.combine(config, routing, rows, recv_weights)
    assert max(int(offs[-1]) for offs in routing.offs) == capacity
    for rank, each in enumerate(right):
        assert torch.equal(each.offs, routing.offs[rank])
        assert torch.equal(each.recv, recv[rank][written[rank]])
        assert torch.equal(each.recv_weights, recv_weights[rank][written[rank]])
        factors = (1.0 + torch.arange(2 * rank, 2 * rank + 2)) / 4
        zones = factors.repeat_interleave(routing.tokens_per_expert[rank]).unsqueeze(1)
        assert torch.equal(each.expert_rows[: each.num_rows], (each.recv.float() * zones).bfloat16())
        assert torch.equal(each.y, y[rank])
        assert torch.equal(each.weighted_y, weighted_y[rank])


def test_require_equal_ends_the_program_over_one_element() -> None:
    right = torch.ones(4, dtype=torch.bfloat16)
    expected.require_equal("y", right.clone(), right)
    with pytest.raises(SystemExit, match="y differs from plain torch in 1 of 4"):
        expected.require_equal("y", torch.tensor([1.0, 1.0, 1.0078125, 1.0], dtype=torch.bfloat16), right)


def test_shape_is_written_and_read() -> None:
    assert str(measure.Shape.parse(TARGET)) == TARGET
    assert report.sizes_of(TARGET) == {"R": 8, "T": 4096, "H": 7168, "K": 8, "E": 256, "A": 128}


def test_limits_are_those_of_the_memory() -> None:
    """Even counts need no padding: 4.228 GB at 3.64 and at 4.4 TB/s."""
    limits = report.limits_us(record(TARGET))
    assert limits["dispatch"] == pytest.approx(1161.5, abs=0.5)
    assert limits["combine"] == pytest.approx(960.9, abs=0.5)
    assert limits["step"] == limits["dispatch"] + limits["combine"]
    assert limits["combine backward + dispatch backward"] == limits["step"]
    assert limits["combine, staged"] == pytest.approx(limits["combine"] + 2 * 3_758_096_384 / 4.26e6, abs=0.5)


def test_wire_is_the_limit_of_ranks_with_a_gpu_each() -> None:
    two = record(TARGET, dispatch=5000.0) | {"num_gpus": 8, "rates": RATES | {"peer": 0.4e12}}
    two |= {"pull_wire_bytes": 2 * 10**9}
    assert report.limits_us(two)["dispatch"] == pytest.approx(2500)
    assert report.limits_us(two)["combine"] == pytest.approx(5000)
    head, _, *rows = report.table([two]).splitlines()
    assert rows[-1].split(" | ")[4:7] == ["2500", "50", "50"]
    assert "NCCL EP" not in head, "a baseline that was not run has no column"
    assert report.table([]).splitlines() == ["| shape | op |", "|---|---|"]


def test_records_of_one_shape_are_told_apart_by_window_and_form() -> None:
    forms = [("nccl", "direct", "k"), ("nccl", "dedup", "by_rank"), ("torch_symm", "direct", "k")]
    names = ("window", "wire", "combine_order")
    records = [
        record(TARGET, step=100.0 * (1 + i)) | dict(zip(names, form, strict=True)) for i, form in enumerate(forms)
    ]
    rows = [row.split(" | ")[:3] for row in report.table(report.merged(records)).splitlines()[2:]]
    shape = "| R=8, T=4096, A=128"
    assert rows == [
        [f"{shape}, nccl, dedup, by_rank", "step", "200.0"],
        [f"{shape}, nccl", "step", "100.0"],
        [f"{shape}, torch_symm", "step", "300.0"],
    ]


def test_groups_run_every_window_in_every_form() -> None:
    chosen = options(window=["torch_symm", "nccl"], forms=["direct", "dedup+by_rank"], baselines=["torch"])
    jobs = [(j.system, j.num_ranks, j.window, j.form) for j in launch.jobs_of(chosen) if j.num_ranks < 8]
    assert jobs == [
        ("epbuf", 2, "torch_symm", "direct"), ("torch", 2, "auto", "direct"),
        ("epbuf", 2, "torch_symm", "dedup+by_rank"), ("epbuf", 2, "nccl", "direct"),
        ("epbuf", 2, "nccl", "dedup+by_rank"), ("epbuf", 1, "torch_symm", "direct"), ("torch", 1, "auto", "direct"),
    ]  # fmt: skip


def test_table_puts_baselines_beside_the_same_shape() -> None:
    other = TARGET.replace("A128", "A16")
    records = report.merged(
        [
            record(TARGET, step=2200.0, route=20.0),
            record(TARGET, step=2400.0),
            record(other, step=2150.0),
            record(TARGET, "nccl_ep", step=5437.0, route=185.0),
            record(TARGET, "torch", step=31000.0),
        ]
    )
    rows = [row.split(" | ") for row in report.table(records).splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        ["| R=8, T=4096, A=16", "step", "2150.0"],
        ["| R=8, T=4096, A=128", "route", "20.0"],
        ["| R=8, T=4096, A=128", "step", "2300.0"],  # both rounds
    ]
    assert [row[-2:] for row in rows] == [["", "31000 |"], ["185", " |"], ["5437", "31000 |"]]
    assert rows[2][4:6] == ["2122", "92"]


def test_replay_tells_the_time_of_a_body_behind_those_that_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead takes 1 s, a body 3 us, on another rank 9: the mean is 6. Warm-up takes no samples."""
    now = [0.0]

    def takes(seconds: float) -> Callable[[], None]:
        return lambda: now.append(now[-1] + seconds)

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[-1]))
    monkeypatch.setattr(measure, "dist", SimpleNamespace(barrier=lambda: None))
    monkeypatch.setattr(measure, "gather", lambda times: [times, [3 * us for us in times]])
    session = measure.Session(0, 1, torch.device("cpu"), None)
    with measure.captured(takes(3e-6), 4, session, lead=takes(1.0)) as graph:
        assert measure.time_replays(graph, 5) == pytest.approx([6.0] * 5, rel=1e-3)


def test_events_are_nodes_of_the_graph_behind_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what would be captured, in order, and that a time is read when the device has finished."""
    calls: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda *_: calls.append(word)

    @contextmanager
    def capture(*_: Any, **options: Any) -> Any:
        assert options == {"stream": "stream", "capture_error_mode": "thread_local"}
        yield calls.clear()
        assert calls == ["body"] * measure.LEAD_BODIES + ["event", "body", "body", "body", "event"]
        calls.clear()

    def event(*, enable_timing: bool, external: bool) -> Any:
        assert enable_timing and external
        return SimpleNamespace(record=note("event"), elapsed_time=lambda end: note("elapsed")() or 0.006)

    graph = SimpleNamespace(replay=note("replay"), reset=note("reset"))
    cuda = SimpleNamespace(Event=event, CUDAGraph=lambda: graph, graph=capture, synchronize=note("finish"))
    monkeypatch.setattr(measure, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(measure, "dist", SimpleNamespace(barrier=note("barrier")))
    session: Any = measure.Session(0, 1, torch.device("cpu"), "stream")  # type: ignore[arg-type]
    with measure.captured(note("body"), 3, session) as found:
        calls.clear()
        found.replay()
        assert found.last_us() == pytest.approx(2.0)
    assert calls == ["replay", "finish", "elapsed", "finish", "barrier", "reset"]


def options(**changes: Any) -> argparse.Namespace:
    parsed = launch.make_parser().parse_args(["--shapes", "8x4096,8x128,2x4096,1x4096", "--alignments", "16,128"])
    return argparse.Namespace(**vars(parsed) | {"baselines": list(report.BASELINES)} | changes)


def test_groups_run_baselines_around_ours() -> None:
    jobs = launch.jobs_of(options())
    assert [(job.system, job.num_ranks, len(job.shapes)) for job in jobs] == [
        ("nccl_ep_zero_copy", 8, 1), ("nccl_ep_zero_copy", 8, 1), ("epbuf", 8, 4), ("nccl_ep", 8, 1),
        ("nccl_ep", 8, 1), ("torch", 8, 2), ("epbuf", 2, 2), ("nccl_ep", 2, 1), ("torch", 2, 1), ("epbuf", 1, 2),
        ("torch", 1, 1),
    ]  # fmt: skip
    assert jobs[0].shapes == (TARGET,)
    assert {job.system for job in launch.jobs_of(options(baselines=[]))} == {"epbuf"}


def test_baseline_leaves_time_for_ours(tmp_path: Path) -> None:
    run = launch.Run(options(budget=60.0), tmp_path, time.monotonic() + 60.0)
    baseline, ours = launch.Job("torch", 8, (TARGET,)), launch.Job("epbuf", 8, (TARGET,) * 4)
    assert run.limit_s(ours, []) == pytest.approx(60, abs=1)
    assert run.limit_s(baseline, []) == pytest.approx(60, abs=1)
    assert run.limit_s(baseline, [ours]) == pytest.approx(60 - 15 - 4 * 6, abs=1)


ENDINGS = {
    "hangs": ("import time; print('hello'); time.sleep(60)", 1.0, "stopped after its limit of 1 s"),
    "fails": ("import os, sys, time; os.environ['RANK'] == '1' and sys.exit('no'); time.sleep(60)", 30.0, "rank 1 fai"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_group_that_hangs_or_fails_is_ended_and_named(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    program, limit_s, said = ENDINGS[ending]
    group = launch.Group([sys.executable, "-c", program], 2, dict(launch.ENVIRONMENT), tmp_path / "logs")
    begin = time.monotonic()
    assert group.wait(limit_s).startswith(said)
    assert time.monotonic() - begin < 20
    assert all(process.poll() is not None for process in group.processes)
    assert ("rank 1: no" in group.tail()) == (ending == "fails")


def test_whole_benchmark_runs_small_on_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "graphs/bench/launch.py", "--device", "cpu", "--shapes", "2x48", "--alignments", "16"]
    command += ["--hidden", "32", "--topk", "2", "--experts", "4", "--samples", "3", "--repeats", "2"]
    command += ["--payloads", "mxfp8", "nvfp4", "mxfp8:blocked"]  # the last needs zones of whole tiles: left out
    command += ["--forms", "direct", "dedup+by_rank"]
    command += ["--host-calls", "4", "--expert-hidden", "16", "--baselines", "torch", "--baseline-timeout", "100"]
    command += ["--save", str(tmp_path / "results"), "--records", str(tmp_path / "records.jsonl"), "--budget", "200"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [each["system"] for each in records] == [*["epbuf"] * 3, "torch", *["epbuf"] * 3]
    assert {each["shape"] for each in records} == {str(SHAPE)}
    assert set(report.OPS) <= set(records[0]["times_us"])
    assert {len(samples) for samples in records[0]["times_us"].values()} == {3}
    text = next((tmp_path / "results").glob("*-cpu.md")).read_text()
    for form in ("", ", dedup, by_rank"):
        rows = re.findall(rf"^\| R=2, T=48, A=16{form} \| ([^|]+) \| ([\d.-]+) \|", text, re.M)
        assert [op for op, _ in rows] == [*report.OPS, "dispatch, mxfp8", "dispatch, nvfp4"]
    assert "Not measured" not in text
    assert next((tmp_path / "results").glob("*-cpu.png")).read_bytes().startswith(b"\x89PNG")
    assert text.strip().splitlines()[0] in found.stdout


def test_nvlink_needs_two_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_gpus", lambda: 1)
    with pytest.raises(SystemExit):
        nvlink.main([])
    assert "found 1 GPU(s), this needs 2 of one host" in capsys.readouterr().err


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_nvlink_chooses_tests_and_shapes_with_a_gpu_for_each_rank(num_gpus: int) -> None:
    command = [*nvlink.test_command(num_gpus), "--collect-only", "-q"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False).stdout
    assert {ranks for ranks in nvlink.RANKS if f"[R{ranks}-" in listed} == set(nvlink.ranks_of(num_gpus))
    bench = nvlink.bench_command(num_gpus, 60, None)
    chosen = launch.make_parser().parse_args(bench[2:])
    assert chosen.shapes == [(r, t) for r in nvlink.ranks_of(num_gpus) for t in nvlink.TOKENS]
    assert (chosen.window, chosen.forms) == (["torch_symm", "nccl"], ["direct", "dedup+by_rank"])


def test_nvlink_runs_all_steps_and_names_those_that_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(launch, "num_gpus", lambda: 2)
    monkeypatch.setattr(nvlink, "show_topology", lambda: 0)
    monkeypatch.setattr(nvlink, "show_copies", lambda: 1)
    monkeypatch.setattr(nvlink, "run", lambda command: ran.append(command[1]) or int("pytest" in command))
    assert nvlink.main([]) == 1
    assert ran == ["-m", "graphs/bench/launch.py"]
    assert "FAILED: copies, tests" in capsys.readouterr().out
