"""NCCL EP played by plain torch on CPU: what `epbuf.engines.nccl_ep` asks of the library, and no kinder than that.

It does what the library's documentation and source say of high-throughput, expert-major groups with staging: a bitmap
of experts a token, zones padded with zeros, a trap where rows exceed the budget; combine adds the rows of each rank,
rounds, and adds the ranks. What the library leaves undefined is junk here: rows past the zones, gradients of weights
without a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import epbuf
from epbuf.engine import Encoded
from epbuf.engines import nccl_ep
from epbuf.windows.group import as_group

JUNK = 77.0


class PlayedLibrary:
    def __init__(self, plan: epbuf.Plan, group: Any, device: torch.device) -> None:
        self.plan, self.group = plan, group
        self.num_live = 0

    def all_gather(self, rows: Tensor, rank: int) -> None:
        for source, row in enumerate(self.group.all_gather(rows[rank].clone())):
            rows[source] = row

    def new_handle(self, memory: Tensor) -> PlayedHandle:
        assert memory.dtype == torch.uint8 and memory.data_ptr() % 256 == 0
        self.num_live += 1
        return PlayedHandle(self)

    def destroy(self) -> None:
        assert self.num_live == 0, "handles go before their group"


class PlayedHandle:
    def __init__(self, library: PlayedLibrary) -> None:
        self.library, self.group = library, library.group
        self.slots: list[dict[int, int]] = []

    def update(self, ids: Tensor) -> None:
        """Place every (rank, token) of every local expert; keep where this rank's own tokens went."""
        config = self.library.plan.config
        assert ids.is_contiguous() and ids.dtype == torch.int64 and 0 < len(ids) <= config.max_tokens_per_rank
        assert int(ids.max()) < config.num_experts, "an id past E is written out of bounds"
        self.ids, self.num_rows = ids.clone(), len(ids)
        capacity, alignment = self.library.plan.capacity_rows, config.expert_alignment
        everyone = self.group.all_gather(self.ids.tolist())
        self.places: dict[tuple[int, int, int], tuple[int, int]] = {}  # (rank, token, expert) -> (owner, row)
        self.zones: list[tuple[int, int]] = []  # of this rank: first row of padding, end
        end = 0
        for expert in range(config.num_experts):
            owner, local = divmod(expert, config.num_local_experts)
            end = end if local else 0
            for rank, tokens in enumerate(everyone):
                for token, experts in enumerate(tokens):
                    if expert in experts:
                        self.places[rank, token, expert] = owner, end
                        end += 1
            first_padding, end = end, -(-end // alignment) * alignment
            if owner == self.group.rank:
                assert end <= capacity, "the library traps"
                self.zones.append((first_padding, end))

    def dispatch(self, rows: Encoded, weights: Tensor | None, into: Encoded, recv_weights: Tensor | None) -> None:
        config = self.library.plan.config
        assert (weights is None) == (recv_weights is None), "weights come forward, and not backward"
        assert rows.data.is_contiguous() and rows.data.dtype == into.data.dtype
        assert rows.data.shape == (len(self.ids), into.data.shape[1])
        parts, regions = [_bytes(rows.data)], [_bytes(into.data)]
        if into.scales is not None:
            assert rows.scales is not None and rows.scales.shape == (len(self.ids), into.scales.shape[1])
            assert rows.scales.shape[1] % 16 == 0
            parts.append(rows.scales)
            regions.append(into.scales)
        if weights is not None and recv_weights is not None:
            assert weights.shape == self.ids.shape and weights.dtype == torch.float32
            assert len(into.data) == config.recv_capacity_per_rank or config.recv_capacity_per_rank is None
        everyone = self.group.all_gather(
            ([part.clone() for part in parts], None if weights is None else (self.ids.tolist(), weights.clone()))
        )
        for (rank, token, expert), (owner, row) in self.places.items():
            if owner == self.group.rank:
                sent, weighted = everyone[rank]
                for region, part in zip(regions, sent, strict=True):
                    region[row] = part[token]
                if weighted is not None and recv_weights is not None:
                    recv_weights[row] = weighted[1][token, weighted[0][token].index(expert)]
        for region in [*regions, *([] if recv_weights is None else [recv_weights])]:
            for first, end in self.zones:
                region[first:end] = 0
            region[self.zones[-1][1] :] = JUNK

    def combine(self, rows: Tensor, out: Tensor, weights: Tensor | None, out_weights: Tensor | None) -> None:
        assert rows.is_contiguous() and out.is_contiguous() and out.shape == (len(self.ids), rows.shape[1])
        assert (weights is None) == (out_weights is None), "gradients of weights come with gradients of rows"
        everyone = self.group.all_gather((rows.clone(), None if weights is None else weights.clone()))
        if out_weights is not None:
            assert out_weights.shape == self.ids.shape
            out_weights.fill_(JUNK)
        for token, experts in enumerate(self.ids.tolist()):
            partial: dict[int, Tensor] = {}
            for k, expert in enumerate(experts):
                place = self.places.get((self.group.rank, token, expert))
                if place is None:
                    continue
                owner, row = place
                found, factors = everyone[owner]
                partial[owner] = partial.get(owner, torch.zeros(rows.shape[1])) + found[row].float()
                if out_weights is not None:
                    out_weights[token, k] = factors[row]
            rounded = [each.to(rows.dtype).float() for _, each in sorted(partial.items())]
            out[token] = sum(rounded, torch.zeros(rows.shape[1])).to(rows.dtype)

    def destroy(self) -> None:
        self.library.num_live -= 1


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8)


