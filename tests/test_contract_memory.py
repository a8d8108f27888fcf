"""Contract rules 12, 13, 15, 17 and 18: where memory lies, who may use it when, and how it ends."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import Pool, raised, size_of, virtual
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor

import epbuf
from epbuf import generation
from epbuf.errors import LeaseError, PeerTimeoutError, PlanMismatchError

pytestmark = pytest.mark.usefixtures("form")

Spread = Callable[..., list[Any]]
CASE = named_case("some_negative", 1, 16, "fp32")
IDS = CASE.topk_idx[0]
KEPT = (IDS >= 0).sum(1, keepdim=True)


def open_arena(group: Any = None, *, num_frames: int = 1, num_workspaces: int = 1, **config: Any) -> epbuf.Arena:
    sizes = base_config(size_of(group), expert_alignment=16, token_dtype="fp32", **config)
    return epbuf.Arena.open(epbuf.Plan.build(sizes, schedule=epbuf.Schedule(num_frames, num_workspaces)), group)


@pytest.fixture
def arena() -> Iterator[epbuf.Arena]:
    with open_arena() as arena:
        yield arena


def tokens() -> Tensor:
    return draw_inputs(CASE, 0, True).x.requires_grad_()


def _places(rank: int, group: Any) -> list[dict[str, int]]:
    """Return, for each round with another T and routing, where every region of the lease begins."""
    rounds = []
    with open_arena(group) as arena:
        base = 0
        for routing in ("balanced", "one_expert", "different_t", "no_tokens", "all_negative", "far_over"):
            case = named_case(routing, 2, 16, "fp32")
            inputs = draw_inputs(case, rank, True)
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, inputs.x.requires_grad_(), case.topk_idx[rank])
                base = lease.recv_tokens.data_ptr() - arena.plan.region("recv_tokens").offset
                places = {"expert_out": lease.expert_out.data_ptr() - base}
                y = epbuf.combine(lease, recv.tokens * 2)
                recv.tokens.register_hook(_note(lease, places, base))
                y.backward(inputs.dy)
                for name in ("slot_map", "offs", "counts", "overflow", "recv_topk_weights", "recv_tokens"):
                    places[name] = getattr(lease, name).data_ptr() - base
                places["recv.tokens"] = recv.tokens.data_ptr() - base
            rounds.append(places)
            del recv, y
        wanted = {name: arena.plan.region(name.replace("recv.", "recv_")).offset for name in rounds[0]}
    return [wanted, *rounds]


def _note(lease: epbuf.Lease, places: dict[str, int], base: int) -> Callable[[Tensor], None]:
    def note(grad: Tensor) -> None:
        for name in ("grad_expert_out", "grad_recv_tokens", "grad_recv_topk_weights"):
            places[name] = getattr(lease, name).data_ptr() - base

    return note


def test_regions_lie_where_the_plan_says(spread: Spread) -> None:
    """Rule 12: every region is one offset of one window, the plan's, whatever T and routing a round has."""
    for wanted, *rounds in spread(2, _places):
        assert all(places == wanted for places in rounds)


def test_window_of_names_window_and_offset(arena: epbuf.Arena) -> None:
    """Rule 12: window_of gives the plan's offset, and one window for all regions."""
    with arena.acquire() as lease:
        found = [lease.window_of(name) for name in ("slot_map", "recv_tokens", "recv_topk_weights")]
    assert [offset for _, offset in found] == [
        arena.plan.region(name).offset for name in ("slot_map", "recv_tokens", "recv_topk_weights")
    ]
    assert len({id(window) for window, _ in found}) == 1


def test_packed_is_the_regions_bytes(arena: epbuf.Arena) -> None:
    """Rule 12: packed gives a region as one uint8 view of the same memory."""
    with arena.acquire() as lease:
        epbuf.dispatch(lease, tokens(), IDS)
        packed = lease.packed("recv_tokens")
        assert_same(packed.view(torch.float32).view(-1, 16), lease.recv_tokens, "packed rows")
        assert packed.data_ptr() == lease.recv_tokens.data_ptr()


def test_window_is_allocated_once(arena: epbuf.Arena) -> None:
    """Rule 12: after open nothing more is allocated or registered."""
    for _ in range(5):
        with arena.acquire() as lease:
            epbuf.combine(lease, epbuf.dispatch(lease, tokens(), IDS).tokens).sum().backward()
    assert arena.report()["window_allocations"] == 1


