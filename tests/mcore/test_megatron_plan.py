"""Plans from a Megatron-Core configuration: numbers from declared maxima, without Megatron-Core and without torch."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from epbuf.config import EpConfig, Payload
from epbuf.errors import ConfigError
from epbuf.integrations import megatron
from epbuf.integrations.megatron.refusals import REFUSALS
from epbuf.plan import Plan

DEEPSEEK = {
    "num_layers": 64, "hidden_size": 7168, "num_moe_experts": 256, "moe_router_topk": 8, "bf16": True,
    "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 64, "expert_tensor_parallel_size": 1,
    "tensor_model_parallel_size": 1, "moe_expert_rank_capacity_factor": 1.5,
}  # fmt: skip
SIZES: dict[str, Any] = {"seq_length": 4096, "micro_batch_size": 1, "num_microbatches": 8}


def plan_of(sizes: dict[str, Any] | None = None, **options: Any) -> megatron.MegatronPlan:
    config = SimpleNamespace(**{**DEEPSEEK, **options})
    return megatron.plan_from_config(config, **{**SIZES, **(sizes or {})})


def reason(plan: megatron.MegatronPlan, name: str) -> tuple[Any, str]:
    (found,) = [each for each in plan.reasons if each.name == name]
    return found.value, found.why


def test_plan_is_that_of_the_declared_maxima() -> None:
    """1.5 x 4096 x 8 rows and the padding that 4 local experts may need; 16 layers x 4 microbatches on stage 0."""
    found = plan_of(use_transformer_engine_op_fuser=True).plan
    wanted = EpConfig(
        num_ranks=64, num_experts=256, num_topk=8, hidden=7168, max_tokens_per_rank=4096, capacity_factor=1.5,
        expert_alignment=256,
    )  # fmt: skip
    assert found.config == wanted
    assert found.capacity_rows == 49152 + 4 * 256  # 4 * 255 rows of padding, rounded up
    assert found.schedule.num_frames == 16 * 4


@pytest.mark.parametrize(
    ("options", "sizes", "num_tokens"),
    [
        ({}, {"seq_length": 100}, 128),
        ({}, {"micro_batch_size": 3}, 12288),
        ({"context_parallel_size": 2}, {}, 2048),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, {}, 1024),
        ({"tensor_model_parallel_size": 4}, {}, 4096),
    ],
    ids=["chunks of 64", "micro-batch", "context", "sequence parallel", "tensor parallel alone"],
)
def test_tokens_of_a_rank(options: dict[str, Any], sizes: dict[str, Any], num_tokens: int) -> None:
    assert plan_of(sizes, **options).plan.config.max_tokens_per_rank == num_tokens


@pytest.mark.parametrize(
    ("options", "stage", "num_frames", "words"),
    [
        ({"pipeline_model_parallel_size": 1}, 0, 64, "one microbatch at a time"),
        ({}, 3, 16, "1 microbatches in flight"),
        ({"virtual_pipeline_model_parallel_size": 4}, 0, 4 * 19, "interleaved"),
        ({"moe_layer_freq": [0, 0, 0] + [1] * 61}, 0, 13 * 4, "13 MoE layers"),
        ({"moe_layer_freq": 2}, 1, 8 * 3, "8 MoE layers"),
        ({"num_layers_in_first_pipeline_stage": 10, "num_layers_in_last_pipeline_stage": 6}, 3, 6, "6 MoE layers"),
        ({"mtp_num_layers": 1}, 3, 17, "17 MoE layers"),
        ({"mtp_num_layers": 1}, 2, 32, "16 MoE layers"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, 0, 1, "recomputed"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": []}, 3, 16 * 8, "graphs of its own"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_router"]}, 3, 16, "1 microbatches in flight"),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, 0, 2, "recomp"),
    ],
    ids=["no pipeline", "last stage", "virtual pipeline", "dense layers first", "every second", "uneven stages",
         "repeat on the last stage", "no repeat before it", "recompute moe",
         "graphs of whole layers", "graphs of routers", "recompute full"],
)  # fmt: skip
def test_frames_of_a_stage(options: dict[str, Any], stage: int, num_frames: int, words: str) -> None:
    found = plan_of({"pipeline_rank": stage}, **options)
    value, why = reason(found, "frames")
    assert found.plan.schedule.num_frames == value == num_frames
    assert words in why


def test_latent_rows_have_the_latent_size() -> None:
    found = plan_of(moe_latent_size=1024)
    assert found.plan.config.hidden == 1024
    assert reason(found, "hidden") == (1024, "moe_latent_size: latent rows travel")


def test_stash_of_a_plan_is_that_of_plan_build() -> None:
    found = plan_of({"recv_policy": "stash", "stash_rows": 100_000}).plan
    assert found == Plan.build(found.config, found.schedule, recv_policy="stash", stash_rows=100_000)


def test_formats_come_from_the_flags_of_main() -> None:
    config = plan_of(moe_dispatch_fwd_dtype="mxfp8", moe_combine_bwd_dtype="bf16").plan.config
    assert (config.dispatch_payload.format, config.combine_grad_payload.format) == ("mxfp8", "same")
    assert not config.save_recv  # decoded rows are what the experts keep


def test_tensor_parallel_ranks_fold_into_experts_and_topk() -> None:
    config = plan_of(expert_tensor_parallel_size=8).plan.config
    assert (config.num_ranks, config.num_experts, config.num_topk) == (512, 2048, 64)
    with pytest.raises(ConfigError, match=r"moe_router_topk=8 x expert_tensor_parallel_size=16 is 128 rows"):
        plan_of(expert_tensor_parallel_size=16)


def test_without_a_factor_the_worst_case_is_planned() -> None:
    found = plan_of(moe_expert_rank_capacity_factor=None)
    assert found.plan.capacity_rows == 64 * 4096 * 4
    assert "worst case" in reason(found, "rows per rank")[1]


@pytest.mark.parametrize("flag", [refusal.flag for refusal in REFUSALS])
def test_refused_flag_is_named_with_what_to_do(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag}=True: .+; .+"):
        plan_of(**{flag: True})


@pytest.mark.parametrize(
    "options", [{"account_for_loss_in_pipeline_split": True}, {"pipeline_model_parallel_layout": "Et*2|t*2L"}]
)
def test_layouts_that_cannot_be_counted_ask_for_the_number(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pass num_moe_layers="):
        plan_of(**options)
    assert plan_of({"num_moe_layers": 7}, **options).plan.schedule.num_frames == 28


def test_a_plan_prints_each_number_with_its_reason() -> None:
    text = str(plan_of(use_transformer_engine_op_fuser=True))
    for words in ("rows per rank", "50,176", "64 ", "16 MoE layers x 4 microbatches in flight", "bytes per rank"):
        assert words in text
    assert str(plan_of(use_transformer_engine_op_fuser=True).plan) in text


def test_planning_needs_neither_torch_nor_megatron() -> None:
    program = f"""
