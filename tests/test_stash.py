"""The stash: pages that the frames of a rank share. Results are compared with those of rows that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from ranks import raised, virtual
from routings import base_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import epbuf
from epbuf.config import EpConfig, Payload
from epbuf.errors import CapacityError, ConfigError, LeaseError
from epbuf.ops import ROUTE
from epbuf.plan import STASH_PAGE_ROWS
from epbuf.schedule import Schedule

NUM_TOKENS = 200  # some 600 rows a rank: several pages each
MIXED = ("stash", "keep", "recompute")


def config_of(num_ranks: int, **changes: Any) -> EpConfig:
    return base_config(num_ranks, **{"max_tokens_per_rank": NUM_TOKENS, "token_dtype": "fp32", **changes})


def open_arena(
    group: Any, config: EpConfig, policy: Any, schedule: Any = 3, stash_rows: int | None = None, **options: Any
) -> epbuf.Arena:  # fmt: skip
    schedule = Schedule(schedule) if isinstance(schedule, int) else schedule
    plan = epbuf.Plan.build(config, schedule, recv_policy=policy, stash_rows=stash_rows)
    return epbuf.Arena.open(plan, None if options.get("window") == "local" else group, **options)


def whole(seed: int, *shape: int) -> Tensor:
    """Draw small whole numbers: their sums have no rounding."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def ids(seed: int, config: EpConfig, rank: int, num_tokens: int = NUM_TOKENS, ranks: slice = slice(None)) -> Tensor:
    """Draw distinct experts for each token; `ranks`: of which ranks."""
    per_rank = config.num_experts // config.num_ranks
    allowed = torch.arange(config.num_experts).view(config.num_ranks, per_rank)[ranks].flatten()
    scores = torch.rand(num_tokens, len(allowed), generator=torch.Generator().manual_seed(10 * seed + rank))
    return allowed[scores.argsort(dim=1)[:, : config.num_topk]]


def layer(
    arena: epbuf.Arena, x: Tensor, topk_idx: Tensor, factor: Tensor, limit: int | None = None, **frame: Any
) -> Tensor:  # fmt: skip
    """Multiply received rows by `factor` [H], whose gradient needs the rows; those from `limit` on count as zeros."""
    with arena.acquire(**frame) as lease:
        recv = epbuf.dispatch(lease, x, topk_idx)
        row = torch.arange(len(recv.tokens), device=arena.device)
        is_read = recv.row_mask() & (row < (len(recv.tokens) if limit is None else limit))
        return epbuf.combine(lease, _Scale.apply(recv.tokens, factor, is_read))


