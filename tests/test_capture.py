"""Contract rules 16, 19, 21 and 22 on CPU: captured steps, the guard, holds, and what warm-up must put back."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import raised, size_of, virtual
from rounds import assert_same, draw_inputs
from routings import base_config, named_case
from torch import Tensor, nn

import epbuf
from epbuf.errors import CapacityError, CaptureError, ConfigError, EpbufError, LeaseError

Spread = Callable[..., list[Any]]
HIDDEN, TOKENS, TOPK = 16, 12, 3


class Model(nn.Module):
    """Two MoE layers: a router, one matrix per local expert, dispatch and combine through one arena."""

    def __init__(self, arena: epbuf.Arena, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        num_experts, num_local_experts = arena.plan.config.num_experts, arena.plan.config.num_local_experts
        self.routers = nn.ParameterList(torch.randn(HIDDEN, num_experts, generator=generator) for _ in range(2))
        self.experts = nn.ParameterList(
            torch.randn(num_local_experts, HIDDEN, HIDDEN, generator=generator) / 4 for _ in range(2)
        )
        self.arena = [arena]  # in a list, so that copies of the model share it

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights, ids = torch.softmax(x @ router, dim=1).topk(TOPK, dim=1)
            x = x + self._layer(x, ids, weights, experts)
        return x

    def _layer(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        with self.arena[0].acquire() as lease:
            recv = epbuf.dispatch(lease, x, ids, weights)
            mask = recv.row_mask()[:, None]
            expert = torch.searchsorted(recv.offs, torch.arange(len(mask)), right=True).clamp(max=len(experts) - 1)
            rows = torch.bmm(torch.where(mask, recv.tokens, 0)[:, None], experts[expert])[:, 0].tanh()
            return epbuf.combine(lease, torch.where(mask, rows, 0), topk_weights=recv.topk_weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        twin = Model(self.arena[0], 0)
        twin.load_state_dict(self.state_dict())
        return twin


def open_arena(group: Any = None, num_frames: int = 2, **config: Any) -> epbuf.Arena:
    sizes = base_config(size_of(group), token_dtype="fp32", expert_alignment=4, **config)
    return epbuf.Arena.open(epbuf.Plan.build(sizes, schedule=epbuf.Schedule(num_frames)), group)


@pytest.fixture
def arena() -> Iterator[epbuf.Arena]:
    with open_arena() as arena:
        yield arena


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    drawn = torch.randn(count, 2, TOKENS, HIDDEN, generator=generator)
    return [(x, target) for x, target in drawn]


def optimizer_of(model: Model, kind: str) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def train_step(model: Model, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def x_of(rank: int = 0) -> Tensor:
    return draw_inputs(named_case("balanced", 1, 1, "fp32"), rank, True).x


def ids_of(arena: epbuf.Arena, first: int = 0) -> Tensor:
    return (torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) + first) % arena.plan.config.num_experts


def echo(arena: epbuf.Arena) -> Callable[[Tensor, Tensor], Tensor]:
    """Make a step whose y is x times the number of its live experts."""

    def step(x: Tensor, ids: Tensor) -> Tensor:
        with arena.acquire() as lease, torch.no_grad():
            return epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)

    return step


def _eager_and_captured(rank: int, group: Any, kind: str) -> list[list[Tensor]]:
    torch.manual_seed(0)
    data = batches(rank, 5)
    with open_arena(group) as arena:
        eager = Model(arena, rank)
        model = copy.deepcopy(eager)
        step = train_step(eager, optimizer_of(eager, kind))
        wanted = [step(x, target).clone() for x, target in data]
        optimizer = optimizer_of(model, kind)
        captured = epbuf.CapturedStep.capture(arena, train_step(model, optimizer), data[-1], restore=(model, optimizer))
        losses = [captured(x, target).clone() for x, target in data]
        captured.check()
        captured.close()
        parameters = [[p.detach().clone() for p in m.parameters()] for m in (eager, model)]
    return [wanted, losses, *parameters]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_replays_equal_eager_training(kind: str, spread: Spread) -> None:
    """Rules 21 and 22: five captured steps on new batches, new routings included, equal eager ones to the bit."""
    for rank, (wanted, losses, eager, captured) in enumerate(spread(2, _eager_and_captured, kind)):
        for number, (want, loss) in enumerate(zip(wanted, losses, strict=True)):
            assert_same(loss, want, f"loss {number} of rank {rank}")
        for want, parameter in zip(eager, captured, strict=True):
            assert_same(parameter, want, f"parameter of rank {rank}")


def test_routing_values_and_live_tokens_change_between_replays(arena: epbuf.Arena) -> None:
    """Rule 21: each replay sees its own routing, values and num_tokens."""

    def step(x: Tensor, ids: Tensor, live: Tensor) -> Tensor:
        with arena.acquire() as lease, torch.no_grad():
            return epbuf.combine(lease, epbuf.dispatch(lease, x, ids, num_tokens=live).tokens)

    captured = epbuf.CapturedStep.capture(arena, step, (x_of(), ids_of(arena), torch.tensor([TOKENS])))
    for number, live in enumerate((12, 5, 0, 7)):
        x, ids = x_of() + number, torch.where(ids_of(arena, number) == 2, -1, ids_of(arena, number))
        wanted = x * (ids >= 0).sum(1, keepdim=True)
        wanted[live:] = 0
        assert_same(captured(x, ids, torch.tensor([live])), wanted, f"y of replay {number}")
    captured.close()


def test_outputs_are_static(arena: epbuf.Arena) -> None:
    """Rule 22: every replay writes into the same output tensor."""
    captured = epbuf.CapturedStep.capture(arena, echo(arena), (x_of(), ids_of(arena)))
    first = captured(x_of(), ids_of(arena))
    place = first.data_ptr()
    second = captured(x_of() + 1, ids_of(arena))
    assert second.data_ptr() == place
    assert_same(first, (x_of() + 1) * 3, "the first output, after the second replay")
    captured.close()


def test_addresses_never_change(arena: epbuf.Arena) -> None:
    """Rule 12: regions have one address in eager steps, warm-up, capture and every replay."""
    seen: set[tuple[int, ...]] = set()

    def step(x: Tensor, ids: Tensor) -> Tensor:
        with arena.acquire() as lease, torch.no_grad():
            recv = epbuf.dispatch(lease, x, ids)
            seen.add((recv.tokens.data_ptr(), recv.offs.data_ptr(), lease.expert_out.data_ptr()))
            return epbuf.combine(lease, recv.tokens)

    step(x_of(), ids_of(arena))
    captured = epbuf.CapturedStep.capture(arena, step, (x_of(), ids_of(arena)))
    for number in range(5):
        captured(x_of() + number, ids_of(arena, number))
    captured.close()
    assert len(seen) == 1


def _interleaved(rank: int, group: Any) -> list[Tensor]:
    """Replay two graphs in changing order with eager steps in between, all on the same frames."""
    x = x_of() + rank
    with open_arena(group, num_frames=1) as arena:
        ids = ids_of(arena)
        train = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        validate = epbuf.CapturedStep.capture(arena, echo(arena), (x[:5], ids[:5]))
        ys = []
        for number, kind in enumerate("tvtteevvetv"):
            if kind == "t":
                ys.append(train(x + number, ids).clone() - number * 3)
            elif kind == "v":
                ys.append(validate(x[:5] + number, ids[:5]).clone() - number * 3)
            else:
                ys.append(echo(arena)(x + number, ids) - number * 3)
        train.close()
        validate.close()
    return ys


def test_graphs_and_eager_steps_share_frames(spread: Spread) -> None:
    """Rules 16 and 20: a hold keeps memory and reserves nothing: two graphs and eager steps take turns on one frame."""
    for rank, ys in enumerate(spread(2, _interleaved)):
        for number, y in enumerate(ys):
            assert_same(y, ((x_of() + rank) * 3)[: len(y)], f"y of step {number} on rank {rank}")


def test_lease_opened_outside_is_used_inside(arena: epbuf.Arena) -> None:
    """Rule 22: a lease opened before the capture may be used in it, and every replay uses its frame."""
    lease = arena.acquire(1)
    place = lease.recv_tokens.data_ptr()
    seen = set()

    def step(x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            recv = epbuf.dispatch(lease, x, ids)
            seen.add(recv.tokens.data_ptr())
            return epbuf.combine(lease, recv.tokens)

    captured = epbuf.CapturedStep.capture(arena, step, (x_of(), ids_of(arena)), warmup=0)
    for number in range(3):
        x = x_of() + number
        assert_same(captured(x, ids_of(arena)), x * 3, f"y of replay {number}")
    captured.close()
    lease.release()
    assert seen == {place}


FORBIDDEN: dict[str, Callable[[epbuf.Arena, epbuf.Received], object]] = {
    "Arena.open": lambda arena, recv: epbuf.Arena.open(epbuf.Plan.build(base_config(1))),
    "close": lambda arena, recv: arena.close(),
    "check": lambda arena, recv: arena.check(),
    "report": lambda arena, recv: arena.report(),
    "trim": lambda arena, recv: recv.trim(),
    "capture": lambda arena, recv: epbuf.CapturedStep.capture(arena, echo(arena), (x_of(), ids_of(arena))),
}


@pytest.mark.parametrize("call", list(FORBIDDEN))
def test_guard_refuses_while_capturing(arena: epbuf.Arena, call: str) -> None:
    """Rule 19: a call that would allocate, register, synchronise or free raises CaptureError, names itself and the
    place of the capture, and leaves the arena as it was.
    """
    runs = 0

    def step(x: Tensor, ids: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        with arena.acquire() as lease, torch.no_grad():
            recv = epbuf.dispatch(lease, x, ids)
            y = epbuf.combine(lease, recv.tokens)
            if runs == 2:  # the first run is the warm-up
                FORBIDDEN[call](arena, recv)
            return y

    with pytest.raises(CaptureError, match=rf"(?s){call}.*test_capture\.py:\d+"):
        epbuf.CapturedStep.capture(arena, step, (x_of(), ids_of(arena)), warmup=1)
    assert_same(echo(arena)(x_of(), ids_of(arena)), x_of() * 3, "y of an eager step afterwards")
    arena.check()


def test_guard_stands_during_replays(arena: epbuf.Arena) -> None:
    """Rule 19: on CPU a replay runs the callable again, under the same guard."""
    allowed = True

    def step(x: Tensor, ids: Tensor) -> Tensor:
        if not allowed:
            arena.report()
        return echo(arena)(x, ids)

    captured = epbuf.CapturedStep.capture(arena, step, (x_of(), ids_of(arena)))
    allowed = False
    with pytest.raises(CaptureError, match="report"):
        captured(x_of(), ids_of(arena))
    captured.close()


def test_guard_is_gone_after_a_failed_capture(arena: epbuf.Arena) -> None:
    """Rule 19: an exception of the step leaves no capture, no claim and no hold behind."""

    def step(x: Tensor, ids: Tensor) -> Tensor:
        with arena.acquire() as lease:
            epbuf.dispatch(lease, x, ids)
            raise KeyError("step")

    with pytest.raises(KeyError, match="step"):
        epbuf.CapturedStep.capture(arena, step, (x_of(), ids_of(arena)))
    assert arena.report()["graphs"] == []
    assert_same(echo(arena)(x_of(), ids_of(arena)), x_of() * 3, "y of an eager step afterwards")


def test_other_arenas_stay_usable_while_one_is_captured(arena: epbuf.Arena) -> None:
    """Rule 19: an arena that takes no part in the capture refuses nothing."""
    with open_arena() as other:

        def step(x: Tensor, ids: Tensor) -> Tensor:
            other.check()
            return echo(arena)(x, ids)

        captured = epbuf.CapturedStep.capture(arena, step, (x_of(), ids_of(arena)))
        assert_same(captured(x_of(), ids_of(arena)), x_of() * 3, "y")
        captured.close()


def _keeps_lease(arena: epbuf.Arena, x: Tensor, ids: Tensor) -> list[object]:
    lease = arena.acquire()
    with torch.no_grad():
        epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)
    return [lease]


def _keeps_received(arena: epbuf.Arena, x: Tensor, ids: Tensor) -> list[object]:
    with arena.acquire() as lease, torch.no_grad():
        recv = epbuf.dispatch(lease, x, ids)
        epbuf.combine(lease, recv.tokens)
    return [recv]


def _keeps_graph(arena: epbuf.Arena, x: Tensor, ids: Tensor) -> list[object]:
    with arena.acquire() as lease:
        return [epbuf.combine(lease, epbuf.dispatch(lease, x.requires_grad_(), ids).tokens)]


@pytest.mark.parametrize(
    ("keep", "word"),
    [
        pytest.param(_keeps_lease, "lease", id="lease"),
        pytest.param(_keeps_received, "Received|ticket", id="received"),
        pytest.param(_keeps_graph, "graph|ticket", id="graph"),
    ],
)
def test_claim_that_outlives_its_capture(
    arena: epbuf.Arena, keep: Callable[[epbuf.Arena, Tensor, Tensor], list[object]], word: str
) -> None:
    """Rule 22: a claim made inside the step that still lives afterwards is a CaptureError that names it."""
    kept: list[object] = []

    def step(x: Tensor, ids: Tensor) -> None:
        kept.clear()
        kept.extend(keep(arena, x, ids))

    with pytest.raises(CaptureError, match=rf"(?s)({word}).*frame 0.*test_capture\.py:\d+"):
        epbuf.CapturedStep.capture(arena, step, (x_of(), ids_of(arena)), warmup=1)
    kept.clear()
    assert_same(echo(arena)(x_of(), ids_of(arena)), x_of() * 3, "y of an eager step afterwards")


def _state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "gradients": [p.grad.clone() for p in model.parameters() if p.grad is not None],
        "optimiser": [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)],
        "random": [torch.get_rng_state(), torch.rand(4, generator=torch.Generator().set_state(torch.get_rng_state()))],
    }


@pytest.mark.parametrize("part", ["parameters", "gradients", "optimiser", "random"])
def test_capture_puts_back_what_warm_up_changed(arena: epbuf.Arena, part: str) -> None:
    """Rule 22: parameters, gradients, optimiser state and RNG are after capture what they were before."""
    model = Model(arena, 0)
    optimizer = optimizer_of(model, "adam")
    [(x, target), other] = batches(0, 2)
    inner = train_step(model, optimizer)
    inner(x, target)
    runs = 0

    def step(x: Tensor, target: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return inner(x + 0.1 * torch.rand(TOKENS, HIDDEN), target)

    before = _state(model, optimizer)
    captured = epbuf.CapturedStep.capture(arena, step, other, restore=(model, optimizer))
    after = _state(model, optimizer)
    assert runs >= 3 and len(before[part]) == len(after[part]) > 0
    for was, now in zip(before[part], after[part], strict=True):
        assert_same(now, was, part)
    captured.close()


def test_capture_puts_back_buffers_and_generators(arena: epbuf.Arena) -> None:
    """Rule 22: buffers of modules, plain tensors and generators given in `restore` are put back too."""
    norm, counter, generator = nn.BatchNorm1d(HIDDEN), torch.zeros(1), torch.Generator().manual_seed(3)

    def step(x: Tensor, ids: Tensor) -> Tensor:
        counter.add_(1)
        return echo(arena)(norm(x).detach() + torch.rand(1, generator=generator), ids)

    captured = epbuf.CapturedStep.capture(arena, step, (x_of(), ids_of(arena)), restore=(norm, counter, generator))
    assert norm.running_mean is not None
    assert_same(norm.running_mean, torch.zeros(HIDDEN), "running mean")
    assert_same(counter, torch.zeros(1), "counter")
    assert_same(
        torch.rand(4, generator=generator), torch.rand(4, generator=torch.Generator().manual_seed(3)), "random numbers"
    )
    captured.close()


def test_example_inputs_are_left_alone(arena: epbuf.Arena) -> None:
    """Rule 22: the static inputs are copies: replays never write into the tensors that the caller gave."""
    x, ids = x_of(), ids_of(arena)
    captured = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
    captured(x + 5, ids_of(arena, 1))
    assert_same(x, x_of(), "example input")
    assert_same(ids, ids_of(arena), "example ids")
    captured.close()


def test_close_is_refused_while_a_graph_lives(arena: epbuf.Arena) -> None:
    """Rule 16: close() lists the living graph with the place of its capture, and works once that is closed."""
    captured = epbuf.CapturedStep.capture(arena, echo(arena), (x_of(), ids_of(arena)))
    with pytest.raises(EpbufError, match=r"(?s)close\(\).*test_capture\.py:\d+"):
        arena.close()
    assert_same(captured(x_of(), ids_of(arena)), x_of() * 3, "y after the refused close")
    captured.close()
    arena.close()


def test_dropped_graph_holds_nothing(arena: epbuf.Arena) -> None:
    """Rule 16: a graph that is dropped, not closed, ends its hold."""
    captured = epbuf.CapturedStep.capture(arena, echo(arena), (x_of(), ids_of(arena)))
    assert len(arena.report()["graphs"]) == 1
    del captured
    assert arena.report()["graphs"] == []
    arena.close()


def test_closed_step_refuses(arena: epbuf.Arena) -> None:
    """A closed step says so; closing twice does nothing more."""
    captured = epbuf.CapturedStep.capture(arena, echo(arena), (x_of(), ids_of(arena)))
    captured.close()
    captured.close()
    with pytest.raises(EpbufError, match="closed"):
        captured(x_of(), ids_of(arena))


def test_capture_on_a_closed_arena() -> None:
    """A closed arena cannot be captured."""
    with open_arena() as arena:
        step, ids = echo(arena), ids_of(arena)
    with pytest.raises(LeaseError, match="closed"):
        epbuf.CapturedStep.capture(arena, step, (x_of(), ids))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda x, ids: (x[:5], ids), r"(?s)12, 16.*5, 16", id="shape"),
        pytest.param(lambda x, ids: (x.double(), ids), r"(?s)float32.*float64", id="dtype"),
        pytest.param(lambda x, ids: (x,), r"2.*1", id="count"),
        pytest.param(lambda x, ids: (x, None), r"None", id="kind"),
    ],
)
def test_replay_with_other_inputs(arena: epbuf.Arena, change: Callable[..., tuple[Any, ...]], says: str) -> None:
    """Inputs unlike those of the capture are refused before anything is copied, with both descriptions."""
    captured = epbuf.CapturedStep.capture(arena, echo(arena), (x_of(), ids_of(arena)))
    with pytest.raises(ConfigError, match=says):
        captured(*change(x_of() + 1, ids_of(arena)))
    assert_same(captured(x_of(), ids_of(arena)), x_of() * 3, "y of the next replay")
    captured.close()


TIGHT = {"recv_capacity_per_rank": 48}  # balanced routing fits, one expert for all tokens of both ranks does not


def _overflowing(rank: int, group: Any, policy: str) -> dict[str, Any]:
    x = x_of() + rank
    seen: list[str] = []
    with open_arena(group, overflow_policy="error" if policy == "error" else "drop", **TIGHT) as arena:
        easy, hard = ids_of(arena), torch.zeros(TOKENS, TOPK, dtype=torch.int64)

        def step(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            with arena.acquire() as lease, torch.no_grad():
                recv = epbuf.dispatch(lease, x, ids)
                return epbuf.combine(lease, recv.tokens), recv.overflow.clone()

        reaction: Any = {"callback": lambda _: seen.append("called"), "error": None}.get(policy, policy)
        captured = epbuf.CapturedStep.capture(arena, step, (x, easy), on_overflow=reaction)
        flags = [float(captured(x, ids)[1]) for ids in (easy,)]
        flags.append(float(captured(x, hard)[1]))
        message = ""
        try:
            captured.check()
        except CapacityError as error:
            message = str(error)
        y, flag = captured(x, easy)
        result = {"flags": [*flags, float(flag)], "message": message, "seen": seen, "y": y.clone()}
        captured.close()
    return result


@pytest.mark.parametrize("policy", ["raise", "skip", "callback", "error"])
def test_overflow_in_a_replay(policy: str) -> None:
    """Rule 10: a replay that overflows completes, flags all ranks, reacts as on_overflow says at the next check, and
    the replay after it is right.
    """
    for rank, found in enumerate(virtual(2, _overflowing, policy)):
        assert found["flags"] == [0, 1, 0]
        assert (found["message"] != "") == (policy in ("raise", "error"))
        assert (found["message"] == "") or "48" in found["message"]
        assert found["seen"] == (["called"] if policy == "callback" else [])
        assert_same(found["y"], (x_of() + rank) * 3, f"y of the next replay on rank {rank}")


def _bad_id(rank: int, group: Any) -> tuple[str, Tensor]:
    x = x_of() + rank
    with open_arena(group, validate_ids=True) as arena:
        ids = ids_of(arena)
        bad = ids.clone()
        if rank == 1:
            bad[4, 0] = 99
        captured = epbuf.CapturedStep.capture(arena, echo(arena), (x, ids))
        captured(x, bad)
        message = raised(ConfigError, captured.check)
        y = captured(x, ids).clone()
        captured.close()
        return message, y


def test_bad_id_in_a_replay() -> None:
    """Rule 4: captured, a bad id is counted in the replay and raised on every rank at the step's check."""
    for rank, (message, y) in enumerate(virtual(2, _bad_id)):
        assert "rank 1" in message and "99" in message
        assert_same(y, (x_of() + rank) * 3, f"y of the next replay on rank {rank}")


def _barriers(rank: int, group: Any) -> tuple[float, float]:
    """Rank 1 comes late to capture; return when this rank came and when its step first ran."""
    arrived: list[float] = []
    with open_arena(group) as arena:
        if rank == 1:
            time.sleep(0.5)
        came = time.monotonic()

        def step(x: Tensor) -> Tensor:
            arrived.append(time.monotonic())
            return x + 1

        epbuf.CapturedStep.capture(arena, step, (x_of(),)).close()
        return came, arrived[0]


def test_capture_begins_with_a_barrier() -> None:
    """Rule 22: no rank runs its step before every rank has entered capture, even when the step has no epbuf op."""
    (_, first), (came, _) = virtual(2, _barriers)
    assert first >= came
