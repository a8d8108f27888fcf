"""What the records of a GPU benchmark say: limits, the table, the plot and the dated file. Needs no torch.

The limit of a step is the time that memory needs for it: the payload of dispatch, padding rows, and the rows of
combine, in bytes of the library's own accounting, each at the rate of its mix of reads and writes. Copy and write rates
are measured in the same run. What a kernel with the other mixes reaches was measured once on an H200, beside its copy.
Ranks that have a GPU each are also limited by the wire: a row crosses once for each of its experts on another rank.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

FAN_OUT_OVER_COPY = 3.64 / 4.26  # one read to eight write streams, against a copy
GATHER_OVER_COPY = 4.4 / 4.26  # eight read streams to one write

BASELINES = {
    "nccl_ep_zero_copy": "NCCL EP, zero-copy",
    "nccl_ep": "NCCL EP, staged",
    "torch": "torch all-to-all",
}
OPS = (
    "route",
    "dispatch",
    "combine",
    "step",
    "combine, staged",
    "step, staged",
    "step, experts",
    "combine backward + dispatch backward",
    "copy of live rows",
)
SIZES = ("R", "T", "H", "K", "E", "A")


def sizes_of(shape: str) -> dict[str, int]:
    """Return R, T, H, K, E and A from a shape's name."""
    return {part[0]: int(part[1:]) for part in shape.split("-")}


