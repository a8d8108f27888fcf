"""epbuf in a `MoELayer` without a rebound name: through the layer spec, or in a model that is built already.

Imports Megatron-Core, so nothing may import this file before it is known to be there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher, MoETokenDispatcher

from epbuf.integrations.megatron.buffers import Buffers
from epbuf.integrations.megatron.dispatcher import bound_to, manager_of


class EpbufFlexTokenDispatcher(MoEFlexTokenDispatcher):  # type: ignore[misc]  # Megatron-Core has no types
    """The flex dispatcher over an epbuf manager, whatever dispatcher the config names."""

    def __init__(
        self, buffers: Buffers, num_local_experts: int, local_expert_indices: list[int], config: Any, groups: Any
    ) -> None:  # fmt: skip
        MoETokenDispatcher.__init__(self, config=config, pg_collection=groups)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self._comm_manager = bound_to(buffers)(
            group=self.tp_ep_group,
            num_local_experts=num_local_experts,
            router_topk=self.tp_size * config.moe_router_topk,
            num_experts=self.tp_size * config.num_moe_experts,
            config=config,
        )
        self.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.token_indices"]


@contextmanager
def rebound(buffers: Buffers) -> Iterator[None]:
    """Let Megatron-Core build epbuf's managers for backend ncclep inside the block."""
    before = token_dispatcher._NCCLEPManager
    token_dispatcher._NCCLEPManager = bound_to(buffers)
    try:
        yield
    finally:
        token_dispatcher._NCCLEPManager = before


def layer_class(buffers: Buffers) -> type[MoELayer]:
    """Make the `MoELayer` for a layer spec: it has epbuf's dispatcher, whichever one its config names."""

    class EpbufMoELayer(MoELayer):  # type: ignore[misc]  # Megatron-Core has no types
        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            with rebound(buffers):
                super().__init__(config, *arguments, **options)
            if manager_of(self) is None:
                replace_dispatcher(self, buffers)

    return EpbufMoELayer


def replace_dispatcher(layer: MoELayer, buffers: Buffers) -> MoETokenDispatcher:
    """Give a built layer epbuf's dispatcher; return the one that it had."""
    old = layer.token_dispatcher
    groups = SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group)
    indices, config = layer.local_expert_indices, layer.config
    new = EpbufFlexTokenDispatcher(buffers, layer.num_local_experts, indices, config, groups)
    if layer.shared_expert_overlap:
        new.set_shared_experts(layer.shared_experts)
    layer.token_dispatcher = new
    return old


def swap_layers(spec: Any, new: type[MoELayer]) -> Any:
    """Return a spec with `new` in place of every `MoELayer` in it; the given one stays as it is."""
    if spec is MoELayer:
        return new
    if isinstance(spec, functools.partial):
        given = {name: swap_layers(value, new) for name, value in spec.keywords.items()}
        return functools.partial(swap_layers(spec.func, new), *spec.args, **given)
    if isinstance(spec, (list, tuple)):
        return type(spec)(swap_layers(each, new) for each in spec)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        found = {f.name: (getattr(spec, f.name), swap_layers(getattr(spec, f.name), new))
                 for f in dataclasses.fields(spec)}  # fmt: skip
        changed = {name: swapped for name, (old, swapped) in found.items() if swapped is not old}
        return dataclasses.replace(spec, **changed) if changed else spec
    return spec


def moe_layers(model: Any) -> list[MoELayer]:
    """Return the MoE layers of a model, or of its chunks, in the order of the model."""
    chunks = model if isinstance(model, (list, tuple)) else [model]
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
