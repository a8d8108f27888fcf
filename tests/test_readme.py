"""Every block of README.md runs, and what it says about output and numbers is so."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "epbuf": [sys.executable, "-m", "epbuf.cli"],
}


def commands() -> list[tuple[str, list[str]]]:
    """Return every command of the console blocks with the lines of output that the README shows for it."""
    found: list[tuple[str, list[str]]] = []
    for language, text in BLOCKS:
        for line in text.splitlines() if language == "console" else ():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def lines_of(language: str) -> list[str]:
    return [line for kind, text in BLOCKS if kind == language for line in text.splitlines()]


def test_readme_has_only_blocks_that_run_here() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "console", "sh"}


@pytest.mark.parametrize(("command", "shown"), commands(), ids=[command for command, _ in commands()])
def test_readme_console_block_runs_and_prints_what_it_shows(command: str, shown: list[str], tmp_path: Path) -> None:
    example = PYTHON[0]  # the one that the console blocks call example.py
    (tmp_path / "example.py").write_text(example)
    (tmp_path / "graphs").symlink_to(ROOT / "graphs")
    program, *arguments = shlex.split(command)
    found = subprocess.run(
        [*PROGRAMS[program], *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert found.returncode == 0, found.stderr
    printed = found.stdout.splitlines()
    assert [line for line in shown if line not in printed] == [], found.stdout


@pytest.mark.parametrize("number", range(1, len(PYTHON)))
def test_readme_python_block_runs(number: int) -> None:
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", PYTHON[number]], capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("line", lines_of("sh"))
def test_readme_make_target_exists(line: str) -> None:
    program, target = line.partition("#")[0].split()
    assert program == "make"
    found = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_readme_benchmark_is_that_of_the_dated_file_it_names() -> None:
    (name,) = re.findall(r"\((graphs/bench/results/[\w-]+-cpu\.md)\)", README)
    rows = [line for line in README.splitlines() if re.match(r"\| (ours|theirs): ", line)]
    measured = (ROOT / name).read_text().splitlines()
    assert len(rows) >= 3
    assert [row for row in rows if row not in measured] == []
