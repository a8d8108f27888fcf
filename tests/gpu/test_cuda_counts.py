"""The two kernels of engine="nccl_ep": this rank's row of counts, and zones from the rows of all ranks.

All ranks are in one process, and rows are gathered by copies. Compared with epbuf/reference.py, and the rows and
records with what plain torch makes of the same ids on CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from routings import NAMED, Case, base_config, named_case
from torch import Tensor

import epbuf
from epbuf import reference
from epbuf.control import ControlWords
from epbuf.engine import NativeEngine
from epbuf.engines.nccl_ep_counts import DeviceCounts, RouteCounts
from epbuf.engines.regions import RegionTensors
from epbuf.windows.own import OwnWindow

pytestmark = pytest.mark.gpu

RECORDS = (
    "num_refusals", "refusing_rank", "refusal", "refused_op", "num_overflows", "max_demand_rows", "max_demand_rank",
    "num_bad_ids", "bad_rank", "bad_token", "bad_topk", "bad_value",
)  # fmt: skip


class Rank:
    """One rank's window, engine and counts, on some device."""

    def __init__(self, plan: epbuf.Plan, rank: int, device: torch.device) -> None:
        group: Any = SimpleNamespace(rank=rank, size=plan.config.num_ranks)
        self.rank, self.device = rank, device
        self.window = OwnWindow(plan.total_bytes, group, device)
        self.engine = NativeEngine(plan, rank, self.window, device)
        self.regions = RegionTensors(plan, self.window)
        self.words = ControlWords(self.regions.one("control"), self.regions.one("frame_counters"))
        streams, native = self.engine._streams, self.engine.native
        if streams is None:
            self.counts = RouteCounts(plan, rank, self.regions, self.words)
        else:
            self.counts = DeviceCounts(plan, rank, self.regions, self.words, native, streams)  # type: ignore[arg-type]
        self.rows = self.regions.one("count_cells")

    def count(self, case: Case, refusal: int) -> Tensor:
        for name in ("count_cells", "nccl_ep_topk_idx", "offs", "counts"):
            self.regions.one(name).fill_(77)
        live = case.live_tokens(self.rank)
        given = case.topk_idx[self.rank]
        ids = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=self.device).copy_(given)
        self.counts.count(0, self.rows[self.rank], ids, None if live is None else live.to(self.device), refusal)
        return self.rows[self.rank].cpu()

    def records(self) -> list[int]:
        control = self.words.mirrored()
        return [int(getattr(control, name)) for name in RECORDS]


def play(case: Case, refusals: dict[int, int]) -> None:
    plan = epbuf.Plan.build(case.config, engine="nccl_ep")
    config, width = case.config, case.config.num_experts + len(epbuf._C.CountColumn) + 1
    ranks = range(config.num_ranks)
    gpu = [Rank(plan, rank, torch.device("cuda", torch.cuda.current_device())) for rank in ranks]
    cpu = [Rank(plan, rank, torch.device("cpu")) for rank in ranks]
    for _ in range(2):  # counters go on, nothing is left of the first time
        gathered = []
        for on_gpu, on_cpu in zip(gpu, cpu, strict=True):
            refusal = refusals.get(on_gpu.rank, 0)
            row, want = on_gpu.count(case, refusal), on_cpu.count(case, refusal)
            assert torch.equal(row[:width], want[:width]), f"row of {case.name}, rank {on_gpu.rank}"
            sent, right = (r.counts.sent_ids(0, len(case.topk_idx[r.rank])).cpu() for r in (on_gpu, on_cpu))
            assert torch.equal(sent, right), f"sent ids of {case.name}, rank {on_gpu.rank}"
            gathered.append(row)
        for on_gpu, on_cpu in zip(gpu, cpu, strict=True):
            for each in (on_gpu, on_cpu):
                each.rows.copy_(torch.stack(gathered))
                each.counts.summarise(0, each.rows, len(case.topk_idx[each.rank]))
            torch.cuda.synchronize()
            assert on_gpu.records() == on_cpu.records(), f"records of {case.name}, rank {on_gpu.rank}"
            for name in ("offs", "counts", "overflow", "frame_counters"):
                found, right = on_gpu.regions.one(name).cpu(), on_cpu.regions.one(name)
                assert torch.equal(found, right), f"{name} of {case.name}, rank {on_gpu.rank}"
            sent, right = (r.counts.sent_ids(0, len(case.topk_idx[r.rank])).cpu() for r in (on_gpu, on_cpu))
            assert torch.equal(sent, right), f"kept ids of {case.name}, rank {on_gpu.rank}"
    if not refusals and not any(rank.records()[0] for rank in gpu):
        compare(case, plan, gpu)
    for rank in gpu:
        rank.engine.close()


