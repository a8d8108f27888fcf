"""`EpbufManager`: what Megatron-Core's flex dispatcher calls to move tokens, on an epbuf arena.

Methods and attributes have the names by which Megatron-Core reads them. The tensors of routing, `token_probs` and
`token_indices`, may be put back from outside, by a replayed graph of the router; every other value that dispatch and
combine need follows from the plan or lives between the two calls of one forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import torch

from epbuf.arena import Arena
from epbuf.autograd import Received, combine, dispatch
from epbuf.errors import CaptureError, ConfigError, LeaseError
from epbuf.generation import Generation
from epbuf.integrations.megatron.buffers import Buffers, Needs, is_capturing
from epbuf.integrations.megatron.planning import alignment_rows
from epbuf.integrations.megatron.ranges import name_backward, named_range
from epbuf.integrations.megatron.refusals import check_supported
from epbuf.integrations.megatron.routing import topk_of_map
from epbuf.lease import Lease


class _Shared(type):
    """The class of managers: Megatron-Core drops its shared buffers by setting class attributes to None."""

    buffers: Buffers

    def __setattr__(cls, name: str, value: object) -> None:
        if name.startswith("_zc_"):
            cls.buffers.ask_to_free()
        else:
            super().__setattr__(name, value)


class EpbufManager(metaclass=_Shared):
    """Dispatch and combine of one MoE layer. Use a class that `bound_to` makes.

    Attributes:
        token_probs: [T, K] probabilities of the experts that `token_indices` names.
        token_indices: [T, K] int64, ascending in each row; -1: no expert.
        dispatched_probs: [C] float32, those of the received rows; from dispatch to combine.
        tokens_per_expert: [L] int64 on the device, rows of each local expert, padding included, never more than C in
            sum; from dispatch to combine.
        over_budget: [1] bool, whether rows were dropped since it was last zeroed.
        required_recv: [1] int64, largest demand of a dispatch since it was last zeroed, in rows.
        moe_expert_rank_capacity_factor: None lets eager dispatches grow the arena rather than drop rows.
        layer: name of the layer in profiles.
    """

    buffers: ClassVar[Buffers]

    def __init__(self, group: Any, num_local_experts: int, router_topk: int, num_experts: int, config: Any) -> None:
        check_supported(config)
        self.group = group
        self.num_local_experts = num_local_experts
        self.router_topk = router_topk
        self.num_experts = num_experts
        self.config = config
        self.hidden_dim: int = getattr(config, "moe_latent_size", None) or config.hidden_size
        self.alignment = alignment_rows(config)
        self.zero_copy = bool(getattr(config, "moe_ncclep_zero_copy", False))
        self.moe_expert_rank_capacity_factor: float | None = config.moe_expert_rank_capacity_factor
        self.needs = Needs(group, num_experts, router_topk, self.hidden_dim, self.alignment, config)
        self.layer = f"layer {self.buffers.num_layers}"
        self.buffers.num_layers += 1
        self.over_budget = torch.zeros(1, dtype=torch.bool, device=self.buffers.device)
        self.required_recv = torch.zeros(1, dtype=torch.int64, device=self.buffers.device)
        self.token_probs: torch.Tensor | None = None
        self.token_indices: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self.tokens_per_expert: torch.Tensor | None = None
        self.num_local_tokens: int | None = None
        self._lease: Lease | None = None
        self._recv: Received | None = None
        self._num_expert_rows = 0

    def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Take the routing of the tokens that the next dispatch sends.

        Shapes: routing_map [T, E] bool and probs [T, E], or with E split over ranks.
        """
        num_tokens = routing_map.shape[0]
        whole = routing_map.reshape(num_tokens, self.num_experts)
        probs = probs.reshape(num_tokens, self.num_experts)
        self.token_indices, self.token_probs = topk_of_map(whole, probs, self.router_topk)
        self.num_local_tokens = num_tokens

    def dispatch(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """Send tokens to their experts' ranks; the current stream waits for them, whatever the flags say.

        Collective over the group; the first one outside a capture opens the arena.

        Shapes: hidden_states [T, H] token dtype, T at most what was declared; returns [C, H] token dtype.

        Raises:
            CaptureError: the arena is not open and a graph is being captured.
            ConfigError: more tokens than declared, or a layer that does not fit the plan.
        """
        arena = self.buffers.ready(self.needs)
        self._drop()  # what a forward left that raised between dispatch and combine
        with named_range(f"epbuf dispatch {self.layer}"), self._growth(arena):
            lease = arena.acquire()
            recv = self._send(arena, lease, hidden_states)
            rows = recv.dequantize()
        assert self.token_probs is not None, "_send has read it"
        self.token_probs = self.token_probs.detach()  # or the graph of the layers before keeps their frames
        name_backward(recv.topk_weights, f"epbuf dispatch backward {self.layer}")
        self._note_demand(arena, recv)
        self.num_local_tokens = hidden_states.shape[0]
        self.tokens_per_expert, self.dispatched_probs = recv.tokens_per_expert, recv.topk_weights
        self._lease, self._recv, self._num_expert_rows = lease, recv, rows.shape[0]
        return rows

    def get_permuted_hidden_states_by_experts(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows for the experts: all C of them, or exactly those that came, which reads the device once.

        Raises:
            CaptureError: reading in a capture.
        """
        recv = self._received("get_permuted_hidden_states_by_experts")
        if self.static_shape:
            return hidden_states, self.dispatched_probs
        num_rows = self._count_rows(recv)
        probs = self.dispatched_probs
        return hidden_states[:num_rows], None if probs is None else probs[:num_rows]

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        """Return `tokens_per_expert`."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the experts' rows with as many as combine takes: none came in, so none may have come out."""
        num_missing = self._num_expert_rows - hidden_states.shape[0]
        if num_missing <= 0:
            return hidden_states
        return torch.cat([hidden_states, hidden_states.new_zeros(num_missing, hidden_states.shape[1])])

    def combine(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """Bring the rows of each token back and add them, in ascending order of experts. Collective.

        Shapes: hidden_states [C, H] token dtype, or the exact rows; returns [T, H].
        """
        self._received("combine")
        assert self._lease is not None
        try:
            with named_range(f"epbuf combine {self.layer}"):
                y = combine(self._lease, hidden_states)
        finally:
            self._drop()
        name_backward(y, f"epbuf combine backward {self.layer}")
        return y

    @property
    def static_shape(self) -> bool:
        """Whether experts get all C rows and read on the device how many there are.

        Megatron-Core 0.19.2 has a flag for it, main takes it from the capacity factor.
        """
        flag = getattr(self.config, "moe_ncclep_static_shape", None)
        return bool(self.config.moe_expert_rank_capacity_factor is not None if flag is None else flag)

    @property
    def eager(self) -> bool:
        """The opposite of `static_shape`, as Megatron-Core's main names it."""
        return not self.static_shape

    @property
    def _recv_capacity(self) -> int | None:
        return None if self.buffers.arena is None else self.buffers.arena.capacity_rows

    @property
    def _max_tokens_per_rank(self) -> int | None:
        return None if self.buffers.arena is None else self.buffers.arena.plan.config.max_tokens_per_rank

    @property
    def _bootstrapped(self) -> bool:
        return self.buffers.arena is not None

    @_bootstrapped.setter
    def _bootstrapped(self, value: bool) -> None:
        """Ignore that main wants its buffers made anew: these stay, and grow by `grow_recv_capacity`."""

    def grow_recv_capacity(self, new_capacity: int) -> None:
        """Grow to that many rows, at the next eager dispatch; called so by main's rerun runner."""
        self.buffers.ask_for_rows(new_capacity)

    @property
    def _zc_fwd_token_buf(self) -> torch.Tensor | None:
        """Where experts may write their output: the window itself, from dispatch to combine."""
        return self._lease.expert_out if self.zero_copy and self._lease is not None else None

    @_zc_fwd_token_buf.setter
    def _zc_fwd_token_buf(self, value: None) -> None:
        self.buffers.ask_to_free()

    @property
    def _zc_bwd_token_buf(self) -> torch.Tensor | None:
        """Where experts may write the gradient of their input; known in the forward with one backward workspace."""
        if not self.zero_copy or self._lease is None or not torch.is_grad_enabled():
            return None
        memory = cast(Generation, self._lease.arena)
        return memory.region("grad_recv_tokens", 0).detach() if memory.plan.schedule.num_workspaces == 1 else None

    @_zc_bwd_token_buf.setter
    def _zc_bwd_token_buf(self, value: None) -> None:
        self.buffers.ask_to_free()

    def _send(self, arena: Arena, lease: Lease, rows: torch.Tensor) -> Received:
        if self.token_indices is None or self.token_probs is None:
            raise LeaseError("dispatch before setup_metadata: nobody has said where the tokens go")
        limit = arena.plan.config.max_tokens_per_rank
        try:
            return dispatch(lease, rows, self.token_indices, self.token_probs.float())
        except BaseException as error:
            lease.release()  # not when its traceback is gone
            if not isinstance(error, ConfigError) or rows.shape[0] <= limit:
                raise
            raise ConfigError(
                f"{rows.shape[0]} tokens came to an MoE layer ({self.layer}) and {limit} a rank were declared: give "
                "install the longest sequence and the largest micro-batch (seq_length x micro_batch_size, over "
                "context- and sequence-parallel ranks)"
            ) from error

    def _growth(self, arena: Arena) -> AbstractContextManager[None]:
        """Return what lets a dispatch grow the arena where no row may be dropped: without a capacity factor.

        Raises:
            CaptureError: no row may be dropped, capacity or stash are less than the worst case, and this is a capture.
        """
        plan = arena.plan
        limits = plan.config.recv_capacity_per_rank, plan.config.capacity_factor, plan.stash_rows
        is_worst_case = limits == (None, None, None)
        if self.moe_expert_rank_capacity_factor is not None or is_worst_case:
            return nullcontext()
        if is_capturing(arena):
            raise CaptureError(
                f"without moe_expert_rank_capacity_factor no row may be dropped, the plan has {arena.capacity_rows} "
                f"rows a rank and stash_rows={plan.stash_rows}, less than the worst case, and a graph cannot grow it: "
                "set the factor, so that a step that dropped rows is run again, or plan without a capacity and without "
                "stash_rows"
            )
        return arena.growing()

    def _note_demand(self, arena: Arena, recv: Received) -> None:
        """Add up on the device what the rerun runner asks for after a step."""
        with torch.no_grad():
            self.over_budget.logical_or_(recv.overflow.bool())
            torch.maximum(self.required_recv, recv.total_recv_tokens, out=self.required_recv)

    def _count_rows(self, recv: Received) -> int:
        """Return how many rows came, and let combine take as many. Reads the device."""
        memory = cast(Generation, cast(Lease, self._lease).arena)
        if memory.book.recording is not None:
            raise CaptureError(
                "experts that take exact rows need their number on the host, which cannot be captured: set "
                "moe_ncclep_static_shape=True (Megatron-Core 0.20: moe_expert_rank_capacity_factor) and use experts "
                "that read tokens_per_expert on the device"
            )
        self._num_expert_rows = recv.trim().tokens.shape[0]
        is_least = self._num_expert_rows == memory.plan.config.expert_alignment
        return int(recv.offs[-1]) if is_least else self._num_expert_rows  # trim gives one alignment for no rows, too

    def _received(self, call: str) -> Received:
        if self._recv is None:
            raise LeaseError(f"{call} of {self.layer} without a dispatch before it: each dispatch has one combine")
        return self._recv

    def _drop(self) -> None:
        """Forget a dispatch. What autograd needs of it, its ticket keeps."""
        if self._lease is not None and not self._lease.released:
            self._lease.release()
        self._lease = self._recv = self.dispatched_probs = self.tokens_per_expert = None


def bound_to(buffers: Buffers) -> type[EpbufManager]:
    """Make the class of managers that share these buffers."""
    made = _Shared("EpbufManager", (EpbufManager,), {"buffers": buffers, "__doc__": EpbufManager.__doc__})
    return cast(type[EpbufManager], made)


def manager_of(layer: Any) -> EpbufManager | None:
    """Return the manager of an MoE layer, None if it is not epbuf's."""
    found = getattr(getattr(layer, "token_dispatcher", None), "_comm_manager", None)
    return found if isinstance(found, EpbufManager) else None
