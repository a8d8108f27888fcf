"""The `epbuf` command: `plan` sizes a window, `report` shows a saved report of an arena, `demo` and `bench` run what
lies in the checkout's graphs/.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from epbuf.config import EpConfig, Payload
from epbuf.errors import ConfigError
from epbuf.plan import Plan, PlannedEngine, RecvPolicy
from epbuf.report import report_tables
from epbuf.schedule import Schedule

# Source: config.json of each model's public release (routed experts, experts per token, hidden size).
_MODELS = {
    "deepseek-v3": {"num_experts": 256, "num_topk": 8, "hidden": 7168},
    "qwen3-235b": {"num_experts": 128, "num_topk": 8, "hidden": 4096},
    "gpt-oss-120b": {"num_experts": 128, "num_topk": 4, "hidden": 2880},
    "mixtral-8x7b": {"num_experts": 8, "num_topk": 2, "hidden": 4096},
    "kimi-k2": {"num_experts": 384, "num_topk": 8, "hidden": 7168},
}

_SHORT_FLAGS = {"num_ranks": "--ep", "max_tokens_per_rank": "--tokens"}
_SCHEDULE_KINDS = ("sequential", "gpipe", "one_f_one_b", "one_f_one_b_overlap", "interleaved")
_SCHEDULE_COUNTS = {
    "num_layers": "MoE layers of one chunk on this stage.",
    "num_stages": "Pipeline stages.",
    "stage": "This stage, from 0.",
    "num_microbatches": "Microbatches of one step.",
    "num_chunks": "Chunks of the model on each stage (virtual pipeline).",
    "num_frames": "Frames, by hand instead of by a schedule.",
    "num_workspaces": "Workspaces, by hand; with --num-frames.",
}
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def plan(
    model: str | None, schedule: str, recv_policy: str, stash_rows: int | None, engine: str, as_json: bool,
    svg: Path | None, **values: Any,
) -> None:  # fmt: skip
    """Show the memory plan of a config: a table, JSON (--json) or a picture (--svg FILE).

    Every field of EpConfig and every argument of Schedule is a flag; a flag overrides what --model gives.
    """
    given = {name: value for name, value in values.items() if value not in (None, [])}
    counts = {name: given.pop(name) for name in _SCHEDULE_COUNTS if name in given}
    fields = {**(_model(model) if model else {}), **_parsed(given)}
    words = cast(list[RecvPolicy], recv_policy.split(","))
    result = Plan.build(
        EpConfig(**fields), _schedule(schedule, counts), recv_policy=words if len(words) > 1 else words[0],
        stash_rows=stash_rows, engine=cast(PlannedEngine, engine),
    )  # fmt: skip
    if svg:
        try:
            svg.write_text(result.to_svg(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--svg {svg} cannot be written ({error.strerror or error}); pass a file in a folder that exists"
            ) from None
    typer.echo(result.to_json() if as_json else str(result))


def report(path: Annotated[Path, typer.Argument(metavar="FILE", help="JSON of Arena.report().")]) -> None:
    """Show a saved report of an arena as tables: frames and their users, graphs, bytes, generations."""
    try:
        tables = report_tables(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not the JSON of a report ({type(error).__name__}: {error}); write json.dumps(arena.report()) "
            "into a file and pass that"
        ) from None
    Console().print(tables)


def demo(context: typer.Context) -> None:
    """Train a small mixture-of-experts language model with captured steps (graphs/train_loop.py)."""
    _run_script("train_loop.py", context.args)


def bench(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="cpu, or cuda: all of this host's GPUs.")] = "cpu",
) -> None:
    """Measure dispatch and combine against a baseline in one run (graphs/bench)."""
    scripts = {"cpu": "bench/cpu.py", "cuda": "bench/launch.py"}
    if device not in scripts:
        raise ConfigError(f"--device {device} has no benchmark; use one of {', '.join(scripts)}")
    _run_script(scripts[device], context.args)


def make_app() -> typer.Typer:
    """Return the command line as a typer application."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help=__doc__)
    app.command()(_with_flags(plan))
    app.command()(report)
    app.command(context_settings=_PASS_ON)(demo)
    app.command(context_settings=_PASS_ON)(bench)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit 2 with one message when the caller can correct something."""
    try:
        make_app()(args=argv)
    except ConfigError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        sys.exit(2)


def _with_flags(command: Any) -> Any:
    """Give `plan` its flags: one a field of EpConfig, one an argument of Schedule."""
    flags = [
        _flag("model", str, f"Take experts, top-k and hidden size from a model: {', '.join(_MODELS)}."),
        *(_field_flag(name) for name in EpConfig.model_fields),
        _flag("schedule", str, f"Pipeline schedule: {', '.join(_SCHEDULE_KINDS)}.", default="sequential"),
        *(_flag(name, int, text) for name, text in _SCHEDULE_COUNTS.items()),
        _flag(
            "recv_policy",
            str,
            "What becomes of received rows until the backward: keep, stash, recompute; one word, or "
            "one a layer with commas between.",
            default="keep",
        ),
        _flag("stash_rows", int, "Rows that the pages of the stash hold on a rank, for all layers."),
        _flag("engine", str, "Engine whose regions are planned: native, nccl_ep.", default="native"),
        _flag("as_json", bool, "Print JSON.", names=("--json",), default=False),
        _flag("svg", Path, "Write a memory map to this file as well."),
    ]
    command.__signature__ = inspect.Signature(flags)
    return command


def _flag(name: str, kind: Any, text: str, *, names: tuple[str, ...] = (), default: object = None) -> inspect.Parameter:
    annotation: Any = Annotated[kind if default is not None else kind | None, typer.Option(*names, help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _field_flag(name: str) -> inspect.Parameter:
    field = EpConfig.model_fields[name]
    long = f"--{name.replace('_', '-')}"
    text = (field.description or "").removesuffix(" All ranks agree.")
    if name == "alias":
        return _flag(name, list[str], f"{text} Repeatable.", names=(long,))
    if isinstance(field.default, bool):
        return _flag(name, bool, text, names=(f"{long}/--no-{long[2:]}",))
    kind = next((kind for kind in (int, float) if kind.__name__ in str(field.annotation)), str)
    return _flag(name, kind, text, names=(long, *(_SHORT_FLAGS[n] for n in [name] if n in _SHORT_FLAGS)))


def _model(name: str) -> dict[str, int]:
    if name not in _MODELS:
        raise ConfigError(f"--model {name} is not known; use one of {', '.join(_MODELS)}, or give the sizes by flags")
    return _MODELS[name]


def _parsed(given: dict[str, Any]) -> dict[str, Any]:
    """Turn the words of payload and alias flags into values."""
    fields = dict(given)
    for name in ("dispatch_payload", "combine_grad_payload"):
        if name in fields:
            fields[name] = _payload(fields[name])
    if "alias" in fields:
        fields["alias"] = tuple(tuple(pair.split("=")) for pair in fields["alias"])
    return fields


def _payload(word: str) -> Payload | str:
    """Read FORMAT, FORMAT:blocked or raw:ROW_BYTES:SCALE_ROW_BYTES."""
    name, *rest = word.split(":")
    is_raw = name == "raw"
    if len(rest) > 1 + is_raw or (is_raw and not (rest and all(part.isdecimal() for part in rest))):
        raise ConfigError(
            f"found the payload {word}; give FORMAT, FORMAT:compact, FORMAT:blocked or raw:ROW_BYTES:SCALE_ROW_BYTES "
            "(0 scale bytes may be left out)"
        )
    if is_raw:
        return Payload.raw(*(int(part) for part in rest))
    return Payload.model_validate({"format": name, "scale_layout": rest[0]}) if rest else name


def _schedule(kind: str, counts: dict[str, int]) -> Schedule:
    make: Any
    if kind not in _SCHEDULE_KINDS:
        raise ConfigError(f"--schedule {kind} is not known; use one of {', '.join(_SCHEDULE_KINDS)}")
    if "num_frames" in counts:
        make, name = Schedule, "num_frames by hand"
        wanted = {"num_frames": True, "num_workspaces": False}
    else:
        make, name = getattr(Schedule, kind), f"schedule {kind}"
        parameters = inspect.signature(make).parameters.values()
        wanted = {parameter.name: parameter.default is parameter.empty for parameter in parameters}
    missing = [count for count, required in wanted.items() if required and count not in counts]
    unused = [count for count in counts if count not in wanted]
    if missing or unused:
        problem = f"needs {_flags(missing)}" if missing else f"takes no {_flags(unused)}"
        raise ConfigError(f"{name} {problem}; its flags are {_flags(wanted)}")
    schedule: Schedule = make(**counts)
    return schedule


def _flags(names: Any) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _run_script(name: str, arguments: Sequence[str]) -> None:
    """Run a script of the checkout in a process of its own: it starts ranks, which import it as their main module.

    Raises:
        ConfigError: epbuf was installed without its checkout, or the script does not exist.
    """
    path = Path(__file__).resolve().parent.parent / "graphs" / name
    if not path.is_file():
        raise ConfigError(f"{path} is not there: demo and bench run from a checkout; clone epbuf and run it there")
    raise typer.Exit(subprocess.run([sys.executable, str(path), *arguments], check=False).returncode)


if __name__ == "__main__":
    main()