def merged(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Join the samples of rounds that measured the same thing; other fields are those of the first."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in records:
        key = (record["system"], record["shape"], *_form(record))
        if key not in found:
            found[key] = {**record, "times_us": {op: list(samples) for op, samples in record["times_us"].items()}}
            continue
        for op, samples in record["times_us"].items():
            found[key]["times_us"].setdefault(op, []).extend(samples)
        found[key]["payloads"] = found[key].get("payloads", {}) | record.get("payloads", {})
    return list(found.values())


def _form(record: Record) -> tuple[str, str, str]:
    """Return window, wire and combine order of a record of ours."""
    return record.get("window", ""), record.get("wire", "direct"), record.get("combine_order", "k")


def shortened(record: Record) -> dict[str, Any]:
    """Return a record with medians in place of its samples."""
    medians = {op: round(statistics.median(samples), 1) for op, samples in record["times_us"].items()}
    kept = (
        "system", "shape", "window", "wire", "combine_order", "window_bytes", "capacity_rows", "host_us",
        "relative_error",
    )  # fmt: skip
    return {name: record[name] for name in kept if name in record} | {"median_us": medians}


def limits_us(record: Record) -> dict[str, float]:
    """Return the least time of each op of a record of ours, in microseconds."""
    moved, rates, num_gpus = record["traffic"], record["rates"], record["num_gpus"]
    push_wire_us, pull_wire_us = wires_us(record)
    staging_us = moved["staging"] / rates["copy"] / num_gpus * 1e6

    def memory_us(pushed: dict[str, int]) -> float:
        data = (pushed["payload"] + pushed["scales"]) / (rates["copy"] * FAN_OUT_OVER_COPY)
        by_wire = pushed.get("wire", 0) / rates["copy"]
        return (data + pushed["padding"] / rates["write"] + by_wire) / num_gpus * 1e6

    def push(op: str) -> float:
        return max(memory_us(moved[op]), push_wire_us)

    def pull(op: str) -> float:
        gathered = moved[op]["rows"] / (rates["copy"] * GATHER_OVER_COPY)
        by_wire = moved[op].get("wire", 0) / rates["copy"]
        return max((gathered + by_wire) / num_gpus * 1e6, pull_wire_us)

    dispatch, combine = push("dispatch"), pull("combine")
    return {
        "dispatch": dispatch,
        "combine": combine,
        "step": dispatch + combine,
        "combine, staged": combine + staging_us,
        "step, staged": dispatch + combine + staging_us,
        "combine backward + dispatch backward": push("combine_backward") + pull("dispatch_backward"),
        "copy of live rows": staging_us,
        **{f"dispatch, {word}": memory_us(pushed) for word, pushed in record.get("payloads", {}).items()},
    }


def wires_us(record: Record) -> tuple[float, float]:
    """Return how long a copy to a peer takes for what dispatch pushes and what combine pulls; 0 on one GPU."""
    if "peer" not in record["rates"]:
        return 0.0, 0.0
    pushed, pulled = record["wire_bytes"], record.get("pull_wire_bytes", record["wire_bytes"])
    return pushed / record["rates"]["peer"] * 1e6, pulled / record["rates"]["peer"] * 1e6


def bytes_moved(record: Record) -> dict[str, int]:
    """Return all bytes of each op of a record of ours."""
    moved = {op: sum(parts.values()) for op, parts in record["traffic"].items() if isinstance(parts, dict)}
    route, staging = record["traffic"]["route"], record["traffic"]["staging"]
    forward = moved["dispatch"] + moved["combine"]
    return {
        "route": route,
        "dispatch": moved["dispatch"],
        "combine": moved["combine"],
        "step": route + forward,
        "combine, staged": moved["combine"] + staging,
        "step, staged": route + forward + staging,
        "combine backward + dispatch backward": moved["combine_backward"] + moved["dispatch_backward"],
        "copy of live rows": staging,
        **{f"dispatch, {word}": sum(pushed.values()) for word, pushed in record.get("payloads", {}).items()},
    }


def table(records: Sequence[Record]) -> str:
    """Return a Markdown table with a row for each shape and op of ours, the baselines that were run beside it."""
    names = list(BASELINES.values())
    head = ["shape", "op", "epbuf us", "10 % to 90 %", "limit us", "% of limit", "% of peer copy", "GB/s", *names]
    rows = [row for record in _ours(records) for row in _rows(record, records)]
    filled = [column for column in range(len(head)) if column < 2 or any(row[column] for row in rows)]
    head, *rows = ([row[column] for column in filled] for row in (head, *rows))
    return "\n".join([_line(head), "|" + "---|" * len(head), *map(_line, rows)])


def _rows(record: Record, records: Sequence[Record]) -> list[list[str]]:
    limits, moved, pure = (
        limits_us(record),
        bytes_moved(record),
        dict(zip(("dispatch", "combine"), wires_us(record), strict=True)),
    )
    sizes, rows = sizes_of(record["shape"]), []
    name = ", ".join([*(f"{letter}={sizes[letter]}" for letter in ("R", "T", "A")), *_marks(record, records)])
    payloads = sorted(op for op in record["times_us"] if op.startswith("dispatch, "))
    for op in (*OPS, *payloads):
        if op not in record["times_us"]:
            continue
        median, low, high = _spread(record["times_us"][op])
        limit = [f"{limits[op]:.0f}", f"{100 * limits[op] / median:.0f}"] if op in limits else ["", ""]
        of_peer = f"{100 * pure[op] / median:.0f}" if pure.get(op) else ""
        rate = f"{moved[op] / median / 1e3:.0f}" if op in moved else ""
        theirs = [_baseline_us(records, system, record["shape"], op) for system in BASELINES]
        rows.append([name, op, f"{median:.1f}", f"{low:.1f} to {high:.1f}", *limit, of_peer, rate, *theirs])
    return rows


def _ours(records: Sequence[Record]) -> list[Record]:
    """Return our records in the order of the tables."""
    ours = [record for record in records if record["system"] == "epbuf"]
    return sorted(ours, key=lambda record: (_order(record["shape"]), _form(record)))


def _marks(record: Record, records: Sequence[Record]) -> list[str]:
    """Return what tells a record from others of ours of the same shape."""
    num_ranks, (window, wire, combine_order) = sizes_of(record["shape"])["R"], _form(record)
    windows = {_form(other)[0] for other in _ours(records) if sizes_of(other["shape"])["R"] == num_ranks}
    words = [word for word in (wire, combine_order) if word not in ("direct", "k")]
    return [window, *words] if len(windows) > 1 else words


def host_table(records: Sequence[Record]) -> str:
    """Return a Markdown table of what eager calls cost on the host."""
    head = ["shape", "dispatch us", "combine us", "dispatch us, grad mode", "combine us, grad mode"]
    lines = [_line(head), "|" + "---|" * len(head)]
    for record in _ours(records):
        modes = [record["host_us"][mode] for mode in ("no_grad", "grad")]
        lines.append(
            _line(
                [
                    ", ".join([record["shape"], *_marks(record, records)]),
                    *(f"{times[op]:.1f}" for times in modes for op in ("dispatch", "combine")),
                ]
            )
        )
    return "\n".join(lines)


def rates_line(records: Sequence[Record]) -> str:
    """Say what the memory did in this run: the median over all process groups."""
    measured = [record["rates"] for record in records if "rates" in record]
    names = [name for name in ("copy", "write", "read", "peer") if any(name in rates for rates in measured)]
    medians = {name: statistics.median(rates[name] for rates in measured if name in rates) for name in names}
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TB/s" for name, rate in medians.items())
    return f"Measured in this run: {rates} (copy counts bytes read and written, peer one way while both ways are busy)."


def _spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and what 10 % and 90 % of the samples lie below."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, *_, high = statistics.quantiles(samples, n=10, method="inclusive")
    return statistics.median(samples), low, high


def _baseline_us(records: Sequence[Record], system: str, shape: str, op: str) -> str:
    """Return a baseline's median for an op of the same shape, of the same alignment if it has one of its own."""
    same = [r for r in records if r["system"] == system and _is_same(system, r["shape"], shape)]
    if not same or op not in same[0]["times_us"]:
        return ""
    return f"{statistics.median(same[0]['times_us'][op]):.0f}"


def _is_same(system: str, theirs: str, ours: str) -> bool:
    letters = SIZES[:-1] if system == "torch" else SIZES
    return all(sizes_of(theirs)[letter] == sizes_of(ours)[letter] for letter in letters)


def _order(shape: str) -> tuple[int, int, int]:
    sizes = sizes_of(shape)
    return -sizes["R"], -sizes["T"], sizes["A"]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def curves(records: Sequence[Record]) -> tuple[str, dict[str, dict[int, float]]]:
    """Return a title and, by system, the step's time for each T.

    They are of the number of ranks with most T, at the largest alignment.
    """
    ours = {(sizes["R"], sizes["T"]) for r in records if r["system"] == "epbuf" for sizes in [sizes_of(r["shape"])]}
    num_ranks = max({r for r, _ in ours}, key=lambda r: (sum(other == r for other, _ in ours), r))
    alignment = max(sizes_of(r["shape"])["A"] for r in records)
    plain = min(_form(r) for r in _ours(records) if _form(r)[1:] == ("direct", "k"))
    lines: dict[str, dict[int, float]] = {}
    for record in records:
        sizes = sizes_of(record["shape"])
        if (sizes["R"], sizes["A"]) != (num_ranks, alignment):
            continue
        times = {op: statistics.median(samples) for op, samples in record["times_us"].items()}
        if record["system"] == "epbuf" and _form(record) != plain:
            form = ", ".join(word for word in _form(record) if word not in ("direct", "k"))
            lines.setdefault(f"epbuf, {form}", {})[sizes["T"]] = times["step"]
            continue
        if record["system"] != "epbuf":
            lines.setdefault(BASELINES[record["system"]], {})[sizes["T"]] = times["step"]
            continue
        lines.setdefault("epbuf", {})[sizes["T"]] = times["step"]
        lines.setdefault("epbuf, rows staged and weighted", {})[sizes["T"]] = times["step, staged"]
        lines.setdefault("limit of the memory", {})[sizes["T"]] = limits_us(record)["step"]
    title = (
        f"route + dispatch + combine, bf16, R={num_ranks} H={sizes['H']} K={sizes['K']} E={sizes['E']} A={alignment}"
    )
    return title, lines


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw the time of a step against T."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    title, lines = curves(records)
    figure, axes = pyplot.subplots(figsize=(9, 6), dpi=120)
    for name, points in lines.items():
        style = {"linestyle": ":", "color": "black"} if name.startswith("limit") else {"marker": "o"}
        axes.plot(sorted(points), [points[tokens] for tokens in sorted(points)], label=name, **style)
    ticks = sorted({tokens for points in lines.values() for tokens in points})
    axes.set(xscale="log", yscale="log", xlabel="tokens a rank (T)", ylabel="microseconds a step", title=title)
    axes.set_xticks(ticks, [str(tokens) for tokens in ticks], minor=False)
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def versions_line(records: Sequence[Record]) -> str:
    """Say what ours and the baselines ran on."""
    found: dict[str, list[str]] = {}
    for record in records:
        text = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        systems = found.setdefault(text, [])
        if record["system"] not in systems:
            systems.append(record["system"])
    return "; ".join(f"{', '.join(systems)}: {text}" for text, systems in found.items())


def text_of(records: Sequence[Record], machine: str, command: str, troubles: Sequence[str]) -> str:
    """Write the dated file: hardware, versions, routing, command, times."""
    samples = max(len(samples) for record in records for samples in record["times_us"].values())
    windows = sorted({record["window"] for record in records if record["system"] == "epbuf"})
    largest = max(record["window_bytes"] for record in records if record["system"] == "epbuf")
    compares = any(record["system"] != "epbuf" for record in records)
    paragraphs = [
        f"# GPU: route, dispatch and combine{' against NCCL EP and torch all-to-all' if compares else ''}",
        f"{machine}. {versions_line(records)}.",
        f"Command: `{command}`",
        "Routing: `torch.rand(T, E, generator=manual_seed(rank)).topk(K)` on the CPU; tokens bf16; every result equal, "
        f"bit for bit, to plain torch. Times are microseconds of the device, medians of up to {samples} samples. What "
        "is captured has its events in the graph, behind two bodies that are not timed, and a sample is the mean of "
        f"the ranks{'; what is not is timed on the slowest rank' if compares else ''}. What each op's chain holds is "
        "said in graphs/bench/gpu.py, how baselines are timed in peers.py.",
        f"Windows: {', '.join(windows)}; the largest is {largest:,} bytes a rank, two frames and two workspaces. "
        + rates_line(records),
        table(records),
        "Host time of an eager call, median, slowest rank:",
        host_table(records),
        *(["Not measured:", "\n".join(f"- {trouble}" for trouble in troubles)] if troubles else []),
    ]
    return "\n\n".join(paragraphs) + "\n"


def save(text: str, records: Sequence[Record], folder: Path, gpu: str) -> list[Path]:
    """Write DATE-GPU.md, and DATE-GPU.png beside it; return what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.date.today()}-{gpu}"
    picture = folder / f"{name}.png"
    plot(records, picture)
    file = folder / f"{name}.md"
    file.write_text(f"{text}\n![step time against T]({picture.name})\n")
    return [file, picture]
