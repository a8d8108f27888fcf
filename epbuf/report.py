"""The tables of `Arena.report()`: who uses which memory, since which line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from epbuf.memory_map import human_bytes

_COUNTS = ("num_overflows", "num_bad_ids", "num_early_reuses", "num_refusals")


def report_tables(report: Mapping[str, Any]) -> Group:
    """Return a report as something that `rich` prints. Paths in it are shown as they are, never taken for markup."""
    return Group(_heading(report), _generations(report), _bytes(report), _frames(report), _graphs(report))


def _heading(report: Mapping[str, Any]) -> Text:
    counts = ", ".join(f"{name.removeprefix('num_').replace('_', ' ')} {report[name]}" for name in _COUNTS)
    return Text(
        f"epbuf arena, rank {report['rank']}: {_engine(report)}{report['window']} window ({report['window_reason']})\n"
        f"frames in use at most {report['num_frames_high_water']} of {report['num_frames']}; demand at most "
        f"{report['demand_peak_rows']} of {report['capacity_rows']} rows; {_stash(report)}staged "
        f"{human_bytes(report['staged_bytes'])}; {counts}"
    )


def _engine(report: Mapping[str, Any]) -> str:
    word = report.get("engine", "native")  # a report that was saved before there were others
    return "" if word == "native" else f"engine {word}, "


def _stash(report: Mapping[str, Any]) -> str:
    if not report.get("stash_rows"):
        return ""
    full = f", exceeded {report['num_stash_overflows']} time(s)" if report["num_stash_overflows"] else ""
    return f"stash at most {report['stash_peak_rows']} of {report['stash_rows']} rows{full}; "


def _generations(report: Mapping[str, Any]) -> Table:
    rows = [
        (
            part["generation"], part["capacity_rows"], human_bytes(part["window_bytes"]), len(part["claims"]),
            len(part["graphs"]), part["where"],
        )
        for part in report["generations"]
    ]  # fmt: skip
    return _table("generations", ("generation", "capacity", "window", "claims", "graphs", "opened or grown at"), rows)


def _bytes(report: Mapping[str, Any]) -> Table:
    rows = [(word, human_bytes(n), f"{n:,}") for word, n in report["bytes_by_class"].items()]
    return _table(f"bytes of generation {report['generation']}", ("class", "size", "bytes"), rows)


def _frames(report: Mapping[str, Any]) -> Table:
    rows = []
    for part in report["generations"]:
        for frame in part["frames"]:
            claims = [f"{claim['kind']} since {claim['where']}" for claim in frame["claims"]]
            held = [f"held by the graph captured at {where}" for where in frame["held_by"]]
            reserved = [f"reserved by the graph captured at {where}" for where in frame["reserved_by"]]
            users = "\n".join([*claims, *held, *reserved]) or "free"
            rows.append((part["generation"], frame["frame"], frame["demand_peak_rows"], users))
    return _table("frames", ("generation", "frame", "demand", "used by"), rows)


def _graphs(report: Mapping[str, Any]) -> Table:
    rows = [
        (g["generation"], ", ".join(map(str, g["frames"])), "stale" if g["is_stale"] else "", g["where"])
        for g in report["graphs"]
    ]
    return _table("graphs", ("generation", "frames", "", "captured at"), rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    return table
