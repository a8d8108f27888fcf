"""pytest fixtures for tests of captured steps; pytest finds them by itself where epbuf is installed.

    def test_step(virtual_ranks):
        results = virtual_ranks(2, one_rank, argument)      # one_rank(rank, group, argument) on two threads

    def test_step_over_shared_memory(rank_processes):
        results = rank_processes(2, one_rank, argument)     # the same on two processes, joined by gloo

`group` is what `Arena.open` takes. Results come in rank order; the first error of any rank is raised, and a rank that
hangs is a failure that says where it stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]
"""`run(num_ranks, function, *args, limit_s=60.0)`."""


@pytest.fixture(scope="session")
def virtual_ranks() -> RunRanks:
    """Run a rank function on one thread of this process per rank."""
    from epbuf.testing.ranks import virtual

    return virtual


@pytest.fixture(scope="session")
def rank_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunRanks]:
    """Run a rank function on up to 4 processes, which live until the session ends or one of them is lost."""
    from epbuf.testing.ranks import Pool

    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool.run
    pool.close()
