"""The command line: flags mirror EpConfig and Schedule, mistakes end with one message and status 2."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from epbuf import cli
from epbuf.config import EpConfig, Payload
from epbuf.plan import Plan
from epbuf.schedule import Schedule

SIZES = ["--ep", "4", "--num-experts", "16", "--num-topk", "2", "--hidden", "256", "--tokens", "64"]
CONFIG = EpConfig(num_ranks=4, num_experts=16, num_topk=2, hidden=256, max_tokens_per_rank=64)


def words(text: str) -> list[str]:
    return text.split()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    return int(caught.value.code or 0)


def fingerprint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run("plan", "--json", *arguments) == 0
    return str(json.loads(capsys.readouterr().out)["fingerprint"])


def test_plan_prints_the_table_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", *SIZES) == 0
    assert capsys.readouterr().out == f"{Plan.build(CONFIG)}\n"


def test_plan_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--json", *SIZES) == 0
    assert capsys.readouterr().out == f"{Plan.build(CONFIG).to_json()}\n"


def test_plan_writes_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--svg", str(tmp_path / "map.svg"), *SIZES) == 0
    assert ElementTree.parse(tmp_path / "map.svg").getroot().tag.endswith("svg")
    assert "expert_out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        pytest.param(
            ["--num-ranks", "8", "--max-tokens-per-rank", "9"], {"num_ranks": 8, "max_tokens_per_rank": 9}, id="long"
        ),
        pytest.param(["--token-dtype", "fp32"], {"token_dtype": "fp32"}, id="token_dtype"),
        pytest.param(["--recv-capacity-per-rank", "96"], {"recv_capacity_per_rank": 96}, id="capacity"),
        pytest.param(["--capacity-factor", "1.5"], {"capacity_factor": 1.5}, id="factor"),
        pytest.param(["--expert-alignment", "16"], {"expert_alignment": 16}, id="alignment"),
        pytest.param(["--dispatch-payload", "mxfp8"], {"dispatch_payload": "mxfp8"}, id="payload_word"),
        pytest.param(
            ["--dispatch-payload", "nvfp4:blocked", "--expert-alignment", "128"],
            {"dispatch_payload": Payload.nvfp4(scale_layout="blocked"), "expert_alignment": 128},
            id="payload_blocked",
        ),
        pytest.param(
            ["--combine-grad-payload", "raw:96:32"], {"combine_grad_payload": Payload.raw(96, 32)}, id="payload_raw"
        ),
        pytest.param(
            ["--no-save-recv", "--inference-only"], {"save_recv": False, "inference_only": True}, id="switches"
        ),
        pytest.param(
            ["--alias", "grad_expert_out=grad_recv_tokens"],
            {"alias": (("grad_expert_out", "grad_recv_tokens"),)},
            id="alias",
        ),
        pytest.param(["--overflow-policy", "error"], {"overflow_policy": "error"}, id="policy"),
        pytest.param(["--validate-ids"], {"validate_ids": True}, id="validate"),
        pytest.param(["--max-num-sms", "20"], {"max_num_sms": 20}, id="sms"),
        pytest.param(["--timeout-s", "5"], {"timeout_s": 5.0}, id="timeout"),
    ],
)
def test_plan_takes_every_config_field(
    flags: list[str], changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    config = EpConfig(**{**dict(CONFIG), **changes})
    assert fingerprint(capsys, *SIZES, *flags) == Plan.build(config).fingerprint


def test_plan_takes_a_recv_policy(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = Plan.build(CONFIG, recv_policy="recompute").fingerprint
    assert fingerprint(capsys, *SIZES, "--recv-policy", "recompute") == wanted != Plan.build(CONFIG).fingerprint


def test_plan_takes_the_engine_and_shows_what_its_library_allocates(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = Plan.build(CONFIG, engine="nccl_ep").fingerprint
    assert fingerprint(capsys, *SIZES, "--engine", "nccl_ep") == wanted != Plan.build(CONFIG).fingerprint


def test_plan_takes_a_recv_policy_per_layer(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = Plan.build(CONFIG, Schedule.sequential(3), recv_policy=["keep", "stash", "recompute"], stash_rows=300)
    flags = words("--num-layers 3 --recv-policy keep,stash,recompute --stash-rows 300")
    assert fingerprint(capsys, *SIZES, *flags) == wanted.fingerprint


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        pytest.param(["--num-layers", "3"], Schedule.sequential(3), id="sequential"),
        pytest.param(words("--schedule gpipe --num-layers 2 --num-microbatches 3"), Schedule.gpipe(2, 3), id="gpipe"),
        pytest.param(
            words("--schedule one_f_one_b --num-layers 2 --num-stages 4 --stage 1 --num-microbatches 8"),
            Schedule.one_f_one_b(2, 4, 1, 8),
            id="one_f_one_b",
        ),
        pytest.param(
            words("--schedule interleaved --num-layers 2 --num-stages 4 --stage 0 --num-microbatches 8 --num-chunks 2"),
            Schedule.interleaved(2, 4, 0, 8, 2),
            id="interleaved",
        ),
        pytest.param(["--num-frames", "2", "--num-workspaces", "2"], Schedule(2, 2), id="by_hand"),
    ],
)
def test_plan_takes_every_schedule(flags: list[str], schedule: Schedule, capsys: pytest.CaptureFixture[str]) -> None:
    assert fingerprint(capsys, *SIZES, *flags) == Plan.build(CONFIG, schedule).fingerprint


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("deepseek-v3", (256, 8, 7168)),
        ("qwen3-235b", (128, 8, 4096)),
        ("gpt-oss-120b", (128, 4, 2880)),
        ("mixtral-8x7b", (8, 2, 4096)),
        ("kimi-k2", (384, 8, 7168)),
    ],
)
def test_plan_knows_models(model: str, sizes: tuple[int, int, int], capsys: pytest.CaptureFixture[str]) -> None:
    num_experts, num_topk, hidden = sizes
    config = EpConfig(num_ranks=8, num_experts=num_experts, num_topk=num_topk, hidden=hidden, max_tokens_per_rank=128)
    assert fingerprint(capsys, "--model", model, "--ep", "8", "--tokens", "128") == Plan.build(config).fingerprint


def test_plan_flag_overrides_model(capsys: pytest.CaptureFixture[str]) -> None:
    config = EpConfig(num_ranks=8, num_experts=8, num_topk=1, hidden=4096, max_tokens_per_rank=128)
    flags = ["--model", "mixtral-8x7b", "--num-topk", "1", "--ep", "8", "--tokens", "128"]
    assert fingerprint(capsys, *flags) == Plan.build(config).fingerprint


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        pytest.param(["plan", "--ep", "4"], ["num_experts is missing", "hidden is missing"], id="no_sizes"),
        pytest.param(["plan", *SIZES, "--num-experts", "18"], ["num_experts=18", "num_ranks=4"], id="config"),
        pytest.param(["plan", "--model", "gpt-9"], ["gpt-9", "deepseek-v3"], id="model"),
        pytest.param(["plan", *SIZES, "--schedule", "zigzag"], ["zigzag", "one_f_one_b"], id="schedule"),
        pytest.param(["plan", *SIZES, "--schedule", "gpipe"], ["gpipe needs --num-layers"], id="schedule_flags"),
        pytest.param(["plan", *SIZES, "--num-chunks", "2"], ["sequential takes no --num-chunks"], id="schedule_extra"),
        pytest.param(["plan", *SIZES, "--num-frames", "2", "--stage", "0"], ["takes no --stage"], id="by_hand_extra"),
        pytest.param(["plan", *SIZES, "--dispatch-payload", "mxfp8:tiles"], ["scale_layout='tiles'"], id="layout"),
        pytest.param(["plan", *SIZES, "--dispatch-payload", "raw"], ["found the payload raw;"], id="raw_sizes"),
        pytest.param(
            ["plan", *SIZES, "--dispatch-payload", "raw:64:0:99"], ["raw:64:0:99", "ROW_BYTES"], id="raw_parts"
        ),
        pytest.param(["plan", *SIZES, "--dispatch-payload", "mxfp8:blocked:9"], ["mxfp8:blocked:9"], id="parts"),
        pytest.param(
            ["plan", *SIZES, "--schedule", "zigzag", "--num-frames", "2"],
            ["zigzag is not known"],
            id="by_hand_kind",
        ),
        pytest.param(["plan", *SIZES, "--engine", "fast"], ["engine='fast'", "nccl_ep"], id="engine"),
        pytest.param(["plan", *SIZES, "--recv-policy", "burn"], ["recv_policy", "'burn'"], id="recv_policy"),
        pytest.param(["plan", *SIZES, "--svg", "no/such/map.svg"], ["--svg no/such/map.svg", "folder"], id="svg"),
        pytest.param(["plan", *SIZES, "--alias", "offs"], ["('offs',)", "the pairs are"], id="alias"),
        pytest.param(["bench", "--device", "tpu"], ["--device tpu has no benchmark", "cpu, cuda"], id="no_such_bench"),
    ],
)
def test_mistake_ends_with_a_message_and_status_2(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert [part for part in parts if part not in output.err] == [], output.err


@pytest.mark.parametrize(
    ("arguments", "script", "passed_on"),
    [
        (["demo", "--steps", "3", "--help"], "train_loop.py", ["--steps", "3", "--help"]),
        (["bench", "--device", "cpu", "--tokens", "9"], "bench/cpu.py", ["--tokens", "9"]),
    ],
)
def test_script_of_the_checkout_gets_arguments_and_gives_its_status(
    arguments: list[str], script: str, passed_on: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "graphs" / script
    path.parent.mkdir(parents=True)
    path.write_text(
        "import pathlib, sys; pathlib.Path(__file__).with_suffix('.txt').write_text(repr(sys.argv[1:])); sys.exit(3)"
    )
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "epbuf" / "cli.py"))
    assert run(*arguments) == 3
    assert path.with_suffix(".txt").read_text() == repr(passed_on)


def test_script_without_a_checkout_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "epbuf" / "cli.py"))
    assert run("demo") == 2
    assert "train_loop.py is not there" in capsys.readouterr().err


def test_every_config_field_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--help") == 0
    text = capsys.readouterr().out
    for name in EpConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in text, name
