"""The protocol's executable model: programs that keep the rules pass, the same programs with one rule removed fail."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "csrc"))

import protocol_cases  # noqa: E402
from protocol_cases import BROKEN, LIMITS, NOTICED, SOUND, Case  # noqa: E402

PROTOCOL = (ROOT / "csrc" / "PROTOCOL.md").read_text()


@pytest.mark.parametrize("name", SOUND)
def test_program_that_keeps_the_rules(name: str, record_property: Any) -> None:
    """No interleaving corrupts a row, waits for ever, or takes a rank at another call for a mistake."""
    result = SOUND[name].run()
    record_property("num_states", result.num_states)
    assert result.verdict == "ok", "\n".join(result.trace)
    assert result.num_states > 500  # a program that ends early would pass too easily


@pytest.mark.parametrize("name", NOTICED)
def test_other_call_is_noticed_by_every_rank(name: str) -> None:
    """Ranks that issue different calls all end with an error, in every interleaving."""
    result = NOTICED[name].run()
    assert result.verdict == "noticed", "\n".join(result.trace)


@pytest.mark.parametrize("name", BROKEN | LIMITS)
def test_program_that_breaks_a_rule(name: str) -> None:
    """One rule less, and some interleaving fails in the way that the rule prevents."""
    case: Case = (BROKEN | LIMITS)[name]
    result = case.run()
    assert result.verdict == case.expected != "ok"
    assert case.because and case.because in "\n".join(result.trace[-3:])


def test_table_shows_the_way_into_a_failure() -> None:
    """Given a name, the program prints the verdict and every step that leads to it."""
    first, *trace = protocol_cases.table(["refused-combine-ends-at-ready"])
    assert "dead-lock" in first and "states" in first
    assert trace[0].startswith("rank ") and trace[-1].startswith("stuck: rank ")


def test_document_names_every_case_and_no_other() -> None:
    """PROTOCOL.md points to each case, and what it points to exists."""
    known = SOUND | NOTICED | BROKEN | LIMITS
    named = {name for line in re.findall(r"\[([^]]*)\]", PROTOCOL) for name in re.findall(r"`([a-z0-9-]+)`", line)}
    assert named == set(known)


def test_document_names_tests_that_exist() -> None:
    """Every test that PROTOCOL.md points to is there."""
    named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", PROTOCOL)
    assert named
    for file, function in named:
        assert f"def {function}(" in (ROOT / "tests" / f"{file}.py").read_text(), (file, function)
    for function in re.findall(r"`driver::(test_\w+)`", PROTOCOL):
        assert f"void {function}()" in (ROOT / "tests" / "native" / "driver.cpp").read_text(), function