def test_views_cannot_be_resized(arena: epbuf.Arena) -> None:
    """Rule 13: a view of a region cannot grow out of it."""
    with arena.acquire() as lease:
        rows, width = lease.recv_tokens.shape
        with pytest.raises(RuntimeError, match="resiz"):
            lease.recv_tokens.resize_(rows * 1000, width)


def test_dtype_views_share_the_version_counter(arena: epbuf.Arena) -> None:
    """Rule 13: a write through one view of a region is a version of every view, bytes of another dtype included."""
    with arena.acquire() as lease:
        first, other = lease.recv_tokens, lease.recv_tokens.view(torch.uint8)
        before = first._version
        other.fill_(0)
        assert first._version > before


def test_writes_to_one_region_are_no_version_of_another() -> None:
    """Rule 13: rows saved from frame 0 survive a dispatch into frame 1: no false "modified by an inplace operation"."""
    with open_arena(num_frames=2) as arena:
        x, weight = tokens(), torch.tensor(2.0, requires_grad=True)
        with arena.acquire() as lease:
            rows = torch.where((recv := epbuf.dispatch(lease, x, IDS)).row_mask()[:, None], recv.tokens, 0)
            y = epbuf.combine(lease, recv.tokens * weight)
            with arena.acquire() as other, torch.no_grad():
                epbuf.combine(other, epbuf.dispatch(other, x.detach() + 1, IDS).tokens)
            y.backward(torch.ones_like(y))
            assert x.grad is not None
            assert_same(x.grad, (2.0 * KEPT).expand_as(x).contiguous(), "dx")
            assert_same(rows.sum(0), (x.detach() * KEPT).sum(0), "rows of frame 0")


def test_late_read_of_reused_rows_is_an_error(arena: epbuf.Arena) -> None:
    """Rule 13: rows saved without their ticket are caught by the version counter once the frame is used again."""
    weight = torch.tensor(2.0, requires_grad=True)
    with arena.acquire() as lease, torch.no_grad():
        rows = epbuf.dispatch(lease, tokens(), IDS).tokens
    with torch.enable_grad():
        late = rows * weight
    with arena.acquire() as lease, torch.no_grad():
        epbuf.dispatch(lease, tokens() + 1, IDS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


def test_expert_out_view_is_versioned_by_combine(arena: epbuf.Arena) -> None:
    """Rule 13: staging into the window's expert_out is a version of the view that the lease handed out."""
    with arena.acquire() as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, tokens(), IDS)
        view = lease.expert_out
        before = view._version
        epbuf.combine(lease, recv.tokens * 2)
        assert view._version > before


def test_views_carry_no_gradient_history(arena: epbuf.Arena) -> None:
    """Rule 13: what the lease hands out is detached, and does not chain one use of a region to the next."""
    with arena.acquire() as lease:
        epbuf.dispatch(lease, tokens(), IDS)
        assert lease.recv_tokens.grad_fn is None and not lease.recv_tokens.requires_grad


def test_gradient_of_a_leaf_is_copied_out_of_the_window(arena: epbuf.Arena) -> None:
    """Rule 13: a leaf's .grad is ordinary memory, so the next step does not change it."""
    leaf = torch.full((arena.plan.capacity_rows, 16), 3.0, requires_grad=True)
    with arena.acquire() as lease:
        end = int(epbuf.dispatch(lease, tokens(), IDS).offs[-1])
        epbuf.combine(lease, leaf).backward(torch.ones(12, 16))
    assert leaf.grad is not None
    kept = leaf.grad[:end].clone()
    with arena.acquire() as lease:
        recv = epbuf.dispatch(lease, tokens(), IDS)
        epbuf.combine(lease, recv.tokens).backward(torch.full((12, 16), 7.0))
    assert_same(leaf.grad[:end], kept, "gradient of the leaf after the next step")


def frame_of(arena: epbuf.Arena, lease: epbuf.Lease) -> int:
    offset = lease.window_of("recv_tokens")[1]
    frames = range(arena.plan.schedule.num_frames)
    return next(f for f in frames if arena.plan.region("recv_tokens", f).offset == offset)


