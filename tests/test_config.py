"""EpConfig and Payload: what is refused, with which words, and how large rows are."""

from __future__ import annotations

from typing import Any

import pytest

from epbuf.config import EpConfig, Payload
from epbuf.errors import ConfigError, EpbufError

SIZES: dict[str, Any] = {"num_ranks": 4, "num_experts": 16, "num_topk": 2, "hidden": 256, "max_tokens_per_rank": 64}


def config(**changes: Any) -> EpConfig:
    return EpConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"num_expert": 16}, ["num_expert=16", "num_experts?"], id="misspelt_key"),
        pytest.param({"zzz": 1}, ["zzz=1", "fields are", "num_ranks"], id="unknown_key"),
        pytest.param(
            {"num_experts": 18}, ["num_experts=18", "num_ranks=4", "remainder 2", "20"], id="experts_over_ranks"
        ),
        pytest.param({"num_topk": 65}, ["num_topk=65", "64"], id="topk_over_64"),
        pytest.param({"num_topk": 0}, ["num_topk=0", "1"], id="topk_zero"),
        pytest.param({"num_ranks": 0}, ["num_ranks=0"], id="no_rank"),
        pytest.param({"hidden": "256"}, ["hidden='256'", "integer"], id="size_as_text"),
        pytest.param({"hidden": True}, ["hidden=True", "integer"], id="size_as_bool"),
        pytest.param({"hidden": 12}, ["hidden=12", "24 bytes", "16", "pad hidden to 16"], id="row_of_24_bytes"),
        pytest.param({"hidden": 2**31}, ["hidden=2147483648"], id="size_past_int32"),
        pytest.param({"token_dtype": "fp64"}, ["token_dtype='fp64'", "bf16"], id="dtype"),
        pytest.param({"expert_alignment": 24}, ["expert_alignment=24", "power of two"], id="alignment"),
        pytest.param(
            {"recv_capacity_per_rank": 100, "expert_alignment": 16},
            ["recv_capacity_per_rank=100", "expert_alignment=16", "112"],
            id="capacity_off_alignment",
        ),
        pytest.param(
            {"recv_capacity_per_rank": 64, "capacity_factor": 1.5},
            ["recv_capacity_per_rank=64", "capacity_factor=1.5", "give one"],
            id="both_capacities",
        ),
        pytest.param({"capacity_factor": 0.0}, ["capacity_factor=0.0"], id="factor_zero"),
        pytest.param({"capacity_factor": float("nan")}, ["capacity_factor=nan"], id="factor_nan"),
        pytest.param({"timeout_s": -1.0}, ["timeout_s=-1.0"], id="timeout"),
        pytest.param({"max_num_sms": 0}, ["max_num_sms=0"], id="no_sm"),
        pytest.param({"overflow_policy": "trap"}, ["overflow_policy='trap'", "'drop'", "'error'"], id="policy"),
        pytest.param({"wire": "dedupe"}, ["wire='dedupe'", "'direct', 'dedup' or 'auto'"], id="wire"),
        pytest.param({"combine_order": "rank"}, ["combine_order='rank'", "'k' or 'by_rank'"], id="combine_order"),
        pytest.param({"dispatch_payload": "mxfp9"}, ["'mxfp9'", "mxfp8", "Payload.raw"], id="payload_word"),
        pytest.param({"dispatch_payload": "raw"}, ["'raw'", "Payload.raw(row_bytes"], id="raw_needs_sizes"),
        pytest.param({"combine_grad_payload": 8}, ["combine_grad_payload=8", "Payload"], id="payload_type"),
        pytest.param({"hidden": 264, "dispatch_payload": "mxfp8"}, ["264 % 32 = 8", "288"], id="mxfp8_hidden"),
        pytest.param(
            {"hidden": 2880, "dispatch_payload": "fp8_block128"}, ["2880 % 128 = 64", "2944"], id="fp8_hidden"
        ),
        pytest.param({"hidden": 272, "combine_grad_payload": "nvfp4"}, ["272 % 32 = 16", "288"], id="nvfp4_hidden"),
        pytest.param(
            {"dispatch_payload": Payload.mxfp8(scale_layout="blocked"), "expert_alignment": 64},
            ["dispatch_payload", "128", "expert_alignment=64"],
            id="blocked_alignment",
        ),
        pytest.param({"alias": (("offs", "counts"),)}, ["('offs', 'counts')", "recv_tokens"], id="alias_pair"),
        pytest.param(
            {"alias": (("recv_tokens", "expert_out"),), "dispatch_payload": "mxfp8"},
            ["save_recv=True", "overwritten"],
            id="alias_saved_recv",
        ),
        pytest.param(
            {"alias": (("recv_tokens", "expert_out"),), "save_recv": False, "inference_only": True},
            ["'same'", "quantised"],
            id="alias_same_payload",
        ),
        pytest.param(
            {"alias": (("grad_expert_out", "grad_recv_tokens"),), "inference_only": True},
            ["inference_only=True"],
            id="alias_without_backward",
        ),
        pytest.param({"alias": (("grad_expert_out", "grad_recv_tokens"),) * 2}, ["twice"], id="alias_twice"),
        pytest.param({"alias": "recv_tokens"}, ["'recv_tokens'", "the pairs are"], id="alias_word"),
    ],
)
def test_config_refuses_bad_value(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("field", list(SIZES))
def test_config_names_missing_field(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        EpConfig(**{name: size for name, size in SIZES.items() if name != field})


def test_config_reports_every_wrong_field_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config(num_topk=99, hiden=256)
    assert "num_topk=99" in str(caught.value) and "did you mean hidden?" in str(caught.value)


def test_config_error_is_both_epbuf_error_and_value_error() -> None:
    with pytest.raises(EpbufError):
        config(num_topk=0)
    with pytest.raises(ValueError, match="num_topk"):
        config(num_topk=0)


def test_config_from_dict_raises_config_error() -> None:
    assert EpConfig.model_validate(SIZES) == config()
    with pytest.raises(ConfigError, match="num_topk=99"):
        EpConfig.model_validate({**SIZES, "num_topk": 99})


def test_config_survives_json() -> None:
    whole = config(dispatch_payload=Payload.raw(512, 32), alias=(("grad_expert_out", "grad_recv_tokens"),), timeout_s=5)
    assert EpConfig.model_validate_json(whole.model_dump_json()) == whole


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config().hidden = 512  # type: ignore[misc]


@pytest.mark.parametrize("word", ["same", "mxfp8", "fp8_block128", "nvfp4"])
def test_config_takes_word_for_payload(word: str) -> None:
    payload = getattr(Payload, word)()
    assert config(dispatch_payload=word, combine_grad_payload=word) == config(
        dispatch_payload=payload, combine_grad_payload=payload
    )


def test_config_accepts_topk_beyond_experts() -> None:
    assert config(num_experts=4, num_topk=64).num_topk == 64


def test_config_accepts_alias_of_quantised_unsaved_recv() -> None:
    pair = ("recv_tokens", "expert_out")
    assert config(alias=(pair,), save_recv=False, dispatch_payload="mxfp8").alias == (pair,)


@pytest.mark.parametrize("model", [EpConfig, Payload])
def test_every_field_says_what_it_means_and_who_agrees(model: type[EpConfig] | type[Payload]) -> None:
    for name, field in model.model_fields.items():
        assert field.description and field.description.endswith("All ranks agree."), name


@pytest.mark.parametrize(
    ("payload", "hidden", "row_bytes", "scale_row_bytes"),
    [
        pytest.param(Payload.same(), 2880, 5760, 0, id="same"),
        pytest.param(Payload.mxfp8(), 7168, 7168, 224, id="mxfp8_7168"),
        pytest.param(Payload.mxfp8(), 2880, 2880, 96, id="mxfp8_2880_pads_90_to_16_bytes"),
        pytest.param(Payload.mxfp8(scale_layout="blocked"), 2880, 2880, 92, id="mxfp8_2880_blocked_pads_to_4_scales"),
        pytest.param(Payload.fp8_block128(), 7168, 7168, 224, id="fp8_block128_7168"),
        pytest.param(Payload.fp8_block128(), 384, 384, 16, id="fp8_block128_384_pads_12_to_16_bytes"),
        pytest.param(Payload.nvfp4(), 7168, 3584, 448, id="nvfp4_7168"),
        pytest.param(Payload.nvfp4(), 2880, 1440, 192, id="nvfp4_2880_pads_180_to_16_bytes"),
        pytest.param(Payload.nvfp4(scale_layout="blocked"), 2880, 1440, 180, id="nvfp4_2880_blocked"),
        pytest.param(Payload.raw(48, 16), 2880, 48, 16, id="raw"),
    ],
)
def test_payload_row_sizes(payload: Payload, hidden: int, row_bytes: int, scale_row_bytes: int) -> None:
    assert payload.row_bytes_for(hidden, "bf16") == row_bytes
    assert payload.scale_row_bytes_for(hidden) == scale_row_bytes


def test_payload_same_row_follows_token_dtype() -> None:
    assert [Payload.same().row_bytes_for(8, dtype) for dtype in ("bf16", "fp16", "fp32")] == [16, 16, 32]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: Payload.raw(40), ["row_bytes=40", "16", "48"], id="row_off_16"),
        pytest.param(lambda: Payload.raw(0), ["row_bytes=0"], id="row_empty"),
        pytest.param(lambda: Payload.raw(48, 8), ["scale_row_bytes=8", "16"], id="scales_off_16"),
        pytest.param(lambda: Payload.same(scale_layout="blocked"), ["same", "mxfp8 and nvfp4"], id="same_blocked"),
        pytest.param(lambda: Payload.fp8_block128(scale_layout="blocked"), ["fp8_block128"], id="fp8_blocked"),
        pytest.param(lambda: Payload(format="mxfp8", row_bytes=16), ["row_bytes=16", "Payload.raw"], id="mxfp8_sized"),
        pytest.param(lambda: Payload.mxfp8(scale_layout="tiles"), ["scale_layout='tiles'", "blocked"], id="layout"),  # type: ignore[arg-type]
    ],
)
def test_payload_refuses_bad_value(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
