"""Everything in graphs/ runs here, small."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from played_nccl_ep import modules
from ranks import Pool

import epbuf
from graphs import capture_step, capture_tests, microbatches, nccl_ep_external, pipeline, train_loop
from graphs.bench import cpu

ROOT = Path(__file__).resolve().parent.parent
SIZES = train_loop.Sizes()


def test_capture_step_gives_right_results_at_one_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert capture_step.main(["--replays", "4"]) == 0
    addresses = re.findall(r"right result, at (0x[0-9a-f]+)", capsys.readouterr().out)
    assert len(addresses) == 4
    assert len(set(addresses)) == 1


@pytest.mark.parametrize(
    ("main", "arguments", "says"),
    [
        (capture_step.main, ["--replays", "0"], "--replays 0: give at least 1"),
        (microbatches.main, ["--steps", "0"], "--steps 0: give at least 1"),
        (pipeline.main, ["--steps", "-1"], "--steps -1: give at least 1"),
        (train_loop.main, ["--steps", "0"], "--steps 0: give at least 1"),
        (cpu.main, ["--rounds", "0", "--ranks", "-2"], "--ranks -2, --rounds 0: give at least 1"),
        (microbatches.main, ["--device", "cuda"], "torch finds no GPU"),
        (pipeline.main, ["--device", "cuda"], "torch finds no GPU"),
        (train_loop.main, ["--device", "cuda"], "torch finds no GPU"),
        (nccl_ep_external.main, ["--replays", "0"], "--replays 0: give at least 1"),
        (nccl_ep_external.main, [], "epbuf[nccl-ep]"),
    ],
)
def test_arguments_that_measure_nothing_are_refused(
    main: Callable[[list[str]], int], arguments: list[str], says: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(arguments)
    assert says in capsys.readouterr().err


def test_capture_step_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "graphs/capture_step.py"]
    found = subprocess.run([*command, "--replays", "3"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("new routing, right result") == 3  # rank 0 prints; every rank compares


def test_capture_tests_pass_the_safe_step_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert capture_tests.main() == 0
    assert re.findall(r'rule "([\w ]+)"|depends on (rows past)', capsys.readouterr().out) == [
        ("host read", ""),
        ("left behind", ""),
        ("", "rows past"),
    ]


def test_train_loop_holds_all_its_claims_on_four_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_loop.main(["--ranks", "4", "--steps", "24", "--device", "cpu", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "FAILED" not in out
    assert "[True, True, True, True]" in out  # the forced overflow, as all four ranks saw it
    assert "Schedule.sequential(num_layers=2)" in out  # the plan's table
    header = (tmp_path / "loss.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:]) == (960, 600)


def test_train_loop_run_on_two_ranks_reports_what_happened() -> None:
    options = train_loop.Options(ranks=(2,), num_steps=8, validate_every=4)
    plain, run = train_loop.train_plainly(options), train_loop.train_on_ranks(2, options)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(plain.losses), rtol=1e-5, atol=0)
    assert [index for index, _ in run.validation] == [4, 8]
    assert [loss for _, loss in run.validation] == pytest.approx([loss for _, loss in plain.validation], rel=1e-5)
    assert run.forced_flags == run.update_skipped == [True, True]
    assert run.num_other_overflows == run.window_allocations == 0
    assert run.addresses_unchanged


def good_run() -> train_loop.Run:
    losses = [6.0 * 0.99**index for index in range(100)]
    validation = [(50, 4.0), (100, 3.0)]
    return train_loop.Run("test", 1024, losses, 1.0, validation, [True, True], [True, True], addresses_unchanged=True)


FAULTS: dict[str, dict[str, Any]] = {
    "loss falls": {"losses": [6.0] * 100},
    "first 20 losses": {"losses": [6.0 * 0.99**index * (1 + 2e-5 * (index == 19)) for index in range(100)]},
    "last loss": {"losses": [6.0 * 0.99**index * (1 + 0.02 * (index == 99)) for index in range(100)]},
    "validation losses": {"validation": [(50, 4.0), (100, 3.1)]},
    "forced overflow": {"forced_flags": [True, False]},
    "its update": {"update_skipped": [False, True]},
    "no other step": {"num_other_overflows": 1},
    "no window allocation": {"window_allocations": 1},
    "addresses": {"addresses_unchanged": False},
}


@pytest.mark.parametrize("claim", FAULTS)
def test_train_loop_fails_the_claim_that_does_not_hold(claim: str) -> None:
    plain = good_run()
    assert all(holds for _, holds, _ in train_loop.checks(good_run(), plain, 1e-5))
    if claim == "loss falls":  # in both, so that nothing else fails
        plain = dataclasses.replace(plain, **FAULTS[claim])
    results = train_loop.checks(dataclasses.replace(good_run(), **FAULTS[claim]), plain, 1e-5)
    assert [name for name, holds, _ in results if not holds] == [
        name for name, _, _ in results if name.startswith(claim)
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_train_loop_shares_of_a_batch_make_the_global_batch(num_ranks: int) -> None:
    training, held_out = train_loop.load_text()
    tokens, targets = train_loop.global_batch(training, SIZES, 7)
    shares = [train_loop.share_of((tokens, targets), rank, num_ranks, torch.device("cpu")) for rank in range(num_ranks)]
    assert torch.equal(torch.cat([share[0] for share in shares]), tokens)
    assert torch.equal(torch.cat([share[1] for share in shares]), targets)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(tokens, train_loop.global_batch(training, SIZES, 8)[0])
    assert bytes(tokens[0].tolist()) in bytes(training.tolist())
    assert 8.5 < len(training) / len(held_out) < 9.5


def make_model(local: slice) -> train_loop.LanguageModel:
    exchanges = [train_loop.PlainExchange(SIZES.num_experts)] * SIZES.num_layers
    return train_loop.LanguageModel(SIZES, local, exchanges, torch.float32)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_train_loop_ranks_start_from_the_weights_of_the_whole_model(num_ranks: int) -> None:
    whole, num_local = make_model(slice(SIZES.num_experts)), SIZES.num_experts // num_ranks
    parts = [dict(make_model(slice(r * num_local, (r + 1) * num_local)).named_parameters()) for r in range(num_ranks)]
    dense = {id(parameter) for parameter in whole.dense_parameters()}
    for name, parameter in whole.named_parameters():
        if id(parameter) in dense:
            assert all(torch.equal(part[name], parameter) for part in parts), name
        else:
            assert torch.equal(torch.cat([part[name] for part in parts]), parameter), name
    assert len(dense) == len(list(whole.parameters())) - 2 * SIZES.num_layers


def test_train_loop_plain_exchange_equals_every_expert_on_every_token() -> None:
    moe = make_model(slice(SIZES.num_experts)).blocks[0].moe
    x = torch.randn(50, SIZES.hidden)
    topk_weights, topk_idx = torch.rand(50, SIZES.num_experts).topk(SIZES.num_topk)
    y = moe.exchange(x, topk_idx, topk_weights, moe.experts)
    by_expert = torch.stack([F.silu(x @ up) @ down for up, down in zip(moe.up, moe.down, strict=True)], dim=1)
    weights = torch.zeros(50, SIZES.num_experts).scatter(1, topk_idx, topk_weights)
    torch.testing.assert_close(y, (by_expert * weights.unsqueeze(-1)).sum(1), rtol=1e-5, atol=1e-6)


def test_microbatches_overlapped_equal_sequential_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert microbatches.main(["--ranks", "2", "--steps", "6", "--device", "cpu"]) == 0
    found = re.findall(r"rank (\d): loss ([\d.]+) -> ([\d.]+); .* differ by (\S+)", capsys.readouterr().out)
    assert [(rank, difference) for rank, _, _, difference in found] == [("0", "0"), ("1", "0")]
    assert all(float(last) < float(first) for _, first, last, _ in found)


@pytest.mark.parametrize("difference", [1e-9, float("nan")])
def test_microbatches_fails_when_a_rank_differs(
    difference: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(microbatches, "run_ranks", lambda *_: [(2.0, 1.0, 0.0), (2.0, 1.0, difference)])
    assert microbatches.main(["--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_microbatches_sees_a_difference_in_one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    update = microbatches.Trainer.sequential_step

    def sequential_step(trainer: microbatches.Trainer, *batch: torch.Tensor) -> torch.Tensor:
        loss = update(trainer, *batch)
        trainer.weights[2][0, 0, 0] += 1e-6
        return loss

    monkeypatch.setattr(microbatches.Trainer, "sequential_step", sequential_step)
    with epbuf.Arena.open(microbatches.make_plan(1, torch.device("cpu"))) as arena:
        assert microbatches.compare(arena, 1)[2] > 0


def test_microbatches_are_open_together_in_workspaces_of_their_own() -> None:
    order = []
    with epbuf.Arena.open(microbatches.make_plan(1, torch.device("cpu"))) as arena:
        for op in ("dispatch", "combine", "combine_backward", "dispatch_backward"):
            call = getattr(arena.engine, op)

            def spy(place: Any, *rest: Any, op: str = op, call: Any = call, **options: Any) -> Any:
                order.append((op, place.frame, place.workspace))
                return call(place, *rest, **options)

            setattr(arena.engine, op, spy)
        microbatches.Trainer(arena).overlapped_step(*microbatches.draw_batches(arena, 1)[0])
    forward = [("dispatch", 0, 0), ("dispatch", 1, 1), ("combine", 0, 0), ("combine", 1, 1)]
    backward = [("combine_backward", 1, 0), ("combine_backward", 0, 1)]
    assert order == [*forward, *backward, ("dispatch_backward", 1, 0), ("dispatch_backward", 0, 1)]


def test_bench_cpu_runs_and_writes_a_dated_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tokens", "48", "--hidden", "32", "--experts", "4", "--rounds", "4"]
    assert cpu.main([*small, "--save", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    (path,) = tmp_path.glob("*-cpu.md")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-cpu\.md", path.name)
    text = path.read_text()
    assert text in out
    assert "R=2 T=48 H=32 K=2 E=4" in text
    assert f"python graphs/bench/cpu.py {' '.join(small)}" in text
    rows = re.findall(r"^\| (\w+: [^|]+) \| (\d+) \| (\d+) to (\d+) \|", text, re.M)
    assert [row[0] for row in rows[:5]] == list(cpu.STEPS)
    assert len(rows) == 8
    assert all(0 < int(low) <= int(median) <= int(high) for _, median, low, high in rows)


def test_bench_cpu_table_divides_medians() -> None:
    their_dispatch, their_combine, ours, staged, in_place = cpu.STEPS
    times = {their_dispatch: [30.0, 10.0, 20.0], their_combine: [40.0] * 3, ours: [5.0, 4.0, 6.0]}
    times |= {staged: [10.0, 9.0, 30.0], in_place: [8.0] * 3}
    sums = cpu.with_sums(times)
    assert sums["theirs: dispatch + combine"] == [70.0, 50.0, 60.0]
    assert sums["ours: dispatch + combine, staged"] == [15.0, 13.0, 36.0]
    assert statistics.median(sums["ours: dispatch + combine, in place"]) == 13.0
    ratios = re.findall(r"\| ([\d.]+) \|$", cpu.table(sums), re.M)
    assert ratios == ["4.00", "4.00", "5.00", "4.00", "4.62"]  # 20/5, 40/10, 40/8, 60/15, 60/13


def test_bench_cpu_refuses_results_that_differ() -> None:
    with pytest.raises(SystemExit, match="ours: dispatch"):
        cpu.require_equal(torch.ones(2), torch.tensor([1.0, 1.0 + 2**-23]), "ours: dispatch")


@pytest.mark.parametrize("payload", ["mxfp8", "fp8_block128"])
def test_train_loop_with_quantised_rows_stays_close_to_plain_torch(payload: str, tmp_path: Path) -> None:
    """Rows and their gradients travel in 8 bits, experts decode them: every claim of the demo holds all the same."""
    arguments = ["--ranks", "2", "--steps", "24", "--device", "cpu", "--payload", payload, "--out", str(tmp_path)]
    assert train_loop.main(arguments) == 0


def _by_hand(rank: int, group: Any) -> str:
    """Run the example over a library that is played, on all four processes; return what it printed."""
    printed = io.StringIO()
    found = modules(group)
    real = importlib.import_module
    with (
        mock.patch.object(nccl_ep_external, "DEVICE", "cpu"),
        mock.patch.object(nccl_ep_external, "MAX_TOKENS", 6),
        mock.patch.object(nccl_ep_external, "HIDDEN", 16),
        mock.patch.object(importlib, "import_module", lambda name: found.get(name) or real(name)),
        contextlib.redirect_stdout(printed),
    ):
        torch.manual_seed(rank)
        nccl_ep_external.run(3, 16)
    return printed.getvalue()


def test_library_called_by_hand_on_our_window(pool: Pool) -> None:
    """The example's marks, views and offsets are right, and a frame that is used early is refused."""
    out = pool.run(4, _by_hand)[0]
    assert out.count("new routing, right result") == 3
    assert "a frame used early is refused, as it must be" in out