@contextmanager
def played() -> Iterator[None]:
    """Let `Arena.open(engine="nccl_ep")` open on CPU over the played library."""
    with mock.patch.object(nccl_ep, "Library", PlayedLibrary), mock.patch("epbuf.arena.check_fit"):
        yield


class PlayedTensor:
    """A descriptor: its own pointer."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.ptr = tensor, self


class PlayedGroup:
    """What `ep.Group.create` gives, over all ranks of the process."""

    def __init__(self, config: Any) -> None:
        self.ptr, self.config = self, config
        self.num_live = 0

    def destroy(self) -> None:
        assert self.num_live == 0, "handles go before their group"


class HandHandle:
    """What `ep.Handle` gives: the played handle under the library's own words."""

    def __init__(self, played: PlayedHandle) -> None:
        self.played = played

    def update(self, ids: PlayedTensor, *, layout_info: Any, stream: Any) -> None:
        self.played.update(ids.tensor)
        ends = torch.tensor([end for _, end in self.played.zones])
        layout_info.expert_counters.tensor.copy_(ends.diff(prepend=torch.zeros(1, dtype=torch.int64)))
        layout_info.recv_total_counter.tensor.copy_(ends[-1:])

    def dispatch(self, inputs: Any, outputs: Any, *, stream: Any, config: Any = None) -> None:
        assert (config is None) == (inputs.topk_weights is not None), "weights come forward, and not backward"
        self.played.dispatch(
            Encoded(inputs.tokens.tensor), _of(inputs.topk_weights), Encoded(outputs.tokens.tensor),
            _of(outputs.topk_weights),
        )  # fmt: skip

    def combine(self, inputs: Any, outputs: Any, *, stream: Any, config: Any = None) -> None:
        assert (config is None) == (inputs.topk_weights is None), "gradients of weights come backward"
        self.played.combine(
            inputs.tokens.tensor, outputs.tokens.tensor, _of(inputs.topk_weights), _of(outputs.topk_weights)
        )

    def destroy(self) -> None:
        self.played.destroy()


def _of(described: PlayedTensor | None) -> Tensor | None:
    return None if described is None else described.tensor


def _struct(*names: str) -> Any:
    return lambda **given: SimpleNamespace(**{name: given.pop(name, None) for name in names}, **given)


def modules(group: Any) -> dict[str, Any]:
    """Return nccl.core, nccl.ep and its bindings as a caller by hand imports them."""

    def init_handle(owner: PlayedGroup, layout: int, form: Any, num_topk: int, memory: PlayedTensor) -> PlayedHandle:
        assert memory.tensor.dtype == torch.uint8
        config = owner.config
        facts = SimpleNamespace(
            num_experts=config.num_experts, num_local_experts=config.num_experts // as_group(group).size,
            max_tokens_per_rank=config.max_dispatch_tokens_per_rank, expert_alignment=form,
            recv_capacity_per_rank=None,
        )  # fmt: skip
        plan: Any = SimpleNamespace(config=facts, capacity_rows=config.max_recv_tokens_per_rank)
        owner.num_live += 1
        handle = PlayedHandle(PlayedLibrary(plan, as_group(group), torch.device("cpu")))
        handle.library = owner  # type: ignore[assignment]
        owner.plan, owner.group = plan, as_group(group)  # type: ignore[attr-defined]
        return handle

    word = SimpleNamespace
    core = word(
        get_unique_id=lambda: word(as_bytes=b"id"), UniqueId=word(from_bytes=lambda made: made),
        Communicator=word(init=lambda **_: word(destroy=lambda: None)),
    )  # fmt: skip
    ep = word(
        Tensor=PlayedTensor, Handle=HandHandle, Group=word(create=lambda comm, config: PlayedGroup(config)),
        GroupConfig=_struct(), LayoutInfo=_struct("expert_counters", "recv_total_counter"),
        HandleConfig=lambda dispatch_output_per_expert_alignment: word(
            _lowpp=word(ptr=dispatch_output_per_expert_alignment)
        ),
        DispatchInputs=_struct("tokens", "topk_weights"), DispatchOutputs=_struct("tokens", "topk_weights"),
        CombineInputs=_struct("tokens", "topk_weights"), CombineOutputs=_struct("tokens", "topk_weights"),
        DispatchConfig=_struct(), CombineConfig=_struct(), Layout=word(EXPERT_MAJOR=1), PassDir=word(BWD=1),
        Algorithm=word(HIGH_THROUGHPUT=1), ZeroCopyMode=word(OFF=1), OverflowPolicy=word(DROP=2),
    )  # fmt: skip
    return {"nccl.core": core, "nccl.ep": ep, "nccl._extensions.bindings.nccl_ep": word(init_handle=init_handle)}