import sys
from types import SimpleNamespace
from epbuf.integrations import megatron
print(len(str(megatron.plan_from_config(SimpleNamespace(**{DEEPSEEK!r}), seq_length=64, micro_batch_size=1))) > 0)
print([name for name in sys.modules if name.split(".")[0] in ("torch", "megatron")])
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == ["True", "[]"]


@pytest.mark.parametrize(
    ("format", "payload"), [("bf16", "same"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8_block128", "fp8_block128")]
)
def test_window_bytes_and_slices_are_those_of_a_plan(format: str, payload: str) -> None:
    import torch

    config = EpConfig(
        num_ranks=2, num_experts=4, num_topk=2, hidden=256, max_tokens_per_rank=8, recv_capacity_per_rank=96,
        dispatch_payload=payload,
    )  # fmt: skip
    plan = Plan.build(config)
    nbytes = megatron.window_nbytes(96, 256, format)
    assert nbytes == plan.window_nbytes(96)
    buffer = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    for mine, planned in zip(megatron.carve(buffer, 96, 256, format), plan.carve(buffer, 96), strict=True):
        if planned is None:
            assert mine is None
            continue
        assert (mine.data_ptr(), mine.shape, mine.stride(), mine.dtype) == (
            planned.data_ptr(), planned.shape, planned.stride(), planned.dtype,
        )  # fmt: skip


def test_window_bytes_count_scales_and_their_padding() -> None:
    """H = 2880 in mxfp8: 2880 bytes and 90 scales, padded to 96; blocked: to 92."""
    assert megatron.window_nbytes(256, 2880, "mxfp8") == 256 * (2880 + 96)
    assert megatron.window_nbytes(256, 2880, "mxfp8", scale_layout="blocked") == 256 * (2880 + 92)
    assert megatron.window_nbytes(256, 2880, "bf16") == 256 * 2880 * 2


def test_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'fp8' is not known; the formats are bf16, fp16, fp32, mxfp8"):
        megatron.window_nbytes(8, 64, "fp8")
    with pytest.raises(ConfigError, match="'fp16' where rows are bf16"):
        plan_of(moe_dispatch_fwd_dtype="fp16")


def test_payload_of_a_word_is_that_of_the_config() -> None:
    assert plan_of(moe_dispatch_fwd_dtype="bf16").plan.config.dispatch_payload == Payload.same()
