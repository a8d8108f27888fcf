"""Which MoE layers one pipeline stage holds, and how many of their dispatches are open at once. Needs no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epbuf.errors import ConfigError
from epbuf.schedule import Schedule


@dataclass(frozen=True)
class Pipeline:
    """The place of one rank in the pipeline.

    Attributes:
        num_stages: pipeline-parallel size.
        stage: this rank's place, from 0.
        num_chunks: model chunks of a stage (virtual pipeline), 1 without.
        num_microbatches: of one step.
        group_size: microbatches that go through a chunk before the next chunk's turn.
    """

    num_stages: int
    stage: int
    num_chunks: int
    num_microbatches: int
    group_size: int

    @classmethod
    def of(cls, config: Any, num_microbatches: int, pipeline_rank: int) -> Pipeline:
        """Read the pipeline of a TransformerConfig.

        Raises:
            ConfigError: no such stage.
        """
        num_stages = config.pipeline_model_parallel_size
        if not 0 <= pipeline_rank < num_stages:
            raise ConfigError(
                f"pipeline_rank={pipeline_rank} and pipeline_model_parallel_size={num_stages}; "
                f"give one from 0 to {num_stages - 1}"
            )
        num_chunks = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
        group_size = getattr(config, "microbatch_group_size_per_vp_stage", None) or num_stages
        return cls(num_stages, pipeline_rank, num_chunks if num_stages > 1 else 1, num_microbatches, group_size)


def count_moe_layers(config: Any, pipeline: Pipeline) -> int:
    """Return the MoE layers of the chunk of this stage that has most of them; a multi-token-prediction repeat is one.

    Raises:
        ConfigError: the layers of a stage follow from something else than an even split or a first and a last stage.
    """
    chunks = [_is_moe(config)[layers] for layers in _layers_of_chunks(config, pipeline)]
    num_repeats = getattr(config, "mtp_num_layers", None) or 0
    counts = [sum(chunk) for chunk in chunks]
    if pipeline.stage == pipeline.num_stages - 1:
        counts[-1] += num_repeats  # each is a copy of the last layer, behind it
    if max(counts) == 0:
        raise ConfigError(
            f"stage {pipeline.stage} of {pipeline.num_stages} has no MoE layer (moe_layer_freq="
            f"{getattr(config, 'moe_layer_freq', 1)!r}), so it needs no plan; skip it there"
        )
    return max(counts)


def _is_moe(config: Any) -> list[bool]:
    pattern = getattr(config, "moe_layer_freq", 1)
    if isinstance(pattern, int):
        return [layer % pattern == 0 for layer in range(config.num_layers)]
    return [bool(each) for each in pattern]


def _layers_of_chunks(config: Any, pipeline: Pipeline) -> list[slice]:
    """Return the layers of each chunk of the stage, as slices of all layers.

    Source: Megatron-Core 0.19.2, core/transformer/transformer_block.py, `get_num_layers_to_build`.
    """
    special = [
        name
        for name in (
            "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
        if getattr(config, name, None)
    ]  # fmt: skip
    sizes = _layers_of_stages(config, pipeline.num_stages)
    uneven = len(set(sizes)) > 1 and pipeline.num_chunks > 1
    if special or uneven or any(size % pipeline.num_chunks for size in sizes):
        found = ", ".join(f"{name}={getattr(config, name)!r}" for name in special) or f"layers by stage {sizes}"
        raise ConfigError(
            f"the MoE layers of a stage cannot be counted from {found} with {pipeline.num_chunks} chunk(s) a stage; "
            "pass num_moe_layers=, those of the largest chunk of this stage"
        )
    if pipeline.num_chunks == 1:
        start = sum(sizes[: pipeline.stage])
        return [slice(start, start + sizes[pipeline.stage])]
    size = sizes[0] // pipeline.num_chunks
    places = [chunk * pipeline.num_stages + pipeline.stage for chunk in range(pipeline.num_chunks)]
    return [slice(place * size, (place + 1) * size) for place in places]


def _layers_of_stages(config: Any, num_stages: int) -> list[int]:
    first = getattr(config, "num_layers_in_first_pipeline_stage", None)
    last = getattr(config, "num_layers_in_last_pipeline_stage", None)
    fixed = [size for size in (first, last) if size is not None]
    num_left, stages_left = config.num_layers - sum(fixed), num_stages - len(fixed)
    if stages_left < 0 or num_left < 0 or (num_left % stages_left if stages_left else num_left):
        raise ConfigError(
            f"num_layers={config.num_layers} do not divide over {num_stages} stages"
            f"{f' with {fixed} in the first or last' if fixed else ''}; correct the split"
        )
    middle = [num_left // stages_left] * stages_left if stages_left else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def derive_schedule(config: Any, pipeline: Pipeline, num_layers: int) -> tuple[Schedule, str]:
    """Return the schedule of a stage, and why it has that many frames."""
    if pipeline.num_stages == 1:
        schedule = Schedule.sequential(num_layers)
        reason = f"{num_layers} MoE layers; one microbatch at a time"
    elif pipeline.num_chunks == 1:
        schedule = Schedule.one_f_one_b(num_layers, pipeline.num_stages, pipeline.stage, pipeline.num_microbatches)
        in_flight = schedule.num_frames // num_layers
        reason = f"{num_layers} MoE layers x {in_flight} microbatches in flight (1F1B)"
    else:
        schedule = _interleaved(pipeline, num_layers)
        in_flight = schedule.num_frames // num_layers
        reason = f"{num_layers} MoE layers a chunk x {in_flight} (microbatch, chunk) pairs in flight (interleaved)"
    if _graphs_each_microbatch(config, pipeline):
        num_uses = num_layers * pipeline.num_chunks * pipeline.num_microbatches
        return Schedule(num_uses), f"{reason}; and each microbatch has graphs of its own, which keep their frames"
    return _with_recompute(config, schedule, num_layers, reason)


def _graphs_each_microbatch(config: Any, pipeline: Pipeline) -> bool:
    """Tell whether whole layers are captured, one graph forward and one backward, anew for each microbatch.

    Source: Megatron-Core 0.19.2, core/transformer/cuda_graphs.py, `CudaGraphManager` and `TECudaGraphHelper`.
    """
    kind = getattr(config, "cuda_graph_impl", "none")
    captures_whole_layers = not getattr(config, "cuda_graph_modules", None)
    return captures_whole_layers and (kind == "transformer_engine" or (kind == "local" and pipeline.num_stages > 1))


def _interleaved(pipeline: Pipeline, num_layers: int) -> Schedule:
    """Count what is open at once: the forwards of the warm-up, and one more.

    Source: Megatron-Core 0.19.2, core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`.
    """
    num_stages, num_chunks = pipeline.num_stages, pipeline.num_chunks
    if pipeline.group_size == num_stages and pipeline.num_microbatches % num_stages == 0:
        return Schedule.interleaved(num_layers, num_stages, pipeline.stage, pipeline.num_microbatches, num_chunks)
    warmup = 2 * (num_stages - pipeline.stage - 1) + (num_chunks - 1) * pipeline.group_size
    return Schedule(num_layers * min(warmup + 1, pipeline.num_microbatches * num_chunks))


def _with_recompute(config: Any, schedule: Schedule, num_layers: int, reason: str) -> tuple[Schedule, str]:
    """Count only what is open under recompute: the second pass of one part of the model, right before its backward."""
    granularity = getattr(config, "recompute_granularity", None)
    modules = getattr(config, "recompute_modules", None) or ()
    if granularity == "selective" and "moe" in modules:
        return Schedule(1), "each MoE layer is recomputed right before its backward, and keeps no frame until then"
    if granularity == "full" and getattr(config, "recompute_method", None) == "uniform":
        num_open = min(getattr(config, "recompute_num_layers", None) or 1, num_layers)
        return Schedule(num_open), f"{num_open} MoE layers at most are recomputed at once, right before their backward"
    return schedule, reason
