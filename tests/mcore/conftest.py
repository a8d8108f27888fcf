"""What every test of the Megatron-Core adapter uses. They are skipped where Megatron-Core is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from ranks import Pool

collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py"]

LIMIT_S = 240.0  # the first call on a rank imports Megatron-Core


class MegatronPool(Pool):
    """Processes of their own: what Megatron-Core and its stand-ins change stays in them."""

    def run(self, *arguments, limit_s: float = LIMIT_S):  # type: ignore[no-untyped-def, override]
        return super().run(*arguments, limit_s=limit_s)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Run a rank function on 1, 2 or 4 processes: `pool.run(2, function, *args)`."""
    pool = MegatronPool(tmp_path_factory.mktemp("megatron"))
    yield pool
    pool.close()
