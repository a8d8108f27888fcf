"""Many replays with new routings, ranks that drift apart, and streams: results known in exact arithmetic each time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import Results, Tokens, draw_tokens, exact_ops, exact_results, exact_step, num_wrong
from gpus import GpuPool, open_arena, places
from graphed import captured
from routings import base_config

import epbuf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

CYCLES_PER_MS = 1_500_000  # of torch.cuda._sleep, roughly


def _config(num_ranks: int, **changes: object) -> epbuf.EpConfig:
    sizes = {"hidden": 64, "max_tokens_per_rank": 96, "num_topk": 4, "num_experts": 8 * num_ranks}
    return base_config(num_ranks, **(sizes | {"expert_alignment": 16} | changes))


class Graph:
    """One captured exact step over static tokens."""

    def __init__(self, arena: epbuf.Arena, tokens: Tokens) -> None:
        self.tokens = tokens
        self.graph, self.outputs = captured(lambda: exact_step(arena, tokens))

    def run(self, tokens: Tokens) -> Results:
        self.tokens.copy_(tokens)
        for output in self.outputs:
            output.fill_(99)
        self.graph.replay()
        return self.outputs

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self.outputs, *vars(self.tokens).values())]


def _window_addresses(arena: epbuf.Arena) -> list[int]:
    return [arena.region(region.name, region.index).data_ptr() for region in arena.plan.regions]


def _let_memory_settle() -> None:
    """Wait until torch's memory statistics stand still: its backward thread frees what it held a little later."""
    stats = torch.cuda.memory_stats()
    for _ in range(200):
        time.sleep(0.005)
        before, stats = stats, torch.cuda.memory_stats()
        if before == stats:
            return
    raise AssertionError(f"still changes: {sorted(name for name in stats if stats[name] != before.get(name))}")


def _replays(rank: int, group: Any, window: str, num_ranks: int, num_steps: int) -> dict[str, Any]:
    """Alternate a graph of 96 tokens, one of 40, and eager steps of 70, all on one frame and one workspace."""
    generator = torch.Generator("cuda").manual_seed(rank)
    config = _config(num_ranks)
    wrong = torch.zeros(num_steps, dtype=torch.int64, device="cuda")
    changed, num_replays = [], 0

    def draw(num_tokens: int) -> Tokens:
        return draw_tokens(config, num_tokens, generator)

    with open_arena(group, window, config) as arena:
        graphs = {n: Graph(arena, draw(n)) for n in (96, 40)}
        addresses = [*graphs[96].addresses(), *graphs[40].addresses(), *_window_addresses(arena)]
        _let_memory_settle()
        for number in range(num_steps):
            num_tokens = 70 if number % 5 == 2 else 40 if number % 7 in (3, 4) else 96
            tokens = draw(num_tokens)
            if num_tokens == 70:
                got = exact_step(arena, tokens)
                _let_memory_settle()
            else:
                before = torch.cuda.memory_stats()
                got = graphs[num_tokens].run(tokens)
                changed += [number] if torch.cuda.memory_stats() != before else []
                num_replays += 1
            wrong[number] += num_wrong(got, exact_results(config, tokens))
            del got
        arena.check()
        same = addresses == [*graphs[96].addresses(), *graphs[40].addresses(), *_window_addresses(arena)]
        graphs.clear()
        return {
            "wrong": wrong.nonzero().flatten().tolist(), "memory_changed": changed, "replays": num_replays,
            "same_addresses": same, "window_allocations": arena.window_allocations,
        }  # fmt: skip