def test_acquire_takes_the_lowest_free_frame() -> None:
    """Rule 15: acquire() takes the lowest free frame, acquire(frame=) the named one."""
    with open_arena(num_frames=4) as arena:
        leases = [arena.acquire(), arena.acquire(2), arena.acquire()]
        assert [frame_of(arena, lease) for lease in leases] == [0, 2, 1]
        leases[0].release()
        assert frame_of(arena, arena.acquire()) == 0


def test_workspace_views_need_a_dispatch(arena: epbuf.Arena) -> None:
    """Rule 15: before dispatch the workspace views of a lease raise: the wait for old readers stands in dispatch."""
    with arena.acquire() as lease:
        with pytest.raises(LeaseError, match="expert_out"):
            _ = lease.expert_out
        with pytest.raises(LeaseError, match="grad_recv_tokens"):
            _ = lease.grad_recv_tokens
        with pytest.raises(LeaseError, match="expert_out"):
            lease.window_of("expert_out")


def test_forward_workspace_ends_with_combine(arena: epbuf.Arena) -> None:
    """Rule 15: after combine the view of expert_out raises, since the next claim may own its bytes."""
    with arena.acquire() as lease:
        epbuf.combine(lease, epbuf.dispatch(lease, tokens(), IDS).tokens)
        with pytest.raises(LeaseError, match="expert_out"):
            _ = lease.expert_out


def test_backward_workspace_lasts_from_combine_backward_to_dispatch_backward(arena: epbuf.Arena) -> None:
    """Rule 15: grad_recv_tokens can be written by the experts' backward, and raises once dispatch backward is done."""
    x = tokens()
    with arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, IDS)
        rows = recv.tokens * 1.0
        y = epbuf.combine(lease, rows)
        (grad,) = torch.autograd.grad(y, rows, torch.ones_like(y))
        out = lease.grad_recv_tokens
        out.copy_(grad * 5)
        (dx,) = torch.autograd.grad(recv.tokens, x, out)
        assert_same(dx, (5.0 * KEPT).expand_as(x).contiguous(), "dx of a gradient written into the window")
        with pytest.raises(LeaseError, match="grad_recv_tokens"):
            _ = lease.grad_recv_tokens


def _two_dispatches(rank: int, group: Any, num_workspaces: int) -> tuple[str, list[Tensor]]:
    case = named_case("some_negative", 2, 16, "fp32")
    x, ids = draw_inputs(case, rank, True).x, case.topk_idx[rank]
    message = ""
    with open_arena(group, num_frames=2, num_workspaces=num_workspaces) as arena, torch.no_grad():
        first, second = arena.acquire(), arena.acquire()
        one = epbuf.dispatch(first, x, ids)
        try:
            two = epbuf.dispatch(second, x + 1, ids)
        except LeaseError as error:
            message = str(error)
        ys = [epbuf.combine(first, one.tokens)]
        if message:
            two = epbuf.dispatch(second, x + 1, ids)
        ys.append(epbuf.combine(second, two.tokens))
        return message, ys


@pytest.mark.parametrize("num_workspaces", [1, 2])
def test_forward_workspaces_are_claimed(num_workspaces: int, spread: Spread) -> None:
    """Rule 15: with one workspace a second dispatch before combine is refused on all ranks, naming both frames."""
    case = named_case("some_negative", 2, 16, "fp32")
    for rank, (message, ys) in enumerate(spread(2, _two_dispatches, num_workspaces)):
        if num_workspaces == 1:
            assert "frame 1" in message and "0" in message and "num_workspaces" in message
        else:
            assert message == ""
        x, kept = draw_inputs(case, rank, True).x, (case.topk_idx[rank] >= 0).sum(1, keepdim=True)
        assert_same(ys[0], x * kept, f"y of frame 0 on rank {rank}")
        assert_same(ys[1], (x + 1) * kept, f"y of frame 1 on rank {rank}")


