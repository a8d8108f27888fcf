"""The programs of graphs/ over Megatron-Core run, small."""

from __future__ import annotations

import re
from pathlib import Path

import megatron_moe
import pytest
from bench import moe_layers as bench


@pytest.mark.parametrize("flags", [[], ["--captured"]], ids=["eager", "captured"])
def test_megatron_moe_trains_alike_over_both(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatron_moe.main(["--steps", "20", "--device", "cpu", "--out", str(tmp_path), *flags]) == 0
    assert "largest difference of a loss 0;" in capsys.readouterr().out
    assert (tmp_path / "megatron_moe.png").read_bytes().startswith(b"\x89PNG")


def test_megatron_moe_fails_when_losses_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(megatron_moe, "run_on_ranks", lambda *_: [([2.0, 1.0], [2.0, 1.0 + 1e-7])])
    assert megatron_moe.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_bench_megatron_has_a_row_for_each_variant(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tokens", "32", "--hidden", "32", "--experts", "4", "--topk", "2", "--steps", "2", "--device", "cpu"]
    assert bench.main(small) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^\| ([\w, -]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)% \|$", out, re.M)
    assert [row[0] for row in rows] == ["Megatron-Core, alltoall", "epbuf, eager", "epbuf, captured"]
    assert all(int(row[1]) > 0 and float(row[4]) < 0.01 for row in rows)


def test_bench_megatron_ends_badly_over_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = bench.Result("epbuf, eager", [1.0], 0, 0, difference=2 * bench.TOLERANCE)
    monkeypatch.setattr(bench, "run_on_ranks", lambda *_: [([wrong], "")])
    assert bench.main(["--device", "cpu"]) == 1
