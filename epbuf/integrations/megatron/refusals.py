"""What of a Megatron-Core configuration epbuf refuses, each with its reason and what to do. Needs no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epbuf.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """A flag that epbuf does not take when it is set."""

    flag: str
    reason: str
    remedy: str


REFUSALS = (
    Refusal(
        "overlap_moe_expert_parallel_comm",
        "its schedule gives the storage of dispatched rows back to torch, and a window's storage is not torch's",
        "leave it off",
    ),
    Refusal("delay_wgrad_compute", "it needs overlap_moe_expert_parallel_comm, which is refused", "leave it off"),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        "the experts' weight gradients would read received rows after dispatch's backward has freed their frame",
        "leave it off",
    ),
    Refusal(
        "moe_pad_expert_input_to_capacity",
        "the router then chooses more than top-k experts for a token",
        "bound the rows of a rank with moe_expert_rank_capacity_factor instead",
    ),
    Refusal(
        "moe_router_padding_for_quantization",
        "the router then chooses more than top-k experts for a token, and epbuf pads each expert's rows itself",
        "leave it off",
    ),
    Refusal(
        "moe_paged_stash",
        "it copies received rows that epbuf keeps in frames",
        "use recv_policy='stash' and stash_rows= of plan_from_config",
    ),
)
"""Flags by the name that Megatron-Core gives them."""


def check_supported(config: Any) -> None:
    """Refuse a TransformerConfig that asks for what epbuf has no code for.

    Raises:
        ConfigError: every such flag, with the reason and what to do.
    """
    set_flags = [refusal for refusal in REFUSALS if getattr(config, refusal.flag, False)]
    lines = [f"{r.flag}={getattr(config, r.flag)!r}: {r.reason}; {r.remedy}" for r in set_flags]
    if lines:
        raise ConfigError("epbuf does not support this Megatron-Core configuration:\n" + "\n".join(lines))