def _two_backwards(rank: int, group: Any) -> tuple[str, list[Tensor]]:
    case = named_case("some_negative", 2, 16, "fp32")
    ids, dy = case.topk_idx[rank], torch.ones(12, 16)
    xs = [draw_inputs(case, rank, True).x.requires_grad_() for _ in range(2)]
    with open_arena(group, num_frames=2) as arena:
        parts = []
        for x in xs:
            with arena.acquire() as lease:
                recv = epbuf.dispatch(lease, x, ids)
                rows = recv.tokens * 1.0
                parts.append((recv.tokens, rows, epbuf.combine(lease, rows)))
        del recv, rows, lease
        (grad,) = torch.autograd.grad(parts[0][2], parts[0][1], dy, retain_graph=True)
        message = raised(LeaseError, lambda: torch.autograd.grad(parts[1][2], parts[1][1], dy, retain_graph=True))
        dxs = [torch.autograd.grad(parts[0][0], xs[0], grad)[0].clone()]
        (grad,) = torch.autograd.grad(parts[1][2], parts[1][1], dy)
        return message, [*dxs, torch.autograd.grad(parts[1][0], xs[1], grad)[0]]


def test_backward_workspaces_are_claimed() -> None:
    """Rule 15: a second combine backward before dispatch backward is refused, names both frames, and can be redone."""
    case = named_case("some_negative", 2, 16, "fp32")
    for rank, (message, dxs) in enumerate(virtual(2, _two_backwards)):
        assert "frame 1" in message and "0" in message and "num_workspaces" in message
        kept = (case.topk_idx[rank] >= 0).sum(1, keepdim=True).float().expand(12, 16)
        for dx in dxs:
            assert_same(dx, kept.contiguous(), f"dx of rank {rank}")


def test_rows_in_the_workspace_end_with_combine() -> None:
    """Rule 15: with save_recv=False recv.tokens lies in the forward workspace, and its view ends with combine."""
    with open_arena(num_frames=2, save_recv=False, inference_only=True) as arena, torch.no_grad():
        for frame in range(2):
            with arena.acquire(frame) as lease:
                with pytest.raises(LeaseError, match="recv_tokens"):
                    _ = lease.recv_tokens
                recv = epbuf.dispatch(lease, tokens(), IDS)
                assert lease.window_of("recv_tokens")[1] == arena.plan.region("recv_tokens").offset
                epbuf.combine(lease, recv.tokens)
                with pytest.raises(LeaseError, match="recv_tokens"):
                    _ = lease.recv_tokens


def _overlapped(rank: int, group: Any) -> list[Tensor]:
    """Keep two dispatches and two backwards in flight at once, on two workspaces of each set."""
    case = named_case("some_negative", 2, 16, "fp32")
    ids, ones = case.topk_idx[rank], torch.ones(12, 16)
    xs = [(draw_inputs(case, rank, True).x + number).requires_grad_() for number in range(2)]
    with open_arena(group, num_frames=2, num_workspaces=2) as arena:
        for _ in range(3):
            leases = [arena.acquire(), arena.acquire()]
            recvs = [epbuf.dispatch(lease, x, ids) for lease, x in zip(leases, xs, strict=True)]
            rows = [recv.tokens * 2.0 for recv in recvs]
            ys = [epbuf.combine(leases[number], rows[number]) for number in (1, 0)][::-1]
            grads = [torch.autograd.grad(ys[n], rows[n], ones * (n + 1))[0] for n in range(2)]
            dxs = [torch.autograd.grad(recvs[n].tokens, xs[n], grads[n] * 2.0)[0] for n in range(2)]
            del recvs, grads, leases, rows
    return [y.detach() for y in ys] + dxs


def test_two_workspaces_carry_two_rounds_at_once(spread: Spread) -> None:
    """Rule 15: with two workspaces two frames overlap in forward and backward without touching each other."""
    case = named_case("some_negative", 2, 16, "fp32")
    for rank, (y0, y1, dx0, dx1) in enumerate(spread(2, _overlapped)):
        x, kept = draw_inputs(case, rank, True).x, (case.topk_idx[rank] >= 0).sum(1, keepdim=True).float()
        assert_same(y0, x * 2 * kept, f"y of frame 0 on rank {rank}")
        assert_same(y1, (x + 1) * 2 * kept, f"y of frame 1 on rank {rank}")
        assert_same(dx0, (kept * 2).expand_as(x).contiguous(), f"dx of frame 0 on rank {rank}")
        assert_same(dx1, (kept * 4).expand_as(x).contiguous(), f"dx of frame 1 on rank {rank}")


