"""engine="nccl_ep" without NCCL: refusals, plan, the missing extra, and the adapter over a library that is played."""

from __future__ import annotations

import builtins
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from played_nccl_ep import played
from ranks import Pool, raised
from rounds import NAN, assert_round, assert_same, draw_inputs, expected, play_round, reuse_early
from routings import CAPACITY_OFFSETS, NAMED, Case, named_case
from torch import Tensor

import epbuf
from epbuf import reference
from epbuf.engine import Encoded, StreamState
from epbuf.engines import nccl_ep, nccl_ep_library
from epbuf.errors import CapacityError, ConfigError, LeaseError

MIB = 1 << 20
WRITTEN = ("recv_tokens", "recv_topk_weights")  # past the last zone, too
BUT = ("slot_map",)  # the library keeps slots to itself


def config_of(num_ranks: int = 2, **changes: Any) -> epbuf.EpConfig:
    sizes: dict[str, Any] = {"num_experts": 4 * num_ranks, "num_topk": 2, "hidden": 8, "max_tokens_per_rank": 6}
    return epbuf.EpConfig(num_ranks=num_ranks, token_dtype="fp32", **{"timeout_s": 20.0, **sizes, **changes})


# Plan


def test_plan_counts_what_the_library_allocates() -> None:
    """1664 MiB of staging were measured for these sizes; the map of routing adds one."""
    config = epbuf.EpConfig(
        num_ranks=8, num_experts=256, num_topk=8, hidden=7168, max_tokens_per_rank=4096, recv_capacity_per_rank=49152,
        expert_alignment=128,
    )  # fmt: skip
    plan = epbuf.Plan.build(config, engine="nccl_ep")
    assert plan.engine_bytes == 1665 * MIB
    assert "beside it, by NCCL EP" in str(plan) and "1,745,879,040 bytes" in str(plan)
    native = epbuf.Plan.build(config)
    assert native.engine_bytes == 0 and "NCCL EP" not in str(native)


def test_plan_of_our_own_engine_is_as_it_was() -> None:
    """The fingerprint does not change for who does not use the engine."""
    config = config_of()
    assert epbuf.Plan.build(config, engine="native").fingerprint == epbuf.Plan.build(config).fingerprint
    assert epbuf.Plan.build(config, engine="nccl_ep").fingerprint != epbuf.Plan.build(config).fingerprint


def test_each_frame_has_memory_of_a_handle() -> None:
    plan = epbuf.Plan.build(config_of(), epbuf.Schedule(3), engine="nccl_ep")
    regions = [r for r in plan.regions if r.name == "nccl_ep_handle"]
    assert [(r.index, r.lifetime) for r in regions] == [(0, "frame"), (1, "frame"), (2, "frame")]
    assert len({r.nbytes for r in regions}) == 1


