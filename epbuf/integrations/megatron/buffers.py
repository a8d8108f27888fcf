"""The arena that all MoE layers of one model share: when it is opened, what it may grow to, when it is closed.

Megatron-Core builds a model and trains it in one call, so nothing can be asked for in between: the first eager dispatch
opens the arena. All ranks of the group run the same layers, so they come to it together.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from epbuf.arena import Arena
from epbuf.errors import CaptureError, ConfigError
from epbuf.growth import grown_plan
from epbuf.integrations.megatron.planning import MegatronPlan, plan_from_config
from epbuf.lease import caller
from epbuf.plan import Plan

Recipe = Plan | Mapping[str, Any]
"""A plan, or the arguments of `plan_from_config` behind its config."""


@dataclass(frozen=True)
class Needs:
    """What one MoE layer asks of the arena.

    Attributes:
        group: of tensor and expert parallel ranks.
        num_experts, num_topk: over all ranks of the group, as Megatron-Core folds them.
        hidden: elements of a row that travels.
        alignment: rows that an expert's zone must be a multiple of.
        config: the layer's TransformerConfig.
    """

    group: Any
    num_experts: int
    num_topk: int
    hidden: int
    alignment: int
    config: Any


class Buffers:
    """Owner of the arena of one installation.

    Attributes:
        recipe: how to plan it.
        arena: None before the first eager dispatch, or `prepare`, and after `close`.
        num_layers: MoE layers that were built so far.
    """

    def __init__(self, recipe: Recipe, device: torch.device | str | None = None, window: str = "auto") -> None:
        self.recipe = recipe
        self.arena: Arena | None = None
        self.num_layers = 0
        self._device = device
        self._window = window
        self._group: Any = None
        self._asked_rows = 0
        self._asked_to_free = False

    @property
    def device(self) -> torch.device:
        """Where rows lie: as given, else the current CUDA device, else the CPU."""
        if self._device is not None:
            return torch.device(self._device)
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def ready(self, needs: Needs) -> Arena:
        """Return the arena, with room for what was asked since the last dispatch.

        Collective when it opens, grows or frees: all ranks come with the same dispatch. In a capture it does none.

        Raises:
            CaptureError: it would have to be opened inside a capture.
            ConfigError: the layer does not fit the plan.
        """
        if self.arena is None:
            self.arena = self._open(needs)
            self._group = needs.group
        elif needs.group is not self._group:
            raise ConfigError(
                "an MoE layer of another process group than the first one's dispatched: an arena belongs to one "
                "group. Give models of other groups an installation of their own, with replace_dispatchers"
            )
        if (self._asked_rows or self._asked_to_free) and not is_capturing(self.arena):
            self._serve(self.arena)
        return self.arena

    def ask_for_rows(self, num_rows: int) -> None:
        """Grow to that capacity at the next eager dispatch."""
        self._asked_rows = max(self._asked_rows, num_rows)

    def ask_to_free(self) -> None:
        """Free, at the next eager dispatch, memory that nothing uses any more. What a graph holds stays."""
        self._asked_to_free = True

    def close(self) -> None:
        """Give the window back; collective. Nothing where none is open.

        Raises:
            LeaseError: graphs that hold the memory are alive; the arena stays open.
        """
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close, or after an error give up without waiting for peers."""
        if self.arena is not None:
            self.arena.__exit__(kind, error, trace)
            self.arena = None

    def _open(self, needs: Needs) -> Arena:
        plan = self._plan_for(needs)
        check_fits(plan, needs)
        try:
            return Arena.open(plan, needs.group, device=self.device, window=self._window)
        except CaptureError as error:
            raise CaptureError(
                f"the first dispatch of a model, at {caller()}, opens its arena, which cannot be captured. Before the "
                "capture add the line: epbuf.integrations.megatron.prepare(model)"
            ) from error

    def _plan_for(self, needs: Needs) -> Plan:
        if isinstance(self.recipe, Plan):
            return self.recipe
        arguments = {"pipeline_rank": _pipeline_rank(), **self.recipe}
        return plan_from_config(needs.config, **arguments).plan

    def _serve(self, arena: Arena) -> None:
        if self._asked_rows > arena.capacity_rows:
            arena.grow(grown_plan(arena.plan, self._asked_rows))
        elif self._asked_to_free:
            arena.free_unused()
        self._asked_rows, self._asked_to_free = 0, False


def recipe_of(plan: MegatronPlan | Recipe) -> Recipe:
    """Return what `install` was given without its reasons.

    Raises:
        ConfigError: neither a plan nor arguments for one.
    """
    if isinstance(plan, MegatronPlan):
        return plan.plan
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Mapping):
        return dict(plan)
    raise ConfigError(
        f"install takes a plan, or the arguments of plan_from_config as a dict, found {type(plan).__name__}; for "
        "example install(dict(seq_length=4096, micro_batch_size=1, num_microbatches=8))"
    )


def check_fits(plan: Plan, needs: Needs) -> None:
    """Check that an MoE layer can use an arena of a plan.

    Raises:
        ConfigError: it cannot; every difference is named.
    """
    config = plan.config
    pairs = {
        "num_experts": (config.num_experts, needs.num_experts),
        "num_topk": (config.num_topk, needs.num_topk),
        "hidden": (config.hidden, needs.hidden),
    }
    lines = [f"{name}: the plan has {found}, the layer {asked}" for name, (found, asked) in pairs.items()
             if found != asked]  # fmt: skip
    if config.expert_alignment % needs.alignment:
        lines.append(
            f"expert_alignment: the plan has {config.expert_alignment}, no multiple of the layer's {needs.alignment}"
        )
    if len(set(plan.frame_policies)) > 1:
        lines.append("recv_policy: the plan's layers differ, and a dispatcher does not know its layer; give one word")
    if lines:
        raise ConfigError(
            "an MoE layer does not fit the plan of its arena (experts and top-k count once for each tensor-parallel "
            "rank of an expert):\n" + "\n".join(lines) + "\nPlan from the model's own config with plan_from_config"
        )


def is_capturing(arena: Arena) -> bool:
    """Tell whether a graph is being captured that would take up what this thread does."""
    return arena.memory.book.recording is not None


def _pipeline_rank() -> int:
    state = importlib.import_module("megatron.core.parallel_state")
    return int(state.get_pipeline_model_parallel_rank()) if state.model_parallel_is_initialized() else 0