def _backwards_in_a_row(rank: int, group: Any) -> list[int]:
    """Take the gradient of one dispatch again and again; rank 0 has no tokens, so it is always first to stage anew."""
    sizes = {"max_tokens_per_rank": 256, "hidden": 4096, "num_topk": 1, "recv_capacity_per_rank": 256}
    x = torch.ones(256 * rank, 4096, requires_grad=True)
    wrong = []
    with open_arena(group, **sizes) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, torch.zeros(len(x), 1, dtype=torch.int64))
        for number in range(20):
            grad = torch.full_like(recv.tokens, number)
            (dx,) = torch.autograd.grad(recv.tokens, x, grad, retain_graph=True)
            if not torch.equal(dx, torch.full_like(dx, number)):
                wrong.append(number)
    return wrong


def test_staging_waits_for_the_readers_of_the_last_use() -> None:
    """Rule 15: a dispatch backward with no combine backward before it spares rows that a peer still pulls."""
    assert virtual(2, _backwards_in_a_row) == [[], []]


def _skewed(rank: int, group: Any, num_rounds: int) -> list[str]:
    """Train on changing routings while every rank sleeps at random points; list the rounds whose values are wrong."""
    draw = random.Random(rank)
    num_ranks, wrong = size_of(group), []

    def pause() -> None:
        if draw.random() < 0.3:
            time.sleep(draw.random() * 4e-3)

    with open_arena(group, num_frames=2, max_tokens_per_rank=40) as arena:
        for number in range(num_rounds):
            generator = torch.Generator().manual_seed(1000 * number + rank)
            num_tokens = int(torch.randint(0, 41, (1,), generator=generator))
            x = torch.randint(-3, 4, (num_tokens, 16), generator=generator).float().requires_grad_()
            ids = torch.rand(num_tokens, 4 * num_ranks, generator=generator).argsort(1)[:, :3]
            ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids)
            pause()
            with arena.acquire(number % 2) as lease:
                recv = epbuf.dispatch(lease, x, ids)
                pause()
                y = epbuf.combine(lease, recv.tokens * float(number + 1))
            pause()
            y.backward(torch.ones_like(y))
            factor = (ids >= 0).sum(1, keepdim=True).float() * (number + 1)
            right = x.grad is not None and torch.equal(x.grad, factor.expand_as(x))
            if not right or not torch.equal(y.detach(), x.detach() * factor):
                wrong.append(f"round {number}")
            del recv, y
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_may_run_at_different_speed(num_ranks: int, spread: Spread) -> None:
    """Rules 15 and 20: 60 rounds with random delays, routings and T on two frames and one workspace are all right."""
    assert spread(num_ranks, _skewed, 60) == [[]] * num_ranks


def test_workspace_claim_ends_with_the_frame() -> None:
    """Rule 15: a dispatch that is never combined gives its workspace back with the frame's last claim."""
    with open_arena(num_frames=2) as arena, torch.no_grad():
        with arena.acquire() as lease:
            epbuf.dispatch(lease, tokens(), IDS)
        del lease
        with arena.acquire(1) as lease:
            x = tokens().detach()
            assert_same(epbuf.combine(lease, epbuf.dispatch(lease, x, IDS).tokens), x * KEPT, "y of frame 1")


def _other_frame(rank: int, group: Any) -> str:
    case = named_case("balanced", 2, 16, "fp32")
    with open_arena(group, num_frames=3) as arena:
        lease = arena.acquire(frame=2 * rank)
        x = draw_inputs(case, rank, True).x
        return raised(LeaseError, lambda: epbuf.dispatch(lease, x, case.topk_idx[rank]))


def test_ranks_on_different_frames_all_raise(spread: Spread) -> None:
    """Rule 15: a rank that took another frame is a LeaseError on all ranks, with both numbers, before any time-out."""
    for message in spread(2, _other_frame, limit_s=15):
        assert "frame 0" in message and "frame 2" in message


def test_close_is_idempotent() -> None:
    """Rule 17: closing twice, and leaving `with` after close(), does nothing more."""
    with open_arena() as arena:
        arena.close()
        arena.close()


def _view_after_close(rank: int, group: Any) -> tuple[Tensor, Tensor]:
    with open_arena(None) as arena, arena.acquire() as lease:
        recv = epbuf.dispatch(lease, tokens().detach(), IDS)
        view = recv.tokens.detach()
        copy = view.clone()
        del recv
    gc.collect()
    return view.clone(), copy


