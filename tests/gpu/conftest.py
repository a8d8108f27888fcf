"""What every test on a GPU uses. They are skipped where no GPU is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpus import GpuPool, mps

from epbuf.windows import nccl


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_nccl = nccl.try_library()[1] if torch.cuda.is_available() else ""
    for item in items:
        if not torch.cuda.is_available() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif no_nccl and "nccl" in item.name:
            item.add_marker(pytest.mark.skip(reason=no_nccl))


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuPool]:
    """Run a rank function on 1, 2, 4 or 8 processes: `pool.run(2, function, *args)`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LD_PRELOAD", raising=False)
        with mps() as environment:
            pool = GpuPool(tmp_path_factory.mktemp("ranks"), environment)
            yield pool
            pool.close()
