"""From a Megatron-Core configuration to a plan: pure, on a laptop, with the reason for each number.

Reads attributes of a TransformerConfig; needs neither Megatron-Core nor torch nor a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epbuf.config import EpConfig, TokenDtype, round_up
from epbuf.errors import ConfigError
from epbuf.integrations.megatron.refusals import check_supported
from epbuf.integrations.megatron.sizes import payload_of
from epbuf.integrations.megatron.stages import Pipeline, count_moe_layers, derive_schedule
from epbuf.plan import Plan, RecvPolicy

TOKENS_PER_CHUNK = 64
"""Megatron-Core rounds the tokens of a rank up to this. Source: 0.19.2, `_NCCLEPManager._ensure_bootstrap`."""

GROUPED_GEMM_ROWS = 256
"""Rows of an expert under Transformer Engine's fused grouped GEMM. Source: 0.19.2, moe_utils.py,
`get_align_size_for_quantization`."""


@dataclass(frozen=True)
class Reason:
    """One number of a plan, and why it is that."""

    name: str
    value: int | float | str
    why: str


@dataclass(frozen=True)
class MegatronPlan:
    """A plan and the reason for each of its numbers. `print` shows both; `install` takes it.

    Attributes:
        plan: what `Arena.open` would take.
        reasons: in the order in which the numbers follow from each other.
    """

    plan: Plan
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        width = max(len(reason.name) for reason in self.reasons)
        lines = [f"  {reason.name:<{width}}  {_shown(reason.value):>13}  {reason.why}" for reason in self.reasons]
        return "\n".join(["epbuf plan for Megatron-Core", *lines, "", str(self.plan)])


def plan_from_config(
    config: Any, *, seq_length: int, micro_batch_size: int, num_microbatches: int = 1, pipeline_rank: int = 0,
    num_moe_layers: int | None = None, expert_alignment: int | None = None, recv_policy: RecvPolicy = "keep",
    stash_rows: int | None = None, timeout_s: float = 600.0,
) -> MegatronPlan:  # fmt: skip
    """Plan the windows of one pipeline stage from a TransformerConfig.

    Nothing is measured: rows follow from what is declared here, and a longer batch is refused when it comes.

    Args:
        config: a TransformerConfig, or anything with its attributes; its parallel sizes are used.
        seq_length: tokens of the longest sequence, over all context-parallel ranks.
        micro_batch_size: sequences of one microbatch on one data-parallel rank.
        num_microbatches: microbatches of one step.
        pipeline_rank: this rank's stage.
        num_moe_layers: MoE layers of the largest chunk of this stage, where the config's layout does not say.
        expert_alignment: rows that each expert's zone is a multiple of; None: what the experts of `config` need.
        recv_policy: what becomes of received rows until the experts' backward, as in `Plan.build`.
        stash_rows: rows of all stashed dispatches that are open at once, as in `Plan.build`.
        timeout_s: seconds that a rank waits for a peer.

    Raises:
        ConfigError: a flag that epbuf refuses, or numbers that cannot work.
    """
    check_supported(config)
    pipeline = Pipeline.of(config, num_microbatches, pipeline_rank)
    reasons: list[Reason] = []
    sizes = _group_sizes(config, reasons)
    num_tokens = _max_tokens(config, seq_length, micro_batch_size, reasons)
    alignment = expert_alignment or alignment_rows(config)
    payloads = _payloads(config, reasons)
    ep_config = EpConfig(
        **(sizes | payloads), hidden=_hidden(config, reasons), max_tokens_per_rank=num_tokens,
        token_dtype=token_dtype_of(config), capacity_factor=config.moe_expert_rank_capacity_factor,
        expert_alignment=alignment, max_num_sms=getattr(config, "moe_flex_dispatcher_num_sms", None),
        timeout_s=timeout_s,
    )  # fmt: skip
    num_layers = num_moe_layers or count_moe_layers(config, pipeline)
    schedule, why = derive_schedule(config, pipeline, num_layers)
    plan = Plan.build(ep_config, schedule, recv_policy=recv_policy, stash_rows=stash_rows)
    reasons += _row_reasons(plan), Reason("frames", schedule.num_frames, why), _window_reason(plan)
    return MegatronPlan(plan, tuple(reasons))


def alignment_rows(config: Any) -> int:
    """Return the rows that each expert's zone must be a multiple of: 1 where the experts do not care.

    Source: Megatron-Core 0.19.2, moe_utils.py, `get_align_size_for_quantization`; main counts moe_use_grouped_tensor.
    """
    if getattr(config, "use_transformer_engine_op_fuser", False) or getattr(config, "moe_use_grouped_tensor", False):
        return GROUPED_GEMM_ROWS
    if getattr(config, "fp8", None):
        return 32 if getattr(config, "fp8_recipe", None) == "mxfp8" else 16
    return 128 if getattr(config, "fp4", None) else 1


def token_dtype_of(config: Any) -> TokenDtype:
    """Return the dtype of activations."""
    if getattr(config, "bf16", False):
        return "bf16"
    return "fp16" if getattr(config, "fp16", False) else "fp32"


def _group_sizes(config: Any, reasons: list[Reason]) -> dict[str, Any]:
    """Return ranks, experts and top-k of the group of tensor and expert parallel ranks, as Megatron-Core folds them.

    Every tensor-parallel rank of an expert gets its tokens, so experts and top-k are counted once for each.
    """
    tensor, expert = config.expert_tensor_parallel_size or 1, config.expert_model_parallel_size
    sizes = {
        "num_ranks": tensor * expert,
        "num_experts": tensor * config.num_moe_experts,
        "num_topk": tensor * config.moe_router_topk,
    }
    if sizes["num_topk"] > 64:
        raise ConfigError(
            f"moe_router_topk={config.moe_router_topk} x expert_tensor_parallel_size={tensor} is "
            f"{sizes['num_topk']} rows a token, and epbuf sends at most 64; use fewer tensor-parallel ranks for experts"
        )
    times = f"x {tensor} expert-tensor-parallel ranks"
    reasons += (
        Reason("ranks", sizes["num_ranks"], f"{expert} expert-parallel {times}"),
        Reason("experts", sizes["num_experts"], f"num_moe_experts={config.num_moe_experts} {times}"),
        Reason("top-k", sizes["num_topk"], f"moe_router_topk={config.moe_router_topk} {times}"),
    )
    return sizes


def _max_tokens(config: Any, seq_length: int, micro_batch_size: int, reasons: list[Reason]) -> int:
    context = getattr(config, "context_parallel_size", 1)
    tensor = config.tensor_model_parallel_size if getattr(config, "sequence_parallel", False) else 1
    num_tokens = -(-seq_length * micro_batch_size // (context * tensor))
    rounded = round_up(num_tokens, TOKENS_PER_CHUNK)
    why = f"seq_length {seq_length} x micro_batch_size {micro_batch_size}"
    why += f" / {context} context-parallel" if context > 1 else ""
    why += f" / {tensor} sequence-parallel" if tensor > 1 else ""
    reasons.append(Reason("tokens per rank", rounded, f"{why}, in chunks of {TOKENS_PER_CHUNK}"))
    return rounded


def _hidden(config: Any, reasons: list[Reason]) -> int:
    latent: int | None = getattr(config, "moe_latent_size", None)
    hidden: int = latent or config.hidden_size
    reasons.append(Reason("hidden", hidden, "moe_latent_size: latent rows travel" if latent else "hidden_size"))
    return hidden


def _payloads(config: Any, reasons: list[Reason]) -> dict[str, Any]:
    """Return formats by direction. Quantised rows are decoded right behind dispatch, so they need not be kept."""
    dtype = token_dtype_of(config)
    flags = {"dispatch_payload": "moe_dispatch_fwd_dtype", "combine_grad_payload": "moe_combine_bwd_dtype"}
    words = {field: getattr(config, flag, None) or dtype for field, flag in flags.items()}
    payloads = {field: payload_of(word, dtype) for field, word in words.items()}
    for field, flag in flags.items():
        name = "dispatch format" if field == "dispatch_payload" else "combine gradient format"
        why = f"{flag}={words[field]!r}" if getattr(config, flag, None) else "the activations' dtype"
        reasons.append(Reason(name, payloads[field].format, why))
    return {**payloads, "save_recv": not payloads["dispatch_payload"].is_quantised}


def _row_reasons(plan: Plan) -> Reason:
    config, num_local, alignment = plan.config, plan.num_local_experts, plan.config.expert_alignment
    padding = f" + {num_local} experts x {alignment - 1} rows of padding" if alignment > 1 else ""
    if config.capacity_factor is None:
        rows = f"{config.num_ranks} ranks x tokens x min(top-k, {num_local} local experts)"
        return Reason("rows per rank", plan.capacity_rows, f"worst case, no drops: {rows}{padding}")
    why = f"tokens x top-k x moe_expert_rank_capacity_factor={config.capacity_factor}{padding}; at most the worst case"
    return Reason("rows per rank", plan.capacity_rows, why)


def _window_reason(plan: Plan) -> Reason:
    sets = plan.schedule.num_workspaces
    why = f"1 window: {plan.schedule.num_frames} frames, {sets} forward and {sets} backward workspace(s)"
    return Reason("bytes per rank", plan.total_bytes, why)


def _shown(value: int | float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"
