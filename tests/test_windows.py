"""Windows on the host: names that vanish, permissions, killed processes, groups of every kind."""

from __future__ import annotations

import os
import signal
import stat
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, Ranks, raised, size_of
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf import _C
from epbuf.errors import ConfigError, NativeError
from epbuf.windows import host
from epbuf.windows.group import TorchGroup
from epbuf.windows.torch_symm import AlignedStore, aligned_group

SHARED = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """Give windows a prefix of their own, so that other runs on this machine neither sweep nor show up."""
    word = f"epbuf-{os.getpid()}"
    monkeypatch.setattr(host, "PREFIX", word)
    return word


def names(prefix: str) -> set[str]:
    """Return the names of shared segments under a prefix."""
    return {entry.name for entry in SHARED.iterdir() if entry.name.startswith(prefix)}


def open_arena(group: Any = None, window: str = "host", **config: Any) -> epbuf.Arena:
    return epbuf.Arena.open(epbuf.Plan.build(base_config(size_of(group), **config)), group, window=window)


def step(arena: epbuf.Arena, rank: int) -> Tensor:
    case = named_case("balanced", arena.plan.config.num_ranks)
    with arena.acquire() as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, draw_inputs(case, rank, True).x, case.topk_idx[rank])
        return epbuf.combine(lease, recv.tokens)


def assert_right(ys: list[Tensor]) -> None:
    case = named_case("balanced", len(ys))
    for rank, y in enumerate(ys):
        assert_same(y, draw_inputs(case, rank, True).x * 3, f"y of rank {rank}")


@pytest.mark.parametrize("window", ["host", "local", "auto"])
def test_one_rank_needs_no_group(window: str) -> None:
    """R = 1 works without a process group, in every kind of window."""
    with open_arena(None, window) as arena:
        assert_right([step(arena, 0)])


def test_window_has_no_name_once_open(prefix: str) -> None:
    """Names are removed before open returns, so nothing stays behind whatever happens later."""
    with open_arena() as arena:
        assert names(prefix) == set()
        assert_right([step(arena, 0)])
    assert names(prefix) == set()


def test_two_arenas_do_not_share_memory() -> None:
    """Several arenas live in one process, each with its own window."""
    with open_arena() as one, open_arena() as two:
        first, second = one.acquire(), two.acquire()
        first.recv_tokens.fill_(1)
        second.recv_tokens.fill_(2)
        assert bool((first.recv_tokens == 1).all())


@pytest.fixture
def segment(prefix: str) -> Any:
    made = _C.HostSegment.create(prefix, MIB)
    yield made
    made.unlink()


def test_segment_is_private_to_the_user(segment: Any) -> None:
    """A segment has mode 0600 and belongs to its maker."""
    found = (SHARED / segment.name.lstrip("/")).stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.getuid())


def test_segment_names_are_random(segment: Any, prefix: str) -> None:
    """Two segments of one prefix have different names, both under the prefix."""
    other = _C.HostSegment.create(prefix, MIB)
    other.unlink()
    assert segment.name != other.name
    assert segment.name.lstrip("/").startswith(prefix)


def test_mapping_shows_the_same_bytes(segment: Any) -> None:
    """A second mapping of a segment sees what the first one wrote, after the name is gone too."""
    mapped = _C.HostSegment.map(segment.name, MIB)
    segment.unlink()
    memoryview(segment)[5] = 77
    assert (memoryview(mapped)[5], memoryview(mapped)[6]) == (77, 0)
    assert mapped.address != segment.address


def test_mapping_of_another_size_is_refused(segment: Any) -> None:
    """Mapping more bytes than the segment has would fault later, so it is refused with both sizes."""
    with pytest.raises((NativeError, RuntimeError, OSError), match=f"(?s){2 * MIB}"):
        _C.HostSegment.map(segment.name, 2 * MIB)


def test_mapping_of_a_name_that_is_gone() -> None:
    """The error names the segment."""
    with pytest.raises((NativeError, RuntimeError, OSError), match="epbuf-gone"):
        _C.HostSegment.map("/epbuf-gone", MIB)


def test_sweep_spares_the_living(segment: Any, prefix: str) -> None:
    """A segment whose maker lives holds its lock, and is not swept."""
    _C.HostSegment.sweep(prefix)
    assert segment.name.lstrip("/") in names(prefix)


def test_sweep_spares_other_prefixes(prefix: str) -> None:
    """Only names under the prefix are touched."""
    foreign = SHARED / f"other-{os.getpid()}"
    foreign.touch(0o600)
    try:
        _C.HostSegment.sweep(prefix)
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_window_larger_than_shared_memory(prefix: str) -> None:
    """A window that /dev/shm cannot hold is a NativeError with the size, and leaves no name."""
    room = os.statvfs(SHARED)
    nbytes = 2 * room.f_blocks * room.f_frsize
    with pytest.raises((NativeError, RuntimeError, OSError, MemoryError), match=str(nbytes)):
        _C.HostSegment.create(prefix, nbytes)
    assert names(prefix) == set()


def _killed_in_open(rank: int, group: Any, prefix: str) -> None:
    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    host.PREFIX = prefix
    _C.HostSegment.unlink = die  # type: ignore[method-assign]
    open_arena(group)