class _Scale(torch.autograd.Function):
    """rows * factor, with the rows themselves as what backward reads."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: Tensor, is_read: Tensor) -> Tensor:
        ctx.save_for_backward(rows, factor, is_read)
        return rows.where(is_read[:, None], 0.0) * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, factor, is_read = ctx.saved_tensors
        grad = grads[0].where(is_read[:, None], 0.0)
        return grad * factor, (grad * rows.where(is_read[:, None], 0.0)).sum(0), None


def taken(arena: epbuf.Arena) -> tuple[int, int]:
    """Return the pages that frames have, and those that they want."""
    counters = arena.region("stash_counters").tolist()
    return counters[1], counters[2]


def assert_all_free(arena: epbuf.Arena) -> None:
    assert taken(arena) == (0, 0)
    assert sorted(arena.region("stash_free").tolist()) == list(range(arena.plan.num_stash_pages))


# ---- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "row_bytes"),
    [
        ("same", 2 * 256),
        ("mxfp8", 256 + 16),
        ("nvfp4", 128 + 16 + 4),
        (Payload.mxfp8(scale_layout="blocked"), 256 + 8),
        (Payload.raw(48, 32), 48 + 32),
    ],
    ids=["same", "mxfp8", "nvfp4", "blocked", "raw"],
)
def test_bytes_of_the_plan(payload: Any, row_bytes: int) -> None:
    """Three frames lose their receive regions; a workspace has one, and the pages hold the rows that were asked for."""
    config = config_of(2, hidden=256, token_dtype="bf16", dispatch_payload=payload, expert_alignment=128)
    kept = epbuf.Plan.build(config, Schedule(3))
    plan = epbuf.Plan.build(config, Schedule(3), recv_policy="stash", stash_rows=1000)
    capacity, names = plan.capacity_rows, ("recv_tokens", "recv_scales", "recv_row_scales")
    assert plan.region("stash_pages").shape == (8, 128 * row_bytes)
    assert plan.region("stash_free").shape == (8,)
    assert plan.region("stash_table", 2).shape == (2 + capacity // 128,)
    assert {(r.lifetime, r.index) for r in plan.regions if r.name in names} == {("forward", 0)}
    received = sum(r.nbytes for r in kept.regions if r.name in names and r.index == 0)
    assert received == capacity * row_bytes
    stashed = plan.bytes_by_lifetime()["stash"]
    assert stashed == 8 * 128 * row_bytes + 2 * 256
    assert kept.total_bytes - plan.total_bytes == 2 * received - stashed - 3 * 256
    assert plan.fingerprint != kept.fingerprint and "stash (8 pages of 128 rows)" in str(plan)


def test_pages_for_the_worst_case() -> None:
    """Without stash_rows every stashed frame may have all its C rows; more is never planned."""
    config = config_of(2, recv_capacity_per_rank=300)
    for rows in (None, 10**6):
        assert epbuf.Plan.build(config, Schedule(4), recv_policy="stash", stash_rows=rows).num_stash_pages == 4 * 3
    assert epbuf.Plan.build(config, Schedule.sequential(3), recv_policy=MIXED).num_stash_pages == 3
    assert epbuf.Plan.build(config, recv_policy="keep").num_stash_pages == 0


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, "many"])
def test_stash_rows_that_are_no_number_of_rows(rows: Any) -> None:
    with pytest.raises(ConfigError, match="is no number of rows"):
        epbuf.Plan.build(config_of(1), recv_policy="stash", stash_rows=rows)


def test_stash_rows_that_nobody_uses() -> None:
    with pytest.raises(ConfigError, match=r"stash_rows=5 .* recv_policy='keep' stashes none"):
        epbuf.Plan.build(config_of(1), stash_rows=5)


def test_frames_have_the_policy_of_their_layer() -> None:
    """A frame of a keep layer has receive regions of its own; the others use the workspace's."""
    schedule = Schedule.one_f_one_b(num_layers=3, num_stages=3, stage=1, num_microbatches=4)
    plan = epbuf.Plan.build(config_of(2), schedule, recv_policy=MIXED, stash_rows=128)
    assert plan.recv_policy == MIXED
    for microbatch in range(4):
        for number, word in enumerate(MIXED):
            assert plan.frame_policies[schedule.frame(number, microbatch)] == word
    lifetimes = [(r.lifetime, r.index) for r in plan.regions if r.name == "recv_tokens"]
    assert lifetimes == [("frame", 1), ("frame", 4), ("forward", 0)]
    assert [r.index for r in plan.regions if r.name == "stash_table"] == [0, 3]
    assert "stash, keep, recompute (1 pages" in str(plan) and "frame x 2 (keep)" in str(plan)
    assert sum(plan.bytes_by_lifetime().values()) == plan.total_bytes and "frame x 2 (stash)" in plan.to_svg()


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_acquire_takes_a_frame_of_the_policy() -> None:
    with open_arena(None, config_of(1), ("stash", "keep", "stash")) as arena:
        leases = [arena.acquire(recv_policy=word) for word in ("stash", "keep", "stash")]
        assert [lease.frame for lease in leases] == [0, 1, 2]
        assert "of its recv_policy and all 2 are busy" in raised(LeaseError, lambda: arena.acquire(recv_policy="stash"))
        for lease in leases:
            lease.release()
        for options in ({}, {"recv_policy": "stash"}):
            with arena.acquire(2, **options) as lease:
                assert lease.frame == 2
        differing = raised(ConfigError, arena.acquire)
        assert "differ in recv_policy ('stash' for 2 frame(s), 'keep' for 1 frame(s))" in differing
        other = raised(ConfigError, lambda: arena.acquire(1, recv_policy="stash"))
        assert "acquire(frame=1, recv_policy='stash')" in other and "built with 'keep'" in other
        assert "recv_policy='recompute'" in raised(ConfigError, lambda: arena.acquire(recv_policy="recompute"))
        for frame in (-1, 3):
            missing = raised(LeaseError, lambda frame=frame: arena.acquire(frame, recv_policy="stash"))
            assert f"acquire(frame={frame})" in missing and "frames 0 to 2" in missing


