"""Megatron-Core MoE layers for the programs of this folder and for the tests: groups, configs, weights, CPU stand-ins.

Megatron-Core is made for GPUs. Where there is none, `stand_ins` puts plain values in place of a few of its and torch's
functions; nothing in `epbuf` needs that.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine, Apex and absl are not there
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

FLEX = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let Megatron-Core run without a GPU inside the block, and anywhere without compiling."""
    not_compiled = torch._dynamo.config.patch(disable=True)  # compiling what it fuses takes longer than running it
    if torch.cuda.is_available():
        with not_compiled:
            yield
        return
    nothing: Any = mock.MagicMock()
    with (
        not_compiled,
        mock.patch.object(torch.cuda, "Stream", lambda *_, **__: nothing),
        mock.patch.object(torch.cuda, "current_stream", lambda *_: nothing),
        mock.patch.object(torch.cuda, "stream", lambda *_: nullcontext()),
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_host),
        mock.patch.object(random, "_get_cuda_rng_state", lambda *_, **__: None),  # of recompute
        mock.patch.object(random, "_set_cuda_rng_state", lambda *_, **__: None),
    ):
        yield


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


@functools.cache
def groups_of(group: dist.ProcessGroup, num_tensor: int = 1) -> Any:
    """Return the process groups of an MoE layer over one group: `num_tensor` tensor-parallel ranks for each expert.

    Ranks of one expert are neighbours. Every process keeps the groups that it made. With tensor parallelism, collective
    over all processes.
    """
    ranks = dist.get_process_group_ranks(group)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    tensor, expert = alone, group
    if num_tensor > 1:
        tensor = _mine([ranks[start : start + num_tensor] for start in range(0, len(ranks), num_tensor)])
        expert = _mine([ranks[start::num_tensor] for start in range(num_tensor)])
    names = {"tp": tensor, "expt_tp": tensor, "ep": expert, "tp_ep": group, "cp": alone, "expt_dp": alone}
    return SimpleNamespace(**names, tp_cp=tensor, tp_dp_cp=group, expt_dp_gtp_remat=alone)


def _mine(groups: list[list[int]]) -> dist.ProcessGroup:
    made = [dist.new_group(ranks) for ranks in groups]
    return made[next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)]


def dtype_options(device: torch.device | str) -> dict[str, Any]:
    """Return what lets a config compute in bfloat16 on CUDA; on CPU it stays with float32."""
    return {"bf16": True, "params_dtype": torch.bfloat16} if torch.device(device).type == "cuda" else {}


def make_config(groups: Any, **options: Any) -> TransformerConfig:
    """Make a config of small layers for these groups; options go to TransformerConfig."""
    num_tensor = groups.tp.size()
    sizes = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 8,
        "moe_router_topk": 2,
    }  # fmt: skip
    fixed = {
        "add_bias_linear": False, "perform_initialization": False, "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False, "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid", "sequence_parallel": num_tensor > 1,
        "tensor_model_parallel_size": num_tensor, "expert_model_parallel_size": groups.ep.size(),
        "expert_tensor_parallel_size": num_tensor,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**{**sizes, **fixed, **options})


def layer_spec(experts: Any = None) -> Any:
    """Return the spec of an MoE layer without Transformer Engine: its experts one by one, or experts of one's own."""
    if experts is None:
        return get_moe_module_spec(use_te=False, num_experts=1)
    shared = get_moe_module_spec(use_te=False, num_experts=1).keywords["submodules"].shared_experts
    return functools.partial(MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared))


class Layers(nn.Module):
    """MoE layers one after the other, each on the residual stream."""

    def __init__(self, config: TransformerConfig, groups: Any, spec: Any = None) -> None:
        super().__init__()
        build = spec if spec is not None else layer_spec()
        self.layers = nn.ModuleList(
            build(config=config, layer_number=number + 1, pg_collection=groups) for number in range(config.num_layers)
        )
        draw_weights(self, groups)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x and result [S, B, H]."""
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def draw_weights(model: Layers, groups: Any) -> None:
    """Draw weights by layer, name and global expert, so that every dispatcher and every number of ranks has the same.

    Tensor-parallel ranks draw the whole weight and keep their part.
    """
    for number, layer in enumerate(model.layers):
        first = groups.ep.rank() * layer.num_local_experts
        for name, parameter in layer.named_parameters():
            seed = f"{number} {_global_name(name, first)}"
            with torch.no_grad():
                parameter.copy_(_draw(seed, name, parameter.shape, groups.tp).to(parameter.dtype))


def _global_name(name: str, first_expert: int) -> str:
    parts = name.split(".")
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        parts[place] = str(first_expert + int(parts[place]))
    elif parts[0] == "experts":  # all of this rank's in one tensor
        parts.append(f"from {first_expert}")
    return ".".join(parts)


def _draw(seed: str, name: str, shape: torch.Size, tensor_group: Any) -> Tensor:
    generator = torch.Generator().manual_seed(sum(ord(c) * 257**i for i, c in enumerate(seed)) % 2**31)
    dim = None if "router" in name else 0 if "fc1" in name else 1
    whole = list(shape)
    if dim is not None:
        whole[dim] *= tensor_group.size()
    drawn = torch.randn(whole, generator=generator) / whole[-1] ** 0.5
    return drawn if dim is None else drawn.chunk(tensor_group.size(), dim)[tensor_group.rank()]


class GroupedExperts(nn.Module):
    """Experts as two grouped GEMMs that read on the device where each zone ends, so that they can be captured.

    What Transformer Engine's grouped MLP does for Megatron-Core, in plain torch.
    """

    def __init__(self, num_local_experts: int, config: Any, *, pg_collection: Any, name: str | None = None) -> None:
        super().__init__()
        assert pg_collection.expt_tp.size() == 1, "these experts are whole on every rank"
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        self.up = nn.Parameter(torch.empty(num_local_experts, hidden, inner, dtype=config.params_dtype))
        self.down = nn.Parameter(torch.empty(num_local_experts, inner, hidden, dtype=config.params_dtype))

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Shapes: rows [C, H]; tokens_per_expert [L] int64 (alltoall: on the host); probs [C] float32; out [C, H]."""
        offs = tokens_per_expert.cumsum(0).to(rows.device, torch.int32)
        inner = F.gelu(torch._grouped_mm(rows, self.up, offs=offs)) * probs.unsqueeze(-1)
        return torch._grouped_mm(inner.to(rows.dtype), self.down, offs=offs), None