def test_process_killed_in_open_leaves_nothing_to_the_next(tmp_path: Path, prefix: str) -> None:
    """A process killed between making its segment and removing the name: the next open removes it."""
    with Ranks(1, tmp_path) as ranks:
        assert [result.died for result in ranks.outcomes(1, _killed_in_open, prefix)] == [True]
    assert len(names(prefix)) == 1, "the process did not die where it should"
    with open_arena():
        assert names(prefix) == set()


def _killed_after_open(rank: int, group: Any, prefix: str) -> None:
    host.PREFIX = prefix
    open_arena(group)
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_killed_after_open_leave_nothing(tmp_path: Path, prefix: str) -> None:
    """Processes killed while they use an arena leave no name in /dev/shm."""
    with Ranks(2, tmp_path) as ranks:
        assert [result.died for result in ranks.outcomes(2, _killed_after_open, prefix)] == [True, True]
    assert names(prefix) == set()


def _over_process_group(rank: int, group: Any, prefix: str) -> tuple[set[str], Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "PREFIX", prefix)
        with open_arena(group) as arena:
            return names(prefix), step(arena, rank)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_processes_share_windows(num_ranks: int, pool: Pool, prefix: str) -> None:
    """Processes of one group map each other's windows; their names are gone when open returns."""
    results = pool.run(num_ranks, _over_process_group, prefix)
    assert [left for left, _ in results] == [set()] * num_ranks
    assert_right([y for _, y in results])


def _over_mesh(rank: int, group: Any, dimensions: int) -> Tensor | str:
    from torch.distributed.device_mesh import init_device_mesh

    if dimensions == 1:
        mesh = init_device_mesh("cpu", (4,))
        with epbuf.Arena.open(epbuf.Plan.build(base_config(4)), mesh) as arena:
            return step(arena, rank)
    mesh = init_device_mesh("cpu", (2, 2))
    return raised(ConfigError, lambda: epbuf.Arena.open(epbuf.Plan.build(base_config(4)), mesh))


def test_device_mesh(pool: Pool) -> None:
    """A one-dimensional DeviceMesh is a group."""
    assert_right(pool.run(4, _over_mesh, 1))


def test_device_mesh_of_two_dimensions(pool: Pool) -> None:
    """A mesh of two dimensions is refused, with the number and the remedy."""
    for message in pool.run(4, _over_mesh, 2):
        assert "2 dimensions" in message and "mesh[" in message


def _two_at_once(rank: int, group: Any) -> list[Tensor]:
    with open_arena(group) as one, open_arena(group) as two:
        return [step(one, rank), step(two, rank), step(one, rank)]


def test_two_arenas_over_one_group(pool: Pool) -> None:
    """Arenas of one group work side by side."""
    for ys in zip(*pool.run(2, _two_at_once), strict=True):
        assert_right(list(ys))


def _meet_late(rank: int, group: Any) -> tuple[int, float]:
    """Come to a barrier late on rank 0, with collectives of tensors forbidden; return how many were tried, and when."""
    wrapped, tried = TorchGroup(group), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", lambda *args, **kwargs: tried.append(args))
        if rank == 0:
            time.sleep(0.2)
        before = time.monotonic()
        wrapped.barrier()
    return len(tried), time.monotonic() if rank else before


def test_barrier_over_gloo_waits_and_exchanges_no_tensor(pool: Pool) -> None:
    """A thread of gloo's must hold no tensor of Python's behind a barrier: a process may end right after it."""
    (tried, came), (also_tried, left) = pool.run(2, _meet_late)
    assert tried == also_tried == 0 and left >= came


def test_ranks_with_other_histories_meet_in_an_aligned_store() -> None:
    """torch numbers exchanges per process: the seventh of one rank is the third of another, and they must meet."""
    base = dist.HashStore()
    held = [AlignedStore(base), AlignedStore(base)]
    first, second = (dist.PrefixStore("p", store) for store in held)  # these call from C++, as torch does
    for round_number in range(2):
        first.set(f"SymmetricMemory/{7 + round_number}/0", f"from 0 in {round_number}")
        second.set(f"SymmetricMemory/{3 + round_number}/1", f"from 1 in {round_number}")
        first.wait([f"SymmetricMemory/{7 + round_number}/1"], timedelta(seconds=1))
        keys = [f"SymmetricMemory/{7 + round_number}/{rank}" for rank in range(2)]
        assert first.multi_get(keys) == [f"from {rank} in {round_number}".encode() for rank in range(2)]
        assert second.get(f"SymmetricMemory/{3 + round_number}/0") == f"from 0 in {round_number}".encode()


def _meet_under_a_name(rank: int, group: Any) -> list[bytes]:
    numbers = range(2 + 3 * rank, 4 + 3 * rank)  # of exchanges; this rank has been in others before
    with aligned_group(TorchGroup(group)) as name:
        registered = dist.distributed_c10d._resolve_process_group(name)
        assert (registered.rank(), registered.size()) == (rank, 2)
        store = dist.PrefixStore("C", registered.get_group_store())
        for number in numbers:
            store.set(f"{number}/{rank}", f"{rank} in {number - numbers[0]}")
        store.barrier(f"{numbers[-1] + 1}", 2, timedelta(seconds=20))
        return [value for number in numbers for value in store.multi_get([f"{number}/0", f"{number}/1"])]


def test_an_aligned_group_is_found_by_its_name(pool: Pool) -> None:
    """Ranks with other histories exchange what they have through the store of the group that torch finds by name."""
    assert pool.run(2, _meet_under_a_name) == [[b"0 in 0", b"1 in 0", b"0 in 1", b"1 in 1"]] * 2