def test_views_of_a_lease_are_those_of_its_policy() -> None:
    config = config_of(1)
    with open_arena(None, config, ("stash", "keep"), 2) as arena:
        for frame, lifetime in ((0, "forward"), (1, "frame")):
            with arena.acquire(frame) as lease:
                recv = epbuf.dispatch(lease, whole(0, NUM_TOKENS, 16), ids(0, config, 0))
                region = arena.plan.region("recv_tokens", frame, lifetime)
                assert lease.window_of("recv_tokens")[1] == region.offset
                assert lease.recv_tokens.data_ptr() == recv.tokens.data_ptr() == arena.address_of(region)
                assert lease.packed("recv_tokens").data_ptr() == recv.tokens.data_ptr()
                epbuf.combine(lease, recv.tokens * 1)
                assert hasattr(lease, "stash_table") == (frame == 0)
                if frame == 0:
                    assert "from dispatch to combine only" in raised(LeaseError, lambda: lease.recv_tokens)


# ---- steps -----------------------------------------------------------------------------------------------------------


def in_flight(
    rank: int, group: Any, config: EpConfig, policy: Any, stash_rows: int | None, device: str = "cpu",
    window: str = "auto",
) -> list[Tensor]:  # fmt: skip
    """Run 1F1B of 3 layers and 4 micro-batches, twice; return what the second gave."""
    schedule = Schedule.one_f_one_b(num_layers=3, num_stages=3, stage=0, num_microbatches=4)
    factors = [whole(7 * n, 16).to(device).requires_grad_() for n in range(3)]
    with open_arena(group, config, policy, schedule, stash_rows, device=device, window=window) as arena:
        for _ in range(2):
            for factor in factors:
                factor.grad = None
            outputs, found = {}, []
            for direction, microbatch, _ in schedule.passes:
                if direction == "forward":
                    y = x = whole(microbatch + 100 * rank, NUM_TOKENS - 30 * microbatch, 16).to(device).requires_grad_()
                    for number, factor in enumerate(factors):
                        routing = ids(microbatch + 5 * number, config, rank, len(x)).to(device)
                        y = layer(arena, y, routing, factor, frame=schedule.frame(number, microbatch))
                    outputs[microbatch] = x, y
                else:
                    x, y = outputs.pop(microbatch)
                    y.backward(whole(50 + microbatch, *y.shape).to(device))
                    found += [y.detach(), x.grad]
        if "stash" in policy:
            assert_all_free(arena)
            assert arena.stash_peak_rows() > 8 * STASH_PAGE_ROWS
        assert arena.report()["num_stash_overflows"] == 0
        return [part.cpu() for part in (*found, *(factor.grad for factor in factors))]