def test_views_may_outlive_the_arena(pool: Pool) -> None:
    """Rule 17: a view that outlives close() still has its bytes: the storage owns the mapping."""
    [(view, copy)] = pool.run(1, _view_after_close)
    assert_same(view, copy, "view after close")


def _abandoned(rank: int, group: Any) -> tuple[str, list[str]]:
    case = named_case("balanced", 2, 16, "fp32")
    x, ids = draw_inputs(case, rank, True).x, case.topk_idx[rank]
    if rank == 1:
        with warnings.catch_warnings(record=True) as seen, pytest.raises(KeyError, match="data loader"):
            warnings.simplefilter("always")
            with open_arena(group, timeout_s=600):
                raise KeyError("data loader")
        return "", [str(warning.message) for warning in seen]
    with open_arena(group, timeout_s=600) as arena, arena.acquire() as lease:
        return raised(PeerTimeoutError, lambda: epbuf.dispatch(lease, x, ids)), []


def test_exception_on_one_rank_reaches_the_others(spread: Spread) -> None:
    """Rule 17: leaving `with` by an exception warns, and the peers get PeerTimeoutError long before timeout_s."""
    (message, _), (_, seen) = spread(2, _abandoned, limit_s=20)
    assert "rank 1" in message and "abandon" in message
    assert any("KeyError" in text for text in seen)


def test_dropped_arena_only_warns() -> None:
    """Rule 17: an arena that is dropped without close() warns and communicates with nobody."""
    arena = open_arena()
    with pytest.warns(ResourceWarning, match=r"close\(\)"):
        del arena
        gc.collect()


def test_claims_may_end_in_another_thread(arena: epbuf.Arena) -> None:
    """Rule 14: a lease whose last reference dies in another thread frees its frame."""
    box = [arena.acquire()]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    arena.acquire().release()


DIFFERENCES: dict[str, tuple[object, object]] = {
    "num_experts": (8, 16),
    "num_topk": (2, 4),
    "hidden": (16, 32),
    "max_tokens_per_rank": (12, 13),
    "token_dtype": ("fp32", "bf16"),
    "recv_capacity_per_rank": (128, 256),
    "capacity_factor": (1.0, 0.5),
    "expert_alignment": (16, 32),
    "inference_only": (False, True),
    "overflow_policy": ("drop", "error"),
    "validate_ids": (False, True),
    "timeout_s": (5, 6),
    "num_frames": (1, 2),
    "num_workspaces": (1, 2),
}


def _different_plans(rank: int, group: Any, field: str) -> str:
    value = DIFFERENCES[field][rank]
    sizes = {"expert_alignment": 16, "token_dtype": "fp32"}
    frames = {"num_frames": 1, "num_workspaces": 1}
    (frames if field in frames else sizes)[field] = value  # type: ignore[index]
    plan = epbuf.Plan.build(base_config(2, **sizes), schedule=epbuf.Schedule(**frames))  # type: ignore[arg-type]
    return raised(PlanMismatchError, lambda: epbuf.Arena.open(plan, group))


@pytest.mark.parametrize("field", list(DIFFERENCES))
def test_plans_that_differ_in_one_field(field: str) -> None:
    """Rule 18: PlanMismatchError on every rank, naming the field and both values."""
    for message in virtual(2, _different_plans, field):
        assert field in message
        assert all(str(value).lower() in message.lower() for value in DIFFERENCES[field])


def test_plan_mismatch_among_processes(pool: Pool) -> None:
    """Rule 18: the same among processes."""
    for message in pool.run(2, _different_plans, "hidden"):
        assert "hidden" in message and "16" in message and "32" in message


def test_leaked_memory_does_not_disturb_other_arenas() -> None:
    """Rule 17: what a dropped or poisoned CUDA arena leaves behind is kept, and later arenas open and close."""
    memory = bytearray(8)
    view = weakref.ref(owner := _Owner(memory))
    generation._leak(owner)
    del owner
    gc.collect()
    assert view() is not None, "the memory is kept"
    with open_arena() as arena:
        assert arena.acquire().frame == 0


class _Owner:
    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
