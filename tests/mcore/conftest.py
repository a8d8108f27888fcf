"""What every test of the Megatron-Core adapter uses. They are skipped where Megatron-Core is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from importing import import_megatron
from ranks import Pool

collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py"]

IMPORT_LIMIT_S = 240.0  # on a loaded machine


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Run a rank function on 1, 2 or 4 processes: `pool.run(2, function, *args)`.

    They are not those of other tests: what Megatron-Core and its stand-ins change stays in them.
    """
    pool = Pool(tmp_path_factory.mktemp("megatron"))
    pool.run(4, import_megatron, limit_s=IMPORT_LIMIT_S)
    yield pool
    pool.close()