def compare(case: Case, plan: epbuf.Plan, gpu: list[Rank]) -> None:
    """Compare zones with the reference, which knows nothing of rows of counts."""
    routing = reference.route(case.config, plan.capacity_rows, case.topk_idx, case.num_tokens)
    for rank in gpu:
        counts = rank.regions.one("counts").cpu()
        want = [routing.tokens_per_expert, routing.valid_tokens_per_expert, routing.total_recv_tokens]
        assert torch.equal(rank.regions.one("offs").cpu(), routing.offs[rank.rank]), case.name
        assert torch.equal(counts, torch.cat([each[rank.rank] for each in want])), case.name
        assert torch.equal(rank.regions.one("overflow").cpu(), routing.overflow), case.name
        sent = rank.counts.sent_ids(0, len(case.topk_idx[rank.rank])).cpu()
        assert torch.equal(sent >= 0, routing.slot_map[rank.rank] >= 0), f"sent is what has a slot: {case.name}"


@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("routing", NAMED)
def test_named_routings(routing: str, num_ranks: int, alignment: int) -> None:
    play(named_case(routing, num_ranks, alignment, num_experts=4 * num_ranks), {})


def test_refusals_name_the_lowest_rank() -> None:
    play(named_case("balanced", 4, 16, num_experts=16), {2: 3, 3: 5})


@pytest.mark.parametrize("num_tokens", [300, 4096])
def test_many_tokens_are_counted_by_several_blocks(num_tokens: int) -> None:
    sizes = {"num_experts": 256, "num_topk": 8, "max_tokens_per_rank": num_tokens, "expert_alignment": 16}
    generator = torch.Generator().manual_seed(num_tokens)
    ids = [torch.rand(num_tokens, 256, generator=generator).topk(8).indices for _ in range(2)]
    ids[1][num_tokens - 1, 3], ids[1][7, 2], ids[0][5] = 256, 999, -1
    for capacity in (None, num_tokens * 4):
        config = base_config(2, recv_capacity_per_rank=capacity, **sizes)
        play(Case(f"T{num_tokens}, C {capacity}", config, ids, [None, num_tokens - 1]), {})
    ids[0][num_tokens - 2, 7] = ids[0][num_tokens - 2, 0]
    play(Case(f"T{num_tokens}, repeated", base_config(2, **sizes), ids, [None, None]), {})


@pytest.mark.parametrize("stride", [0, 3])
@pytest.mark.parametrize(("num_experts", "num_topk"), [(1024, 64), (1024, 1), (4, 2), (12, 5)])
def test_sizes_and_strides(num_experts: int, num_topk: int, stride: int) -> None:
    """More experts than threads, K = 64, one local expert a rank, three; rows of ids that are further apart than K."""
    config = base_config(4, num_experts=num_experts, num_topk=num_topk, max_tokens_per_rank=70, expert_alignment=2)
    generator = torch.Generator().manual_seed(num_experts + num_topk)
    ids = []
    for _ in range(4):
        wide = torch.full((70, num_topk + stride), -5)
        wide[:, :num_topk] = torch.rand(70, num_experts, generator=generator).topk(num_topk).indices
        ids.append(wide[:, :num_topk])
    play(Case(f"E{num_experts}, K{num_topk}, stride {stride}", config, ids, [None, 3, 70, 0]), {})