@places((1, "local"), (2, "nccl"), (4, "torch_symm"), (8, "torch_symm"))
def test_a_thousand_replays(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Rules 12, 16, 20, 21: 1,000 replays with new routings, between eager steps and replays of another T on the same
    frame: every result exact, every address the same, torch's memory statistics still.
    """
    for found in pool.run(num_ranks, _replays, window, num_ranks, 1250, limit_s=150):
        assert found == {
            "wrong": [], "memory_changed": [], "replays": 1000, "same_addresses": True, "window_allocations": 1,
        }  # fmt: skip


def _skew(rank: int, group: Any, window: str, num_ranks: int, num_rounds: int) -> list[int]:
    """Delay one rank of each round by 1 to 50 ms, on the host or on its stream, before any of its ops."""
    plan, generator = random.Random(5), torch.Generator("cuda").manual_seed(rank)
    config = _config(num_ranks)
    wrong = torch.zeros(num_rounds, dtype=torch.int64, device="cuda")
    with open_arena(group, window, config) as arena:
        graph = Graph(arena, draw_tokens(config, 96, generator))
        for number in range(num_rounds):
            late, where, delay_ms = plan.randrange(num_ranks), plan.choice(POINTS), plan.uniform(1, 50)
            on_stream, replays = plan.random() < 0.5, plan.random() < 0.5
            tokens = draw_tokens(config, 96, generator)
            pause = _pause_at(where, delay_ms, on_stream) if rank == late else lambda _: None
            if replays:
                pause(where)
            got = graph.run(tokens) if replays else exact_step(arena, tokens, pause)
            wrong[number] += num_wrong(got, exact_results(config, tokens))
            del got
        arena.check()
        del graph
        return wrong.nonzero().flatten().tolist()


POINTS = ("dispatch", "combine", "backward")


def _pause_at(where: str, delay_ms: float, on_stream: bool) -> Callable[[str], None]:
    def pause(point: str) -> None:
        if point != where:
            return
        if on_stream:
            torch.cuda._sleep(int(delay_ms * CYCLES_PER_MS))
        else:
            time.sleep(delay_ms / 1000)

    return pause


@places((2, "nccl"), (4, "torch_symm"))
def test_one_rank_is_late(pool: GpuPool, num_ranks: int, window: str) -> None:
    """Section 5: 200 rounds in which some rank is late somewhere, in eager calls and between replays, are all exact."""
    assert pool.run(num_ranks, _skew, window, num_ranks, 200, limit_s=90) == [[]] * num_ranks


def _one_frame_two_streams(rank: int, group: Any, window: str, num_ranks: int) -> list[int]:
    """Use one frame on stream A, which is far behind, then at once on B, then on A."""
    generator = torch.Generator("cuda").manual_seed(rank)
    config, streams = _config(num_ranks), [torch.cuda.Stream() for _ in range(2)]
    wrong = []
    with open_arena(group, window, config) as arena:
        for _ in range(5):
            tokens = [draw_tokens(config, 96, generator) for _ in range(3)]
            torch.cuda.synchronize()
            got = []
            for stream, mine in zip((streams[0], streams[1], streams[0]), tokens, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20 * CYCLES_PER_MS if not got else 0)
                    got.append(exact_step(arena, mine))
            torch.cuda.synchronize()
            wrong += [int(num_wrong(g, exact_results(config, t))) for g, t in zip(got, tokens, strict=True)]
        arena.check()
    return wrong


def _one_frame_two_streams_captured(rank: int, group: Any, window: str, num_ranks: int) -> list[int]:
    """The same inside one capture: the second stream forks off before the frame is used, and joins at the end."""
    generator = torch.Generator("cuda").manual_seed(rank)
    config, side = _config(num_ranks), torch.cuda.Stream()
    tokens = [draw_tokens(config, 96, generator) for _ in range(2)]
    wrong = []

    def step() -> list[Results]:
        stream = torch.cuda.current_stream()
        side.wait_stream(stream)
        torch.cuda._sleep(5 * CYCLES_PER_MS)
        first = exact_step(arena, tokens[0])
        with torch.cuda.stream(side):
            second = exact_step(arena, tokens[1])
        stream.wait_stream(side)
        return [first, second]

    with open_arena(group, window, config) as arena:
        graph, got = captured(step)
        for _ in range(5):
            for static in tokens:
                static.copy_(draw_tokens(config, 96, generator))
            graph.replay()
            wrong += [int(num_wrong(g, exact_results(config, t))) for g, t in zip(got, tokens, strict=True)]
        arena.check()
        del graph, got
    return wrong


def _two_frames_two_streams(rank: int, group: Any, window: str, num_ranks: int) -> list[int]:
    """Two microbatches in flight, each with frame, workspace and stream; the last rank's first stream starts late."""
    generator = torch.Generator("cuda").manual_seed(rank)
    config, streams = _config(num_ranks), [torch.cuda.Stream() for _ in range(2)]
    wrong = []
    with open_arena(group, window, config, num_frames=2, num_workspaces=2) as arena:
        for number in range(6):
            tokens = [draw_tokens(config, 96, generator) for _ in range(2)]
            torch.cuda.synchronize()
            if rank == num_ranks - 1:
                with torch.cuda.stream(streams[number % 2]):
                    torch.cuda._sleep(50 * CYCLES_PER_MS)
            ops = [exact_ops(arena, mine, frame) for frame, mine in enumerate(tokens)]
            got: list[Any] = [None, None]
            for _ in range(4):  # dispatch both, combine both, both backwards
                for frame, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        try:
                            next(ops[frame])
                        except StopIteration as end:
                            got[frame] = end.value
            torch.cuda.synchronize()
            arena.check()
            wrong += [int(num_wrong(g, exact_results(config, t))) for g, t in zip(got, tokens, strict=True)]
    return wrong


@places((1, "local"), (2, "torch_symm"), (4, "torch_symm"))
@pytest.mark.parametrize(
    "play",
    [_one_frame_two_streams, _one_frame_two_streams_captured, _two_frames_two_streams],
    ids=lambda play: play.__name__.strip("_"),
)
def test_streams(pool: GpuPool, num_ranks: int, window: str, play: Any) -> None:
    """Rule 15 and section 5: a frame taken on another stream waits for its last use, within one capture or outside any;
    two streams with a frame and a workspace each run side by side.
    """
    for wrong in pool.run(num_ranks, play, window, num_ranks):
        assert wrong and not any(wrong)