@pytest.mark.parametrize(
    ("policy", "stash_rows"),
    [("stash", None), ("stash", 9 * 640), (MIXED, 3 * 768), (("keep", "stash", "stash"), None)],
    ids=["worst", "all-stashed", "mixed", "keep-first"],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.usefixtures("form")
def test_micro_batches_in_flight(num_ranks: int, policy: Any, stash_rows: int | None) -> None:
    """Pages of nine open dispatches, taken and returned out of order: the bits of rows that are kept."""
    config = config_of(num_ranks, recv_capacity_per_rank=1200)
    kept = virtual(num_ranks, in_flight, config, "keep", None)
    for got, want in zip(virtual(num_ranks, in_flight, config, policy, stash_rows), kept, strict=True):
        assert all(part.abs().sum() > 0 for part in want)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _retained(rank: int, group: Any, config: EpConfig, policy: str) -> tuple[list[Tensor], list[tuple[int, int]]]:
    x, factor = whole(rank, NUM_TOKENS, 16).requires_grad_(), whole(3, 16).requires_grad_()
    with open_arena(group, config, policy) as arena:
        y = layer(arena, layer(arena, x, ids(0, config, rank), factor), ids(1, config, rank), factor)
        counts = [taken(arena)] if policy == "stash" else []
        found: list[Tensor] = []
        for retain in (True, True, False):
            found += torch.autograd.grad(y, [x, factor], whole(9, *y.shape), retain_graph=retain)
            counts += [taken(arena)] if policy == "stash" else []
        return found, counts


def test_backward_run_again_with_retain_graph() -> None:
    """Pages stay for the next backward, and go with the last."""
    config = config_of(2)
    kept = virtual(2, _retained, config, "keep")
    for (got, counts), (want, _) in zip(virtual(2, _retained, config, "stash"), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert counts[0] == counts[1] == counts[2] > (0, 0) == counts[3]


def _never_run(rank: int, group: Any, config: EpConfig, policy: str) -> list[Tensor]:
    """Leave five forwards without their backward, then train."""
    x, factor = whole(rank, NUM_TOKENS, 16).requires_grad_(), whole(3, 16).requires_grad_()
    with open_arena(group, config, policy, 2, 2 * 5 * STASH_PAGE_ROWS if policy == "stash" else None) as arena:
        y = x
        for step in range(6):
            del y
            y = layer(arena, layer(arena, x, ids(step, config, rank), factor), ids(step + 1, config, rank), factor)
            if policy == "stash":
                pages = [int(arena.region("stash_table", frame)[0]) for frame in range(2)]
                assert taken(arena) == (sum(pages), sum(pages)) and min(pages) == 5
        found = list(torch.autograd.grad(y, [x, factor], whole(9, *y.shape)))
        if policy == "stash":
            assert_all_free(arena)
        return found


def test_pages_of_a_backward_that_never_runs_come_back() -> None:
    """The frame's next dispatch returns them: a pool for one step is enough for any number of steps."""
    config = config_of(1)
    kept = virtual(1, _never_run, config, "keep")
    for got, want in zip(virtual(1, _never_run, config, "stash"), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def _dropped_on_another_frame(rank: int, group: Any, config: EpConfig) -> list[tuple[float, int]]:
    """Leave a forward on each frame in turn without its backward; the pool holds one of them."""
    found = []
    with open_arena(group, config, "stash", 2, 5 * STASH_PAGE_ROWS) as arena:
        for step in range(4):
            x = whole(step, NUM_TOKENS, 16).requires_grad_()
            with arena.acquire(step % 2) as lease:
                recv = epbuf.dispatch(lease, x, ids(step, config, rank))
                flag = float(recv.overflow)
                epbuf.combine(lease, recv.tokens * 1)
            del recv
            found.append((flag, taken(arena)[0]))
        with arena.acquire(0) as lease:  # two that are both in use are still too many
            recv = epbuf.dispatch(lease, x, ids(0, config, rank))
            y = epbuf.combine(lease, recv.tokens * 1)
        with arena.acquire(1) as lease:
            other = epbuf.dispatch(lease, x, ids(0, config, rank))
            found.append((float(other.overflow), taken(arena)[0]))
            epbuf.combine(lease, other.tokens * 1)
        del recv, other, y
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pages_of_a_dropped_graph_serve_another_frame(num_ranks: int) -> None:
    for found in virtual(num_ranks, _dropped_on_another_frame, config_of(num_ranks)):
        assert [flag for flag, _ in found] == [0.0] * 4 + [1.0]
        assert all(0 < pages <= 5 for _, pages in found)


def test_pages_are_not_kept_without_a_backward() -> None:
    """Under no_grad a layer has its pages from dispatch to combine."""
    config = config_of(1)
    with open_arena(None, config, "stash", 1) as arena, torch.no_grad():
        for step in range(2):
            layer(arena, whole(step, NUM_TOKENS, 16), ids(step, config, 0), whole(3, 16))
            assert_all_free(arena)
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, whole(step, NUM_TOKENS, 16), ids(step, config, 0))
                epbuf.combine(lease, recv.tokens * 1, out=torch.empty(NUM_TOKENS, 16))
            assert_all_free(arena)
            del recv
        assert arena.report()["stash_peak_rows"] == arena.stash_peak_rows() == 5 * STASH_PAGE_ROWS


def _changed_rows(rank: int, group: Any, config: EpConfig, policy: str) -> list[Tensor]:
    x, factor = whole(rank, NUM_TOKENS, 16).requires_grad_(), whole(3, 16).requires_grad_()
    with open_arena(group, config, policy) as arena:
        with arena.acquire() as lease:
            recv = epbuf.dispatch(lease, x, ids(0, config, rank))
            recv.tokens.detach().mul_(2)
            y = epbuf.combine(lease, _Scale.apply(recv.tokens, factor, recv.row_mask()))
        return list(torch.autograd.grad(layer(arena, y, ids(1, config, rank), factor), [x, factor], whole(9, *y.shape)))


def test_rows_that_the_experts_changed_come_back_so() -> None:
    config = config_of(2)
    kept = virtual(2, _changed_rows, config, "keep")
    for got, want in zip(virtual(2, _changed_rows, config, "stash"), kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class _ReadsBytes(torch.autograd.Function):
    """Experts whose weight gradient is made of every byte that was received: data, scales, row scales."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, weight: Tensor, offs: Tensor, *received: Tensor | None) -> Tensor:
        ctx.save_for_backward(offs, *received)
        return torch.zeros_like(carrier) + weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        offs, *received = ctx.saved_tensors
        live = int(offs[-1])
        parts = [p[:live].contiguous().view(torch.uint8).double().flatten() for p in received if p is not None]
        total = sum((part * (1 + torch.arange(len(part), device=part.device) % 251)).sum() for part in parts)
        return torch.zeros_like(grads[0]), total.reshape(1), None, None, None, None


def bytes_read(
    rank: int, group: Any, config: EpConfig, policy: str, device: str = "cpu", window: str = "auto"
) -> list[Tensor]:  # fmt: skip
    weights = [torch.ones(1, dtype=torch.float64, device=device).requires_grad_() for _ in range(2)]
    drawn = torch.randn(NUM_TOKENS, 128, generator=torch.Generator().manual_seed(rank))
    y = x = drawn.to(device).requires_grad_()
    with open_arena(group, config, policy, device=device, window=window) as arena:
        for number, weight in enumerate(weights):
            with arena.acquire() as lease:
                rows = x * (1 + number) + y * 0
                recv = epbuf.dispatch(lease, rows, ids(number, config, rank).to(device))
                out = _ReadsBytes.apply(
                    recv.carrier, weight.float(), recv.offs, recv.tokens, recv.scales, recv.row_scales
                )
                y = epbuf.combine(lease, out)
        y.sum().backward()
        return [weight.grad.cpu() for weight in weights]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "payload",
    ["mxfp8", "fp8_block128", "nvfp4", Payload.mxfp8(scale_layout="blocked"), Payload.nvfp4(scale_layout="blocked")],
    ids=["mxfp8", "fp8_block128", "nvfp4", "mxfp8-blocked", "nvfp4-blocked"],
)
@pytest.mark.usefixtures("form")
def test_quantised_rows_come_back_with_their_scales(payload: Any, num_ranks: int) -> None:
    config = config_of(num_ranks, hidden=128, dispatch_payload=payload, expert_alignment=128)
    kept = virtual(num_ranks, bytes_read, config, "keep")
    for got, want in zip(virtual(num_ranks, bytes_read, config, "stash"), kept, strict=True):
        assert want[0] != want[1] and min(want) > 0
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def checkpointed(
    rank: int, group: Any, config: EpConfig, policy: Any, saved: Sequence[Any] | None, stash_rows: int | None
) -> tuple[list[Tensor], int]:  # fmt: skip
    """Run three layers, all in one checkpoint that saves what some ops give; None: without a checkpoint."""

    def stack(x: Tensor, *factors: Tensor) -> Tensor:
        for number, factor in enumerate(factors):
            x = layer(arena, x, ids(number, config, rank), factor, frame=number)
        return x

    x = whole(rank, NUM_TOKENS, 16).requires_grad_()
    factors = [whole(number, 16).requires_grad_() for number in range(3)]
    with open_arena(group, config, policy, 3, stash_rows) as arena:
        for _ in range(2):
            if saved is None:
                y = stack(x, *factors)
            else:
                contexts = partial(create_selective_checkpoint_contexts, list(saved))
                y = checkpoint(stack, x, *factors, use_reentrant=False, context_fn=contexts)
            found = torch.autograd.grad(y, [x, *factors], whole(9, *y.shape))
            if "stash" in policy:
                assert_all_free(arena)
        assert arena.report()["num_stash_overflows"] == 0
        return [y.detach(), *found], arena.stash_peak_rows()


@pytest.mark.parametrize("saved", [[ROUTE], [torch.ops.aten.where.self]], ids=["route", "nothing_of_ours"])
@pytest.mark.parametrize("policy", ["stash", MIXED], ids=["stash", "mixed"])
def test_selective_checkpoints_over_several_layers(policy: Any, saved: Sequence[Any]) -> None:
    """The second pass stashes rows of all layers before the first backward reads them, in the pages of the first."""
    config = config_of(2)
    kept = virtual(2, checkpointed, config, "keep", None, None)
    peak = max(rows for _, rows in virtual(2, checkpointed, config, policy, None, None))
    assert peak > 0
    for (got, rows), (want, _) in zip(virtual(2, checkpointed, config, policy, saved, peak), kept, strict=True):
        assert rows <= peak
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- overflow and growth ---------------------------------------------------------------------------------------------


def too_few_pages(
    rank: int, group: Any, config: EpConfig, policy: str, limit: int | None, device: str = "cpu", window: str = "auto"
) -> list[Any]:  # fmt: skip
    """Let rank 1 receive everything in the second layer, whose pages are too few there."""
    x = whole(rank, NUM_TOKENS, 16).to(device).requires_grad_()
    factors = [whole(n, 16).to(device).requires_grad_() for n in range(2)]
    stash_rows = 10 * STASH_PAGE_ROWS if policy == "stash" else None
    with open_arena(group, config, policy, 2, stash_rows, device=device, window=window) as arena:
        flags = []
        y = layer(arena, x, ids(0, config, rank).to(device), factors[0], frame=0)
        flags.append(float(arena.region("overflow", 0)))
        to_rank_1 = ids(1, config, rank, ranks=slice(1, 2)).to(device)
        y = layer(arena, y, to_rank_1, factors[1], limit if rank == 1 else None, frame=1)
        flags.append(float(arena.region("overflow", 1)))
        report = arena.report()
        found = torch.autograd.grad(y, [factors[1]], whole(9, *y.shape).to(device))[0].cpu()
        return [flags, report["num_stash_overflows"], report["num_overflows"], report["stash_peak_rows"], found]


def check_too_few_pages(run: Callable[[str, int | None], Sequence[list[Any]]], config: EpConfig) -> None:
    """Compare what two ranks of `too_few_pages` gave with what they give when all rows are kept."""
    first, second = run("stash", None)
    num_rows = 2 * NUM_TOKENS * config.num_topk  # all that both ranks send, to rank 1
    mine = int((ids(0, config, 0) // 4 == 1).sum() + (ids(0, config, 1) // 4 == 1).sum())  # of the first layer, there
    pages = -(-mine // STASH_PAGE_ROWS)
    assert first[:3] == second[:3] == [[0.0, 1.0], 1, 0]
    assert second[3] == (pages + -(-num_rows // STASH_PAGE_ROWS)) * STASH_PAGE_ROWS
    limit = (10 - pages) * STASH_PAGE_ROWS
    assert 0 < limit < num_rows
    kept = run("keep", limit)
    assert torch.equal(second[4], kept[1][4]) and torch.equal(first[4], kept[0][4])


@pytest.mark.usefixtures("form")
def test_too_few_pages_are_flagged_on_all_ranks() -> None:
    """As for a capacity, rows are dropped by position: those without a page count as zeros in backward."""
    config = config_of(2)
    check_too_few_pages(lambda policy, limit: virtual(2, too_few_pages, config, policy, limit), config)


def _refused(rank: int, group: Any, config: EpConfig) -> tuple[str, tuple[int, int]]:
    x, factor = whole(rank, NUM_TOKENS, 16), whole(3, 16).requires_grad_()
    with open_arena(group, config, "stash", 2, 9 * STASH_PAGE_ROWS) as arena:
        to_rank_1 = ids(1, config, rank, ranks=slice(1, 2))
        return raised(CapacityError, lambda: layer(arena, x, to_rank_1, factor)), taken(arena)


def test_too_few_pages_are_an_error_on_all_ranks() -> None:
    """overflow_policy="error" raises at the same dispatch, and names the rank whose pages are missing."""
    for message, _ in virtual(2, _refused, config_of(2, overflow_policy="error")):
        assert "rank 1 receives more rows than the free pages" in message and "stash_rows=1152" in message


def stepped(rank: int, group: Any, config: EpConfig, policy: str, stash_rows: int | None) -> list[Any]:
    """Capture a step, replay it, and where it overflows run it again in an arena that grows."""
    factor = torch.nn.Parameter(whole(3, 16))
    optimizer = torch.optim.SGD([factor], lr=0.5, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        y = layer(arena, layer(arena, x, ids(0, config, rank), factor), ids(1, config, rank), factor)
        y.backward(whole(9, *y.shape))
        optimizer.step()
        return y.detach()

    with open_arena(group, config, policy, 2, stash_rows) as arena:
        x = whole(rank, NUM_TOKENS, 16)
        captured = epbuf.CapturedStep.capture(arena, step, (x,), restore=(factor, optimizer), on_overflow="skip")
        captured(x)
        flag, values = float(captured.overflow), [factor.detach().clone()]
        if flag:
            assert torch.equal(factor, whole(3, 16))
            captured.rerun()
            values = [factor.detach().clone()]
        rows = arena.report()["stash_rows"]
        capacity = arena.capacity_rows
        captured.close()
    return [flag, rows, capacity, *values]


def _told(rank: int, group: Any, config: EpConfig) -> str:
    factor = whole(3, 16).requires_grad_()
    with open_arena(group, config, "stash", 1, STASH_PAGE_ROWS) as arena:

        def step(x: Tensor) -> Tensor:
            y = layer(arena, x, ids(0, config, rank), factor)
            return torch.autograd.grad(y, factor, whole(9, *y.shape))[0]

        captured = epbuf.CapturedStep.capture(arena, step, (whole(rank, NUM_TOKENS, 16),), on_overflow="raise")
        captured(whole(rank, NUM_TOKENS, 16))
        message = raised(CapacityError, captured.check)
        captured.close()
        return message


def test_a_captured_step_says_that_pages_are_missing() -> None:
    for message in virtual(2, _told, config_of(2)):
        assert "needed more rows in the stash of rank 0 than its stash_rows=128" in message
        assert "recv_capacity_per_rank is" not in message


def test_a_step_with_too_few_pages_is_run_again_in_more() -> None:
    """Skipped on every rank, then run again with room: the weights of a run that kept all rows."""
    config = config_of(2)
    capacity = epbuf.Plan.build(config).capacity_rows
    kept = virtual(2, stepped, config, "keep", None)
    for got, want in zip(virtual(2, stepped, config, "stash", 5 * STASH_PAGE_ROWS), kept, strict=True):
        assert (got[0], got[2]) == (1.0, capacity) and got[1] in range(9 * STASH_PAGE_ROWS, 13 * STASH_PAGE_ROWS)
        assert not torch.equal(want[3], whole(3, 16)) and torch.equal(got[3], want[3])


def _grown(rank: int, group: Any, config: EpConfig, policy: Any, stash_rows: int | None) -> list[Any]:
    x, factor = whole(rank, NUM_TOKENS, 16).requires_grad_(), whole(3, 16).requires_grad_()
    with open_arena(group, config, policy, 3, stash_rows) as arena:
        with arena.growing():
            y = x
            for number in range(3):
                y = layer(arena, y, ids(number, config, rank), factor, frame=number)
            found = torch.autograd.grad(y, [x, factor], whole(9, *y.shape))
        return [arena.generation, arena.capacity_rows, arena.memory.stash_rows, *found]


@pytest.mark.parametrize("capacity", [None, 64], ids=["stash", "both"])
def test_eager_dispatches_grow_the_stash(capacity: int | None) -> None:
    """In the middle of a step, of two layers that stash: the gradients of rows that are kept."""
    config, policy = config_of(2, recv_capacity_per_rank=capacity), ("stash", "keep", "stash")
    kept = virtual(2, _grown, config_of(2), "keep", None)
    for got, want in zip(virtual(2, _grown, config, policy, STASH_PAGE_ROWS), kept, strict=True):
        assert got[0] >= 1 and got[2] >= 4 * STASH_PAGE_ROWS
        assert all(torch.equal(a, b) for a, b in zip(got[3:], want[3:], strict=True))


def test_growth_keeps_the_policies() -> None:
    config = config_of(1, recv_capacity_per_rank=256)
    with open_arena(None, config, "stash", 2, 256) as arena:
        other = epbuf.Plan.build(config_of(1, recv_capacity_per_rank=512), Schedule(2), recv_policy="recompute")
        assert "grow() keeps recv_policy" in raised(ConfigError, lambda: arena.grow(other))
        fewer = epbuf.Plan.build(
            config_of(1, recv_capacity_per_rank=512), Schedule(2), recv_policy="stash", stash_rows=128
        )
        assert "stash_rows=256 and the new plan 128" in raised(ConfigError, lambda: arena.grow(fewer))


def _debugged(rank: int, group: Any, config: EpConfig, debug: bool) -> list[Tensor]:
    x, factor = whole(rank, NUM_TOKENS, 16).requires_grad_(), whole(3, 16).requires_grad_()
    with open_arena(group, config, MIXED, debug=debug) as arena:
        for _ in range(2):
            y = x
            for number in range(3):
                y = layer(arena, y, ids(number, config, rank), factor, frame=number)
            found = torch.autograd.grad(y, [x, factor], whole(9, *y.shape))
        arena.check()
        return list(found)


def test_debug_mode_with_layers_that_differ() -> None:
    plain = virtual(2, _debugged, config_of(2), False)
    for got, want in zip(virtual(2, _debugged, config_of(2), True), plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_stash_opens_under_another_default_device() -> None:
    """Models are often made under `with torch.device("meta")`, and arenas with them."""
    with torch.device("meta"):
        arena = epbuf.Arena.open(epbuf.Plan.build(base_config(1), recv_policy="stash"))
    free = arena.region("stash_free")
    assert torch.equal(free, torch.arange(len(free), dtype=free.dtype))
    arena.close()
