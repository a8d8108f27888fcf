"""Fixtures that every test file uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import routings
import torch
from ranks import Pool, virtual
from routings import in_form

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "graphs")]  # the programs there are scripts that import each other

torch.set_num_threads(1)  # ranks are threads or processes here; more would only disturb each other


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Run a rank function on 1, 2 or 4 processes: `pool.run(2, function, *args)`."""
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(params=["virtual", "processes"])
def spread(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Run a rank function both ways: on threads of this process and on processes."""
    if request.param == "virtual":
        return virtual
    runner: Pool = request.getfixturevalue("pool")
    fields = routings.form
    return lambda num_ranks, run, *args, **limit: runner.run(num_ranks, in_form, fields, run, *args, **limit)


@pytest.fixture(params=["direct", "by_wire"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test both ways: each row crosses on its own, and a token once for each rank, there and back."""
    if request.param == "by_wire":
        monkeypatch.setattr(routings, "form", routings.BY_WIRE)