@pytest.mark.parametrize(
    ("changes", "arguments", "found"),
    [
        ({"num_ranks": 1, "num_experts": 4}, {}, "num_ranks=1"),
        ({"num_experts": 6}, {}, "num_experts=6"),
        ({"num_topk": 9}, {}, "num_topk=9"),
        ({"recv_capacity_per_rank": 5}, {}, "a capacity of 5 rows"),
        ({}, {"recv_policy": "recompute"}, "recv_policy='recompute'"),
        ({}, {"recv_policy": "stash"}, "recv_policy='stash'"),
        ({"wire": "dedup"}, {}, "wire='dedup'"),
        ({"combine_order": "by_rank"}, {}, "combine_order='by_rank'"),
        ({"alias": [("grad_expert_out", "grad_recv_tokens")]}, {}, "alias="),
        ({"hidden": 32, "combine_grad_payload": "mxfp8"}, {}, "combine_grad_payload='mxfp8'"),
        ({"hidden": 32, "dispatch_payload": "nvfp4"}, {}, "dispatch_payload='nvfp4'"),
        (
            {"hidden": 32, "dispatch_payload": epbuf.Payload.mxfp8(scale_layout="blocked"), "expert_alignment": 128},
            {},
            "dispatch_payload='mxfp8 blocked'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_library_cannot_do_is_refused_by_name(changes: Any, arguments: Any, found: str) -> None:
    config = config_of(**changes)
    message = raised(ConfigError, lambda: epbuf.Plan.build(config, engine="nccl_ep", **arguments))
    assert found in message and "engine='native'" in message


def test_unknown_engine_of_a_plan_is_refused() -> None:
    message = raised(ConfigError, lambda: epbuf.Plan.build(config_of(), engine="nccl"))  # type: ignore[arg-type]
    assert message.startswith("Plan.build(engine='nccl')")


def test_experts_of_a_domain_are_checked_when_domains_are_known() -> None:
    nccl_ep_library._check_domains(8, 2)
    assert "found 4 NVLink domains with 2 of num_experts=8" in raised(
        ConfigError, lambda: nccl_ep_library._check_domains(8, 4)
    )


# What is not there


def _without_extra(rank: int, group: Any, lacks: tuple[int, ...]) -> str:
    plan = epbuf.Plan.build(config_of(), engine="nccl_ep")
    with nullcontext() if rank in lacks else mock.patch("epbuf.arena.check_fit"):
        return raised(ConfigError, lambda: epbuf.Arena.open(plan, group, engine="nccl_ep"))


def test_missing_extra_is_named(pool: Pool) -> None:
    """What is missing, and how to get it."""
    for message in pool.run(2, _without_extra, (0, 1)):
        assert message.startswith('engine="nccl_ep" needs nccl.core') and "epbuf[nccl-ep]" in message


def test_extra_that_one_rank_lacks_is_named_on_all(pool: Pool) -> None:
    first, second = pool.run(2, _without_extra, (1,))
    assert first.startswith('rank 1 refuses Arena.open: engine="nccl_ep" needs nccl.core')
    assert second.startswith('engine="nccl_ep" needs nccl.core')


def test_broken_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an import raises is shown: a missing library of CUDA is no missing package."""
    real = builtins.__import__

    def broken(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("nccl"):
            raise OSError("libnccl_ep.so: cannot open")
        return real(name, *args, **options)

    monkeypatch.setattr(nccl_ep_library.importlib, "import_module", lambda name: broken(name))
    assert "OSError: libnccl_ep.so: cannot open" in nccl_ep_library.missing()
    assert "nccl" not in sys.modules


@pytest.mark.parametrize(
    ("planned", "engine", "message"),
    [
        ("native", "nccl_ep", 'build it with Plan.build(config, schedule, engine="nccl_ep")'),
        ("nccl_ep", "native", 'pass engine="nccl_ep"'),
    ],
    ids=["plan_without", "engine_without"],
)
def test_plan_and_engine_must_fit(pool: Pool, planned: Any, engine: str, message: str) -> None:
    for found in pool.run(2, _unfit, planned, engine):
        assert message in found


def _unfit(rank: int, group: Any, planned: Any, engine: str) -> str:
    plan = epbuf.Plan.build(config_of(), engine=planned)
    return raised(ConfigError, lambda: epbuf.Arena.open(plan, group, engine=engine))


def _by_hand(rank: int, group: Any) -> tuple[int, int, list[int]]:
    plan = epbuf.Plan.build(config_of(), engine="nccl_ep")
    with epbuf.Arena.open(plan, group, engine="external", window="own") as arena, arena.acquire() as lease:
        lease.nccl_ep_handle.fill_(1)
        base = arena.window.peers[rank]
        offset = lease.window_of("nccl_ep_handle")[1]
        assert lease.nccl_ep_handle.data_ptr() == base + offset
        return lease.nccl_ep_handle.nbytes, plan.region("nccl_ep_handle").nbytes, arena.window.peers


def test_external_arena_has_handle_memory_in_a_window_of_its_own(pool: Pool) -> None:
    """Who calls the library by hand has its handle's memory in our window, which no peer addresses."""
    for nbytes, planned, peers in pool.run(2, _by_hand):
        assert nbytes == planned
        assert len(peers) == 2 and peers[0] == peers[1]


def _own_window(rank: int, group: Any) -> str:
    plan = epbuf.Plan.build(config_of())
    return raised(ConfigError, lambda: epbuf.Arena.open(plan, group, window="own"))


def test_own_window_is_not_for_our_engine(pool: Pool) -> None:
    assert all('which engine="native" needs' in message for message in pool.run(2, _own_window))


def _other_window(rank: int, group: Any) -> str:
    with played():
        plan = epbuf.Plan.build(config_of(), engine="nccl_ep")
        return raised(ConfigError, lambda: epbuf.Arena.open(plan, group, engine="nccl_ep", window="host"))


def test_window_of_the_library_is_its_own(pool: Pool) -> None:
    assert all('found window="host"' in message for message in pool.run(2, _other_window))


# The adapter, over a library that is played


def _open(group: Any, config: epbuf.EpConfig, num_frames: int = 1) -> epbuf.Arena:
    plan = epbuf.Plan.build(config, epbuf.Schedule(num_frames), engine="nccl_ep")
    return epbuf.Arena.open(plan, group, engine="nccl_ep")


def _case(routing: str, num_ranks: int, alignment: int, token_dtype: str = "fp32") -> Case:
    return named_case(routing, num_ranks, alignment, token_dtype, num_experts=4 * num_ranks)


def _rounds(rank: int, group: Any, case: Case, weighted: bool) -> dict[str, Tensor]:
    with played(), _open(group, case.config) as arena:
        inputs = draw_inputs(case, rank, whole=True)
        play_round(arena, inputs, weighted)
        return play_round(arena, inputs, weighted)


ROUTINGS = [name for name in NAMED if name != "duplicates"]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_contract_holds(pool: Pool, routing: str, alignment: int, weighted: bool) -> None:
    """Everything but slot_map is what the reference says, whole numbers so that no order of sums shows."""
    case = _case(routing, 2, alignment)
    got = pool.run(2, _rounds, case, weighted)
    for rank, want in enumerate(expected(case, weighted, True)):
        assert_round(got[rank], want, f"{case.name}, rank {rank}", BUT, written=WRITTEN)


def _debugged(rank: int, group: Any) -> None:
    case = _case("balanced", 2, 16)
    plan = epbuf.Plan.build(case.config, engine="nccl_ep")
    with played(), epbuf.Arena.open(plan, group, engine="nccl_ep", debug=True) as arena:
        for _ in range(2):
            play_round(arena, draw_inputs(case, rank, whole=True), False)
        arena.check()


def test_debug_mode_lets_the_library_write_past_the_zones(pool: Pool) -> None:
    pool.run(2, _debugged)


@pytest.mark.parametrize("token_dtype", ["bf16", "fp16"])
def test_contract_holds_on_four_ranks(pool: Pool, token_dtype: str) -> None:
    for routing in ("some_negative", "one_row_over", "different_t"):
        case = _case(routing, 4, 16, token_dtype)
        got = pool.run(4, _rounds, case, True)
        for rank, want in enumerate(expected(case, True, True)):
            assert_round(got[rank], want, f"{case.name}, rank {rank}", BUT, written=WRITTEN)


def _twice(rank: int, group: Any) -> list[str]:
    """One rank names an expert twice; all refuse, and the next round is right."""
    case, twice = _case("balanced", 2, 1), _case("duplicates", 2, 1)
    config = twice.config
    with played(), _open(group, config) as arena:
        x, messages = torch.ones(6, config.hidden), []
        ids = twice.topk_idx[rank][:6] if rank == 1 else case.topk_idx[rank][:6]
        lease = arena.acquire()
        messages.append(raised(ConfigError, lambda: epbuf.dispatch(lease, x, ids)))
        assert arena.report()["num_refusals"] == 1
        with torch.no_grad():
            epbuf.combine(lease, epbuf.dispatch(lease, x, case.topk_idx[rank][:6]).tokens)
        lease.release()
        return messages


def test_repeated_expert_is_refused_on_all_ranks(pool: Pool) -> None:
    for (message,) in pool.run(2, _twice):
        assert message.startswith("rank 1 refused dispatch: an expert that one token names twice")


def _twice_in_a_graph(rank: int, group: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Route as a graph that is replayed does: nothing is read, so the round runs to its end."""
    twice = _case("duplicates", 2, 1)
    x = draw_inputs(twice, rank, True).x
    with played(), _open(group, twice.config) as arena, torch.no_grad(), arena.acquire() as lease:
        with mock.patch.object(nccl_ep.NcclEpEngine, "capture_key", lambda self: 1):
            recv = epbuf.dispatch(lease, x, twice.topk_idx[rank])
            got = {name: getattr(recv, name).clone() for name in ("tokens", "offs", "valid_tokens_per_expert")}
            epbuf.combine(lease, recv.tokens)
        control = arena.memory.engine.status()
        words = {n: int(getattr(control, n)) for n in ("num_refusals", "refusing_rank", "refusal", "refused_op")}
        return got, words


def test_repeated_expert_in_a_replay_is_sent_once_and_counted_on_all_ranks(pool: Pool) -> None:
    """Zones are those of the ids without repeats, on every rank, so that nobody else's rows are wrong."""
    twice = _case("duplicates", 2, 1)
    once = [ids.clone() for ids in twice.topk_idx]
    for ids in once:
        for token in ids:
            for k in range(1, len(token)):
                if token[k] in token[:k]:
                    token[k] = -1
    capacity = epbuf.Plan.build(twice.config).capacity_rows
    routing = reference.route(twice.config, capacity, once)
    x = [draw_inputs(twice, rank, True).x for rank in range(2)]
    rows, _, _ = reference.dispatch(twice.config, capacity, routing, x, None)
    for rank, (got, words) in enumerate(pool.run(2, _twice_in_a_graph)):
        assert words == {"num_refusals": 1, "refusing_rank": 0, "refusal": 14, "refused_op": 1}
        assert_same(got["offs"], routing.offs[rank], "offs")
        assert_same(got["valid_tokens_per_expert"], routing.valid_tokens_per_expert[rank], "valid rows")
        end = int(routing.offs[rank][-1])
        assert_same(got["tokens"][:end], rows[rank][:end], "rows")


def _as_recorded(rank: int, group: Any, case: Case) -> dict[str, Tensor]:
    """Play rounds as a graph that is replayed does: nothing is read on the host."""
    state = StreamState(0, 0)
    with (
        played(),
        _open(group, case.config) as arena,
        mock.patch.object(nccl_ep.NcclEpEngine, "capture_key", lambda self: 1),
        mock.patch.object(nccl_ep.NcclEpEngine, "stream_state", lambda self: state),
    ):
        inputs = draw_inputs(case, rank, whole=True)
        play_round(arena, inputs, True)
        return play_round(arena, inputs, True)


@pytest.mark.parametrize("routing", [*CAPACITY_OFFSETS, "too_large", "num_tokens_int64"])
def test_contract_holds_when_nothing_is_read(pool: Pool, routing: str) -> None:
    """Rows at or past the capacity are dropped by position, and never reach the library, which would trap."""
    case = _case(routing, 2, 16)
    got = pool.run(2, _as_recorded, case)
    for rank, want in enumerate(expected(case, True, True)):
        assert_round(got[rank], want, f"{case.name}, rank {rank}", BUT, written=WRITTEN)


def _refuses(rank: int, group: Any) -> str:
    config = config_of()
    with played(), _open(group, config) as arena, arena.acquire() as lease:
        x = torch.ones(7 if rank == 0 else 6, config.hidden)
        ids = torch.zeros(len(x), 2, dtype=torch.int64)
        ids[:, 1] = 1
        return raised(ConfigError, lambda: epbuf.dispatch(lease, x, ids))


def test_bad_argument_of_one_rank_is_known_to_all(pool: Pool) -> None:
    first, second = pool.run(2, _refuses)
    assert "x has 7 tokens" in first
    assert second.startswith("rank 0 refused dispatch: more tokens than max_tokens_per_rank")


def _refuses_later(rank: int, group: Any, where: str) -> list[str]:
    """Refuse in combine, or after release, on one rank; then dispatch, which all refuse; then dispatch again.

    What the first dispatch gave stays alive: the workspace of a refused combine must be free all the same.
    """
    config = config_of()
    x, ids = torch.ones(6, config.hidden), torch.tensor([[0, 5]] * 6)
    messages = []
    with played(), _open(group, config, 2) as arena, torch.no_grad():
        lease = arena.acquire()
        recv = epbuf.dispatch(lease, x, ids)
        if rank == 0 and where == "released":
            lease.release()
        rows = recv.tokens if rank or where == "released" else recv.tokens.double()
        combine = partial(epbuf.combine, lease, rows)
        messages += [raised((ConfigError, LeaseError), combine)] if rank == 0 else combine().new_empty(0).tolist()
        if not lease.released:
            lease.release()
        with arena.acquire() as lease:
            messages.append(raised((ConfigError, LeaseError), lambda: epbuf.dispatch(lease, x, ids)))
        with arena.acquire() as lease:
            y = epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)
        assert bool((y == 2).all())
    return messages


@pytest.mark.parametrize(("where", "cause"), [("dtype", "wrong dtype"), ("released", "out of order")])
def test_refusal_in_combine_reaches_all_at_the_next_dispatch(pool: Pool, where: str, cause: str) -> None:
    first, second = pool.run(2, _refuses_later, where)
    assert len(first) == 2 and len(second) == 1
    assert first[1] == second[0] and second[0].startswith("rank 0 refused dispatch") and cause in second[0]


def _refused_out(rank: int, group: Any, kind: str) -> tuple[str, bool]:
    """Give combine an `out` on rank 0 that it refuses; return the message, and whether `out` is as it was."""
    config = config_of()
    x, ids = torch.ones(6, config.hidden), torch.tensor([[0, 5]] * 6)
    with played(), _open(group, config) as arena, torch.no_grad(), arena.acquire() as lease:
        rows = epbuf.dispatch(lease, x, ids).tokens
        if rank == 1:
            epbuf.combine(lease, rows)
            return "", True
        outs = {
            "short": torch.zeros(5, config.hidden),
            "dtype": torch.zeros(6, config.hidden, dtype=torch.float16),
            "narrow": torch.zeros(6, config.hidden // 2),
            "device": torch.zeros(6, config.hidden, device="meta"),
            "overlap": lease.expert_out.zero_()[:6],
        }
        message = raised(ConfigError, lambda: epbuf.combine(lease, rows, out=outs[kind]))
        return message, kind == "device" or bool((outs[kind] == 0).all())


@pytest.mark.parametrize("kind", ["short", "dtype", "narrow", "device", "overlap"])
def test_refused_out_is_not_written(pool: Pool, kind: str) -> None:
    message, is_unwritten = pool.run(2, _refused_out, kind)[0]
    assert message.startswith("out ") and is_unwritten


def _recorded_after_a_refusal(rank: int, group: Any) -> str:
    """Refuse in combine on one rank, record a dispatch, then dispatch eagerly."""
    config = config_of()
    x, ids = torch.ones(6, config.hidden), torch.tensor([[0, 5]] * 6)
    with played(), _open(group, config) as arena, torch.no_grad():
        with arena.acquire() as lease:
            rows = epbuf.dispatch(lease, x, ids).tokens
            if rank == 0:
                raised(ConfigError, lambda: epbuf.combine(lease, rows.double()))
            else:
                epbuf.combine(lease, rows)
        with arena.acquire() as lease, mock.patch.object(nccl_ep.NcclEpEngine, "capture_key", lambda self: 1):
            epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)
        assert int(arena.memory.engine.status().num_refusals) == 0
        with arena.acquire() as lease:
            return raised(ConfigError, lambda: epbuf.dispatch(lease, x, ids))


def test_refusal_in_combine_is_recorded_into_no_graph(pool: Pool) -> None:
    """It would come again with every replay; the next eager dispatch tells it."""
    for message in pool.run(2, _recorded_after_a_refusal):
        assert message.startswith("rank 0 refused dispatch")


def _policies(rank: int, group: Any) -> list[str]:
    config = config_of(recv_capacity_per_rank=6, overflow_policy="error", validate_ids=True)
    found = []
    with played(), _open(group, config) as arena:
        x = torch.ones(6, config.hidden)
        over = torch.tensor([[0, 1]] * 6)
        bad = torch.tensor([[4 * rank, -1]] * 6)
        if rank == 1:
            bad[4, 1] = 99
        for kind, ids in ((CapacityError, over), (ConfigError, bad)):
            with arena.acquire() as lease:
                found.append(raised(kind, lambda lease=lease, ids=ids: epbuf.dispatch(lease, x, ids)))
        report = arena.report()
        assert (report["num_overflows"], report["num_bad_ids"], report["demand_peak_rows"]) == (1, 1, 24)
    return found


def test_policies_raise_on_all_ranks(pool: Pool) -> None:
    for over, bad in pool.run(2, _policies):
        assert "rank 0 needs 24 rows" in over and "recv_capacity_per_rank is 6" in over
        assert bad.startswith("rank 1 routes token 4 to expert 99")


def _grows(rank: int, group: Any) -> tuple[int, bool]:
    config = config_of(recv_capacity_per_rank=6)
    with played(), _open(group, config) as arena:
        x, ids = torch.ones(6, config.hidden), torch.tensor([[0, 1]] * 6)
        with arena.growing(), torch.no_grad(), arena.acquire() as lease:
            y = epbuf.combine(lease, epbuf.dispatch(lease, x, ids).tokens)
        return arena.capacity_rows, bool((y == 2).all())


def test_arena_grows(pool: Pool) -> None:
    assert pool.run(2, _grows) == [(24, True)] * 2


def _captured(rank: int, group: Any) -> int:
    case = _case("balanced", 2, 1)
    with played(), _open(group, case.config, 2) as arena:
        steps = []
        for _ in range(2):

            def step(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
                x = x.clone().requires_grad_()
                with arena.acquire() as lease:
                    recv = epbuf.dispatch(lease, x, ids, weights)
                    y = epbuf.combine(lease, 2 * recv.tokens, topk_weights=recv.topk_weights)
                return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]

            inputs = draw_inputs(case, rank, whole=True)
            steps.append(epbuf.CapturedStep.capture(arena, step, (inputs.x, inputs.topk_idx, inputs.topk_weights)))
        assert "2 graph(s) hold this memory" in raised(LeaseError, arena.close)
        for number in range(6):
            generator = torch.Generator().manual_seed(10 * number + rank)
            x = torch.randint(-3, 4, inputs.x.shape, generator=generator).float()
            ids = torch.rand(len(x), case.config.num_experts, generator=generator).topk(3).indices
            weights = torch.randint(0, 3, ids.shape, generator=generator).float()
            y, dx = steps[number % 2](x, ids, weights)
            assert_same(y, 2 * weights.sum(1, keepdim=True) * x, f"y of replay {number}")
            assert_same(dx, (2 * weights.sum(1, keepdim=True)).expand_as(x), f"dx of replay {number}")
        for each in steps:
            each.close()
        return arena.report()["num_frames_high_water"]


def test_two_captured_steps_share_an_arena(pool: Pool) -> None:
    assert pool.run(2, _captured) == [1, 1]


def _mxfp8(rank: int, group: Any, hidden: int) -> dict[str, Tensor]:
    """Send rows that are quantised already; H/32 scales are padded to 16 bytes on the way."""
    config = config_of(dispatch_payload="mxfp8", hidden=hidden, expert_alignment=4)
    x, ids = _mxfp8_input(config, rank)
    payload = reference.quantise(epbuf.Payload.mxfp8(), x)
    with played(), _open(group, config) as arena, torch.no_grad(), arena.acquire() as lease:
        lease.recv_tokens.view(torch.uint8).fill_(0xFF)
        assert "quantise them" in raised(ConfigError, lambda: epbuf.dispatch(lease, x, ids))
        scales = payload.scales.view(torch.float8_e8m0fnu)
        recv = epbuf.dispatch(lease, payload.data.view(torch.float8_e4m3fn), ids, x_scales=scales)
        assert recv.scales is not None
        rows = int(recv.offs[-1])
        decoded = recv.dequantize()[:rows]
        return {
            "data": recv.tokens.view(torch.uint8)[:rows].clone(),
            "scales": recv.scales.view(torch.uint8)[:rows].clone(), "decoded": decoded.clone(),
        }  # fmt: skip


def _mxfp8_input(config: epbuf.EpConfig, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(6, config.num_experts, generator=generator).topk(2).indices
    return torch.randn(6, config.hidden, generator=generator), ids


@pytest.mark.parametrize("hidden", [32, 512, 2880])
def test_mxfp8_rows_arrive_with_their_scales(pool: Pool, hidden: int) -> None:
    config = config_of(dispatch_payload="mxfp8", hidden=hidden, expert_alignment=4)
    x, ids = zip(*(_mxfp8_input(config, rank) for rank in range(2)), strict=True)
    capacity = epbuf.Plan.build(config).capacity_rows
    routing = reference.route(config, capacity, ids)
    want = reference.dispatch_quantised(config, capacity, routing, epbuf.Payload.mxfp8(), x)
    for rank, got in enumerate(pool.run(2, _mxfp8, hidden)):
        rows = int(routing.offs[rank][-1])
        assert_same(got["data"], want[rank].data[:rows], f"data of rank {rank}")
        assert_same(got["scales"], want[rank].scales[:rows], f"scales of rank {rank}")
        assert_same(
            got["decoded"], reference.dequantise(epbuf.Payload.mxfp8(), want[rank], torch.float32)[:rows], "decoded"
        )


def _combine_input(rank: int, group: Any) -> bool:
    """What combine reads is not changed, and its own region is read in place."""
    config = config_of()
    x, ids = torch.ones(6, config.hidden), torch.tensor([[0, 5]] * 6)
    with played(), _open(group, config) as arena, torch.no_grad(), arena.acquire() as lease:
        recv = epbuf.dispatch(lease, x, ids)
        lease.expert_out.copy_(3 * recv.tokens)
        before = lease.expert_out.clone()
        view = lease.expert_out
        out = torch.full((6, 2 * config.hidden), NAN)[:, : config.hidden]
        y = epbuf.combine(lease, view, out=out)
        return bool((y == 6).all()) and torch.equal(view, before) and y.data_ptr() == out.data_ptr()


def test_combine_reads_our_region_in_place(pool: Pool) -> None:
    assert pool.run(2, _combine_input) == [True, True]


def test_ranks_that_share_a_gpu_share_its_multiprocessors() -> None:
    """The library's kernels spin, so all ranks' must fit at once. With a GPU of one's own the library decides."""
    assert [nccl_ep_library.share_of_sms(["a 0"] * n, 0, 132) for n in (1, 2, 4, 8)] == [0, 66, 32, 16]
    places = ["a 0", "a 1", "b 0", "a 1"]
    assert [nccl_ep_library.share_of_sms(places, rank, 132) for rank in range(4)] == [0, 66, 0, 66]
    assert nccl_ep_library.share_of_sms(["a 0"] * 66, 7, 132) == 2
    with pytest.raises(ConfigError, match="67 ranks on one GPU of 132 multiprocessors"):
        nccl_ep_library.share_of_sms(["a 0"] * 67, 7, 132)


def test_wire_dtype_of_raw_bytes() -> None:
    """Raw rows travel as bytes under the name of a float that the library knows."""
    raw = torch.arange(64, dtype=torch.uint8).view(2, 32)
    assert nccl_ep_library._as_wire(Encoded(raw)).dtype == torch.bfloat16
    assert nccl_ep_library._as_wire(Encoded(raw, raw)).dtype == torch.float8_e4m3fn
    assert nccl_ep_library._as_wire(Encoded(raw)).view(torch.uint8).equal(raw)


def _early(rank: int, group: Any) -> str:
    config = config_of()
    x, ids = torch.ones(6, config.hidden), torch.tensor([[0, 5]] * 6)
    with played(), _open(group, config) as arena:
        return reuse_early(arena, x, ids, torch.ones_like(x), warmup=0)


def test_early_reuse_in_a_replay_raises(pool: Pool) -> None:
    assert all("already been followed by its backward" in message for message in pool.run(2, _early))


# The benchmark, small


def _overhead(rank: int, group: Any) -> str:
    """Run graphs/bench/overhead.py over the played library; the bare one is a stand-in that knows the result."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "graphs" / "bench"))
    import overhead
    from expected import draw_tokens
    from measure import Session, Shape

    shape = Shape.parse("R4-T8-H16-K2-E16-A4")

    class Bare:
        def __init__(self, shape: Shape, session: Session, *, zero_copy: bool) -> None:
            self.y = (shape.num_topk * draw_tokens(shape, session.rank, session.device).float()).bfloat16()

        def route(self) -> None: ...

        dispatch = combine = route

    options = SimpleNamespace(window="host", samples=2, rounds=2, repeats=2)
    with played(), mock.patch.object(overhead, "NcclEp", Bare):
        record = overhead.measure(shape, Session(rank, 4, torch.device("cpu"), None), options)
    assert [len(system["micros"]) for system in record["systems"]] == [4, 4, 4]
    table: str = overhead.table(record)
    return table


def test_overhead_benchmark_runs_small(pool: Pool) -> None:
    """All three systems give K times x, and the table says what the manager costs."""
    table = pool.run(4, _overhead)[0]
    assert "| nccl_ep, bare |" in table and "| nccl_ep through epbuf |" in table and "of the bare library" in table


def test_overhead_table_judges_by_medians() -> None:
    sys.path.append(str(Path(__file__).resolve().parent.parent / "graphs" / "bench"))
    import overhead

    def record(through: float) -> dict[str, Any]:
        systems = [("bare", [100.0, 101.0, 500.0]), ("through", [through] * 3), ("own", [50.0] * 3)]
        host = {"host_eager_us": 1.0, "host_launch_us": 2.0}
        return {"shape": "s", "repeats": 1, "systems": [{"name": n, "micros": m, **host} for n, m in systems]}

    assert "+2.0% of the bare library (within 3%)" in overhead.table(record(103.02))
    assert "+5.0% of the bare library (more than 3%)" in overhead.table(record(106.05))
