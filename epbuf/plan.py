"""The memory plan: which bytes of a rank's window hold what, for how long.

`Plan.build` is a pure function of the config and the schedule. Sizes depend on maxima only, never on live counts, so
every rank computes the same plan and a captured graph keeps its addresses. All offsets and sizes are computed here.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from epbuf.config import BLOCKED_TILE_ROWS, ROW_ALIGNMENT_BYTES, EpConfig, Payload, TokenDtype, round_up
from epbuf.errors import ConfigError
from epbuf.memory_map import Band, Extent, draw_svg, human_bytes
from epbuf.schedule import Schedule

Lifetime = Literal["arena", "frame", "forward", "backward", "stash"]
RecvPolicy = Literal["keep", "stash", "recompute"]
RecvPolicies = RecvPolicy | tuple[RecvPolicy, ...]
PlannedEngine = Literal["native", "nccl_ep"]

ALIGNMENT_BYTES = 256
"""Every region starts at a multiple of this: what TMA, cuBLAS scale tiles and 128-byte sectors ask for, and more."""

_MAX_ROWS = 2**31 - 1

_MAX_DRAWN_SETS = 32

CONTROL_BYTES = 512
"""Room for `struct Control` of csrc/layout.h."""

COUNT_HEADER_CELLS = 8
"""`kCountHeader` of csrc/layout.h: cells of a COUNT row that follow its E counts."""

ROUTE_CHUNK_TOKENS = 64
"""Tokens per row of `route_scratch`."""

STASH_PAGE_ROWS = BLOCKED_TILE_ROWS
"""Rows of a page of the stash: whole tiles of blocked scales, so that each part of a page is one range of bytes."""

STASH_TABLE_HEADER = 2
"""int32 of `struct StashTable` of csrc/layout.h, before the numbers of a frame's pages."""

STASH_COUNTERS_BYTES = 16
"""Room for `struct StashCounters` of csrc/layout.h."""

NVLINK_BYTES_PER_S = 393e9
COPY_BYTES_PER_S = 3.64e12
"""Rates of the model behind wire="auto": a copy to a peer, one way, and a row read once and written several times.
Source: measured on two H200 of one host, and on one."""

NCCL_EP_EXPERTS_MULTIPLE = 4
"""NCCL EP moves the weights of the experts of an NVLink domain in pieces of 16 bytes: four of float32."""

NCCL_EP_MAX_SMS = 256
"""Multiprocessors for which a handle of NCCL EP has scratch, at the most: those of the device."""

_ITEM_BYTES = {
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
_TOKEN_DTYPE: dict[TokenDtype, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DATA_DTYPE = {
    "mxfp8": "float8_e4m3fn",
    "fp8_block128": "float8_e4m3fn",
    "nvfp4": "float4_e2m1fn_x2",
    "raw": "uint8",
}
_SCALE_DTYPE = {"mxfp8": "float8_e8m0fnu", "fp8_block128": "float32", "nvfp4": "float8_e4m3fn", "raw": "uint8"}


@dataclass(frozen=True)
class Region:
    """Name one range of bytes of the window.

    Attributes:
        name: unique within its set.
        index: number of its frame or workspace; 0 for the arena's own.
        offset: bytes from the start of the window, a multiple of `alignment`.
        nbytes: size in bytes, padding that follows not included.
        alignment: bytes.
        shape: of the tensor over the region.
        dtype: name of a torch dtype.
        lifetime: "arena" (until close), "frame" (dispatch to the end of its backward), "forward" (dispatch to
            combine), "backward" (combine backward to dispatch backward), "stash" (pages of frames, from dispatch to
            combine backward).
    """

    name: str
    index: int
    offset: int
    nbytes: int
    alignment: int
    shape: tuple[int, ...]
    dtype: str
    lifetime: Lifetime

    @property
    def end(self) -> int:
        """Bytes from the start of the window to the first byte past the region."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class WireModel:
    """Say what the two forms of `wire` cost one rank in dispatch and, unless inference_only, in combine's backward.

    Every token chooses K experts, none of them twice, each set as likely as any other, and T tokens are live.

    Attributes:
        direct_bytes, dedup_bytes: what the rank sends to its peers.
        copied_bytes: with "dedup", what it reads in `wire_rows` and writes into slots.
    """

    direct_bytes: int
    dedup_bytes: int
    copied_bytes: int

    @property
    def direct_us(self) -> float:
        """Time of "direct", whose rows are where they belong when they have crossed."""
        return self.direct_bytes / NVLINK_BYTES_PER_S * 1e6

    @property
    def dedup_us(self) -> float:
        """Time of "dedup": first all rows cross, then they are copied."""
        return (self.dedup_bytes / NVLINK_BYTES_PER_S + self.copied_bytes / COPY_BYTES_PER_S) * 1e6


@dataclass(frozen=True)
class _Need:
    """A region before it has a place."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """Lay out the window of one arena. `print(plan)` shows it; `Arena.open(plan, group)` allocates it.

    Attributes:
        config: what it was built for.
        schedule: how many frames and workspaces.
        capacity_rows: C, rows that a rank can receive.
        regions: all regions, in the order of the window: arena, frames, forward workspaces, backward workspaces, stash.
        total_bytes: size of the window.
        recv_policy: what becomes of received rows until the experts' backward: "keep", "stash" or "recompute"; where
            layers differ a tuple, one word a layer.
        stash_rows: rows that all pages of the stash hold, as asked for; None: as many as may be needed at once.
        engine: whose regions it has: "nccl_ep" adds what that engine needs, any other takes "native".
        fingerprint: hex SHA-256 of config, schedule and regions; equal on every rank, machine and Python version.
    """

    config: EpConfig
    schedule: Schedule
    capacity_rows: int
    regions: tuple[Region, ...] = field(repr=False)
    total_bytes: int
    recv_policy: RecvPolicies = "keep"
    stash_rows: int | None = None
    engine: PlannedEngine = "native"

    @staticmethod
    def build(
        config: EpConfig, schedule: Schedule | None = None, *, recv_policy: RecvPolicy | Sequence[RecvPolicy] = "keep",
        stash_rows: int | None = None, engine: PlannedEngine = "native",
    ) -> Plan:  # fmt: skip
        """Compute the plan. No torch, no GPU, no memory.

        Args:
            config: sizes and formats.
            schedule: `Schedule.sequential(1)` by default.
            recv_policy: what becomes of received rows between combine and the experts' backward: "keep" them in the
                frame; "stash" those that exist in pages that all frames share, and copy them back into a workspace
                inside combine's backward; or "recompute" them there, by one more dispatch. One word, or one for each
                layer of the schedule (of each chunk); of a schedule given by hand, one for each frame.
            stash_rows: rows that the pages of a rank hold together, for all stashed dispatches that wait for their
                backward; rounded up to whole pages of 128. A dispatch takes pages for the rows that it receives, not
                for C of them, so the sum of what is received at once is enough. A dispatch that finds too few overflows
                (`recv.overflow`). Pages of one whose backward never runs go to the next eager dispatch; a captured one
                has them until its frame dispatches again. None: C for each such dispatch, which no step exceeds, and
                which saves nothing.
            engine: "nccl_ep" for `Arena.open(engine="nccl_ep")`: adds its handle memory to each frame, and says what
                the library allocates beside the window (`engine_bytes`).

        Raises:
            ConfigError: the config asks for a plan that this version has no code for, or that rows cannot index; words
                that are not policies or not one a layer; stash_rows that is no number of rows, or that no layer uses.
        """
        schedule = schedule or Schedule.sequential(1)
        policies = _policies(recv_policy, schedule)
        for policy in {policies} if isinstance(policies, str) else set(policies):
            _check_policy(config, policy)
        _check_stash_rows(stash_rows, policies)
        if engine not in ("native", "nccl_ep"):
            raise ConfigError(f"Plan.build(engine={engine!r}): use 'native' (also for engine='external') or 'nccl_ep'")
        capacity_rows = _capacity_rows(config)
        if engine == "nccl_ep":
            _check_nccl_ep(config, capacity_rows, policies)
        of_frames = _of_frames(policies, schedule)
        regions = tuple(_place_all(config, schedule, capacity_rows, of_frames, stash_rows, engine))
        _check_disjoint(regions, config.alias)
        total_bytes = round_up(max(region.end for region in regions), ALIGNMENT_BYTES)
        return Plan(config, schedule, capacity_rows, regions, total_bytes, policies, stash_rows, engine)

    @property
    def num_local_experts(self) -> int:
        """L: experts that one rank owns."""
        return self.config.num_local_experts

    @cached_property
    def frame_policies(self) -> tuple[RecvPolicy, ...]:
        """The recv_policy of each frame: that of the layer whose dispatches take it."""
        return _of_frames(self.recv_policy, self.schedule)

    @property
    def num_stash_pages(self) -> int:
        """Pages that stashed dispatches share; 0 without a stash."""
        return self.region("stash_pages").shape[0] if self._has_stash else 0

    @property
    def stash_page_offsets(self) -> tuple[int, ...]:
        """Where, in bytes from the start of a page, data, block scales and row scales lie: those that the payload has.

        The last number is the size of a page.
        """
        return _page_offsets(self.config)

    @property
    def engine_bytes(self) -> int:
        """Bytes that the engine's library allocates for itself beside the window, on each rank; 0 for our own engine.

        For ranks of one NVLink domain; what NCCL EP adds to cross a network is not in it. Source: nccl-extensions
        0.1.0, the shared buffers of its high-throughput groups, of which 1664 MiB were measured at R=8, T=4096, H=7168,
        E=256, K=8, C=49152.
        """
        return _nccl_ep_bytes(self.config, self.capacity_rows) if self.engine == "nccl_ep" else 0

    @property
    def nccl_ep_token_bytes(self) -> int:
        """Bytes of the largest row that NCCL EP moves, scales included."""
        return _nccl_ep_token_bytes(self.config)

    @property
    def route_chunk_tokens(self) -> int:
        """Tokens per row of `route_scratch`."""
        return ROUTE_CHUNK_TOKENS

    @property
    def token_row_bytes(self) -> int:
        """Bytes of a row of token dtype: x, expert_out, y."""
        return Payload.same().row_bytes_for(self.config.hidden, self.config.token_dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of data in a dispatched row."""
        return self.config.dispatch_payload.row_bytes_for(self.config.hidden, self.config.token_dtype)

    @property
    def scale_row_bytes(self) -> int:
        """Bytes of block scales in a dispatched row, padding included."""
        return self.config.dispatch_payload.scale_row_bytes_for(self.config.hidden)

    @property
    def num_scales(self) -> int:
        """Block scales of a dispatched row, without padding."""
        return _num_scales(self.config.dispatch_payload, self.config.hidden)

    @property
    def num_scale_columns(self) -> int:
        """S: columns that views of received scales show: no padding of a compact row, but that of tiles."""
        return _num_scale_columns(self.config.dispatch_payload, self.config.hidden)

    @property
    def num_grad_scale_columns(self) -> int:
        """S of what combine's backward sends."""
        return _num_scale_columns(self.config.combine_grad_payload, self.config.hidden)

    @property
    def grad_row_bytes(self) -> int:
        """Bytes of data in a row that combine's backward sends."""
        return self.config.combine_grad_payload.row_bytes_for(self.config.hidden, self.config.token_dtype)

    @property
    def grad_scale_row_bytes(self) -> int:
        """Bytes of block scales in a row that combine's backward sends, padding included."""
        return self.config.combine_grad_payload.scale_row_bytes_for(self.config.hidden)

    @cached_property
    def wire_model(self) -> WireModel:
        """What wire="auto" compares."""
        return _wire_model(self.config)

    @property
    def dedups(self) -> bool:
        """Whether a token crosses once to a rank that has several slots for it; never where there is one rank."""
        return _dedups(self.config)

    @property
    def adds_by_rank(self) -> bool:
        """Whether each rank adds its rows of a token; on one rank that is the order of k."""
        return _adds_by_rank(self.config)

    def bytes_by_lifetime(self) -> dict[str, int]:
        """Return the bytes of all sets of each lifetime, alignment gaps included; their sum is `total_bytes`."""
        sizes = {str(word): sum(map(_span, sets)) for word, sets in self._sets.items()}
        assert sum(sizes.values()) == self.total_bytes, (sizes, self.total_bytes)
        return sizes

    def window_nbytes(self, rows: int) -> int:
        """Return the bytes of `rows` received rows: data, then block scales, then row scales, without gaps.

        Raises:
            ConfigError: not a number of rows; blocked scales and not whole tiles of 128 rows.
        """
        return sum(need.nbytes for need in self._received_needs(rows))

    def carve(self, buffer: Any, rows: int) -> tuple[Any, ...]:
        """Slice a caller's own buffer into `rows` received rows, as `window_nbytes` sizes it.

        Args:
            buffer: [n] uint8 torch tensor, contiguous, at a multiple of 16 bytes; what lies behind the rows is unused.

        Shapes: data [rows, H or packed], scales [rows, S] with the padded row as stride or None, and, for nvfp4 only,
            row_scales [rows] float32.

        Raises:
            ConfigError: no such buffer, too short, misaligned, or as `window_nbytes`.
        """
        needs = self._received_needs(rows)
        torch = _check_buffer(buffer, rows, sum(need.nbytes for need in needs))
        views, start = [], 0
        for need in needs:
            flat = buffer[start : start + need.nbytes]
            views.append(flat.view(getattr(torch, need.dtype)).view(need.shape))
            start += need.nbytes
        if len(views) == 1:
            return views[0], None
        views[1] = views[1][:, : self.num_scale_columns]
        return tuple(views)

    def _received_needs(self, rows: int) -> list[_Need]:
        if type(rows) is not int or rows < 0:
            raise ConfigError(f"rows={rows!r} is no number of rows; pass an int, for example plan.capacity_rows")
        if self.config.dispatch_payload.scale_layout == "blocked" and rows % BLOCKED_TILE_ROWS:
            raise ConfigError(
                f"rows={rows} with blocked scales, which come in tiles of {BLOCKED_TILE_ROWS} rows "
                f"({rows} % {BLOCKED_TILE_ROWS} = {rows % BLOCKED_TILE_ROWS}); use {round_up(rows, BLOCKED_TILE_ROWS)}"
            )
        return _recv_needs(self.config, rows)

    @cached_property
    def fingerprint(self) -> str:
        """Identify the plan: hex SHA-256 of its canonical JSON."""
        canonical = json.dumps(self._content(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def regions_of(self, lifetime: Lifetime, index: int = 0) -> list[Region]:
        """Return the regions of one set, in the order of the window; none if the plan has no such sets."""
        return self._sets[lifetime][index] if lifetime in self._sets else []

    def region(self, name: str, index: int = 0, lifetime: Lifetime | None = None) -> Region:
        """Return one region.

        Args:
            lifetime: where frames of some layers and workspaces have regions of one name; None: the frames'.

        Raises:
            KeyError: the plan has no such region.
        """
        return self._by_name[name, index, lifetime or self.lifetimes[name]]

    def to_json(self) -> str:
        """Write config, schedule, regions, total and fingerprint as JSON."""
        return json.dumps({**self._content(), "fingerprint": self.fingerprint}, indent=2, sort_keys=True)

    def to_svg(self) -> str:
        """Draw the memory map: the whole window to scale, then the regions of one set of each lifetime."""
        bands = [
            Band(f"{label}: {_each(sets)}", [_extent(region) for region in sets[0]]) for label, sets in self._kinds
        ]
        window = [extent for word, sets in self._sets.items() for extent in _window_extents(word, sets)]
        heading = [f"epbuf window, {human_bytes(self.total_bytes)} per rank", *_describe(self)]
        return draw_svg(heading, Band("the whole window, to scale", window), bands)

    def __str__(self) -> str:
        lines = [f"epbuf plan {self.fingerprint[:12]}", *(f"  {line}" for line in _describe(self)), ""]
        rows: list[tuple[str, ...]] = [("region", "shape", "dtype", "each", "all", "first offset")]
        for label, sets in self._kinds:
            each, count = _span(sets[0]), len(sets)
            rows.append((label, "", "", human_bytes(each), human_bytes(each * count), ""))
            rows.extend(_table_row(region, count) for region in sets[0])
        rows.append(("total", "", "", "", human_bytes(self.total_bytes), f"{self.total_bytes:,} bytes"))
        shared = [f"{first} and {second} share bytes" for first, second in self.config.alias]
        if self.engine_bytes:
            rows.append(
                ("beside it, by NCCL EP", "", "", "", human_bytes(self.engine_bytes), f"{self.engine_bytes:,} bytes")
            )
        return "\n".join([*lines, *_align(rows), *shared])

    @cached_property
    def _sets(self) -> dict[Lifetime, list[list[Region]]]:
        """Regions by lifetime, then by index."""
        sets: dict[Lifetime, list[list[Region]]] = {}
        for region in self.regions:
            of_lifetime = sets.setdefault(region.lifetime, [])
            if region.index == len(of_lifetime):
                of_lifetime.append([])
            of_lifetime[region.index].append(region)
        return sets

    @cached_property
    def _kinds(self) -> list[tuple[str, list[list[Region]]]]:
        """Sets that hold the same regions, under one label: frames of layers that differ are several kinds."""
        kinds: list[tuple[str, list[list[Region]]]] = []
        for lifetime, sets in self._sets.items():
            if lifetime != "frame" or isinstance(self.recv_policy, str):
                kinds.append((_set_label(lifetime, sets), sets))
                continue
            for word in dict.fromkeys(self.frame_policies):
                alike = [each for each, policy in zip(sets, self.frame_policies, strict=True) if policy == word]
                kinds.append((f"{_set_label(lifetime, alike)} ({word})", alike))
        return kinds

    @cached_property
    def _by_name(self) -> dict[tuple[str, int, Lifetime], Region]:
        return {(region.name, region.index, region.lifetime): region for region in self.regions}

    @cached_property
    def lifetimes(self) -> dict[str, Lifetime]:
        """The lifetime word of each region's name; of the first set that has it."""
        return {region.name: region.lifetime for region in reversed(self.regions)}

    @property
    def _has_stash(self) -> bool:
        return "stash_pages" in self.lifetimes

    def _content(self) -> dict[str, Any]:
        schedule = {"kind": self.schedule.kind, **dict(self.schedule.parameters)}
        counts = {"num_frames": self.schedule.num_frames, "num_workspaces": self.schedule.num_workspaces}
        return {
            "config": self.config.model_dump(mode="json"),
            "schedule": {**schedule, **counts},
            "capacity_rows": self.capacity_rows,
            "total_bytes": self.total_bytes,
            "recv_policy": self.recv_policy if isinstance(self.recv_policy, str) else list(self.recv_policy),
            **({} if self.stash_rows is None else {"stash_rows": self.stash_rows}),
            **({"dedups": self.dedups} if self.config.wire == "auto" else {}),
            **({} if self.engine == "native" else {"engine": self.engine, "engine_bytes": self.engine_bytes}),
            "regions": [_as_json(region) for region in self.regions],
        }


def describe_difference(a_json: str, b_json: str, *, names: tuple[str, str] = ("rank 0", "rank 1")) -> str:
    """List what differs between two plans given by `to_json`, one line a field; "" for equal plans.

    Fields of config and schedule are listed; only if those are equal, what follows from them.
    """
    a, b = json.loads(a_json), json.loads(b_json)
    lines: list[str] = []
    for part in ("config", "schedule"):
        lines.extend(_differing_fields(a[part], b[part], names))
    if not lines:
        derived = [{key: plan[key] for key in plan if key not in ("config", "schedule")} for plan in (a, b)]
        lines.extend(_differing_fields(derived[0], derived[1], names))
    return "\n".join(lines)


def _num_scales(payload: Payload, hidden: int) -> int:
    if not payload.scale_bytes_for(hidden):
        return 0
    return payload.scale_bytes_for(hidden) // _ITEM_BYTES[_SCALE_DTYPE[payload.format]]


def _num_scale_columns(payload: Payload, hidden: int) -> int:
    is_blocked = payload.scale_layout == "blocked"  # of one byte each
    return payload.scale_row_bytes_for(hidden) if is_blocked else _num_scales(payload, hidden)


def _check_buffer(buffer: Any, rows: int, nbytes: int) -> Any:
    """Check a buffer to carve; return torch, which whoever has a tensor has imported: planning does not need it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(buffer, torch.Tensor):
        raise ConfigError(f"carve takes a torch tensor, found {type(buffer).__name__}")
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
        raise ConfigError(
            f"carve takes a contiguous [n] uint8 tensor, found {list(buffer.shape)} {buffer.dtype} with strides "
            f"{tuple(buffer.stride())}; pass buffer.view(torch.uint8).view(-1)"
        )
    if buffer.shape[0] < nbytes:
        raise ConfigError(
            f"carve needs {nbytes} bytes for {rows} rows, found a buffer of {buffer.shape[0]}; "
            f"allocate plan.window_nbytes({rows})"
        )
    if buffer.data_ptr() % ROW_ALIGNMENT_BYTES:
        raise ConfigError(
            f"carve needs a buffer at a multiple of {ROW_ALIGNMENT_BYTES} bytes, found address "
            f"{buffer.data_ptr():#x}, {buffer.data_ptr() % ROW_ALIGNMENT_BYTES} past one; slice it there"
        )
    return torch


def _differing_fields(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str], prefix: str = "") -> Iterator[str]:
    for key in sorted(a.keys() | b.keys()):
        ours, theirs = a.get(key), b.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from _differing_fields(ours, theirs, names, f"{prefix}{key}.")
        elif ours != theirs:
            yield f"{prefix}{key}: {names[0]} has {_short(ours)}, {names[1]} has {_short(theirs)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _capacity_rows(config: EpConfig) -> int:
    """Return C. Worst case: every token of every rank picks min(K, L) experts of one rank; zones round up."""
    if config.recv_capacity_per_rank is not None:
        return config.recv_capacity_per_rank
    num_local_experts, alignment = config.num_local_experts, config.expert_alignment
    num_rows = config.num_ranks * config.max_tokens_per_rank * min(config.num_topk, num_local_experts)
    capacity = round_up(num_rows + min(num_local_experts, num_rows) * (alignment - 1), alignment)
    if config.capacity_factor is not None:
        num_rows = math.ceil(config.max_tokens_per_rank * config.num_topk * config.capacity_factor)
        capacity = min(round_up(num_rows + num_local_experts * (alignment - 1), alignment), capacity)
    if capacity > _MAX_ROWS:
        raise ConfigError(
            f"the capacity comes to {capacity} rows, more than the {_MAX_ROWS} that int32 offs can index; "
            "give recv_capacity_per_rank or a capacity_factor, or lower max_tokens_per_rank"
        )
    return capacity


def _policies(words: RecvPolicy | Sequence[RecvPolicy], schedule: Schedule) -> RecvPolicies:
    """Return one word, or one a layer where they differ."""
    given = tuple(words) if isinstance(words, Sequence) and not isinstance(words, str) else (words,)
    unknown = [word for word in given if word not in ("keep", "stash", "recompute")]
    if unknown or not given:
        raise ConfigError(
            f"recv_policy takes 'keep', 'stash' or 'recompute', or one of them per layer, found {words!r}"
        )
    if not isinstance(words, str) and len(given) != schedule.num_layers:
        unit = "frame" if schedule.kind == "by_hand" else "layer"
        raise ConfigError(
            f"recv_policy={words!r} has {len(given)} word(s) and {schedule} has {schedule.num_layers} {unit}(s); give "
            f"one word for all, or one a {unit}"
        )
    return given[0] if len(set(given)) == 1 else given


def _of_frames(policies: RecvPolicies, schedule: Schedule) -> tuple[RecvPolicy, ...]:
    if isinstance(policies, str):
        return (policies,) * schedule.num_frames
    return tuple(policies[schedule.layer_of(frame)] for frame in range(schedule.num_frames))


def _check_stash_rows(stash_rows: object, policies: RecvPolicies) -> None:
    if stash_rows is None:
        return
    if type(stash_rows) is not int or stash_rows < 1:
        raise ConfigError(
            f"stash_rows={stash_rows!r} is no number of rows; give the rows that a rank receives in all stashed "
            "dispatches that are open at once, or leave it out"
        )
    if "stash" not in policies:
        raise ConfigError(
            f"stash_rows={stash_rows} sizes the pages of stashed rows, and recv_policy={policies!r} stashes none; "
            "leave it out, or use recv_policy='stash'"
        )


def _check_policy(config: EpConfig, policy: RecvPolicy) -> None:
    if config.inference_only and policy != "keep":
        raise ConfigError(
            f"recv_policy={policy!r} brings rows back for a backward, and inference_only=True plans none; leave it "
            "out, and use save_recv=False to keep rows in the workspace"
        )
    if policy == "stash" and any("recv_tokens" in pair for pair in config.alias):
        raise ConfigError(
            f"recv_policy='stash' copies received rows when combine has them no more: alias={config.alias!r} lets the "
            "experts overwrite them before; drop that alias, or use recv_policy='recompute'"
        )
    needs_rows = config.dispatch_payload.format == "same" and not config.inference_only
    if not config.save_recv and needs_rows and policy == "keep":
        raise ConfigError(
            "save_recv=False with dispatch_payload='same' loses the rows that the experts' weight gradient reads; use "
            "save_recv=True, a quantised payload, inference_only=True, or Plan.build(..., recv_policy='recompute') or "
            "'stash'"
        )


def _payload_needs(payload: Payload, config: EpConfig, capacity_rows: int, prefix: str, data: str) -> list[_Need]:
    """Return the regions of rows in one payload: data, block scales, row scales."""
    row_bytes = payload.row_bytes_for(config.hidden, config.token_dtype)
    dtype = _DATA_DTYPE.get(payload.format, _TOKEN_DTYPE[config.token_dtype])
    needs = [_Need(data, (capacity_rows, row_bytes // _ITEM_BYTES[dtype]), dtype)]
    scale_row_bytes = payload.scale_row_bytes_for(config.hidden)
    if scale_row_bytes:
        dtype = _SCALE_DTYPE[payload.format]
        needs.append(_Need(f"{prefix}scales", (capacity_rows, scale_row_bytes // _ITEM_BYTES[dtype]), dtype))
    if payload.format == "nvfp4":
        needs.append(_Need(f"{prefix}row_scales", (capacity_rows,), "float32"))
    return needs


def _wire_needs(payload: Payload, config: EpConfig, capacity_rows: int, scales: str) -> list[_Need]:
    """Return where blocked scales arrive, row by row, before they are tiled."""
    if payload.scale_layout != "blocked":
        return []
    return [_Need(f"{scales}_wire", (capacity_rows, payload.wire_scale_row_bytes_for(config.hidden)), "uint8")]


def _wire_model(config: EpConfig) -> WireModel:
    num_experts, num_local, num_topk = config.num_experts, config.num_local_experts, config.num_topk
    num_chosen = min(num_topk, num_experts)

    def probability(num_slots: int) -> float:
        if num_slots > num_chosen:
            return 0.0
        others = math.comb(num_experts - num_local, num_chosen - num_slots)
        return math.comb(num_local, num_slots) * others / math.comb(num_experts, num_chosen)

    slots, one = num_chosen * num_local / num_experts, probability(1)  # on one peer
    several = 1.0 - probability(0) - one
    payloads = [config.dispatch_payload] if config.inference_only else [
        config.dispatch_payload, config.combine_grad_payload
    ]  # fmt: skip
    row_bytes = sum(_travelling_bytes(payload, config) for payload in payloads)
    num_sent = config.max_tokens_per_rank * (config.num_ranks - 1)  # (token, peer)
    slot_bytes = len(payloads) * num_topk * _ITEM_BYTES["int64"]
    return WireModel(
        direct_bytes=round(num_sent * slots * row_bytes),
        dedup_bytes=round(num_sent * ((one + several) * row_bytes + slot_bytes)),
        copied_bytes=round(num_sent * (several + slots - one) * row_bytes),
    )


def _dedups(config: EpConfig) -> bool:
    if config.wire == "auto":
        model = _wire_model(config)
        return model.dedup_us < model.direct_us
    return config.wire == "dedup" and config.num_ranks > 1


def _adds_by_rank(config: EpConfig) -> bool:
    return config.combine_order == "by_rank" and config.num_ranks > 1


def _travelling_bytes(payload: Payload, config: EpConfig) -> int:
    """Return the bytes of a row as it travels: data, then block scales. Weights and row scales go to their slots."""
    data_bytes = payload.row_bytes_for(config.hidden, config.token_dtype)
    return data_bytes + payload.wire_scale_row_bytes_for(config.hidden)


def _rows_by_wire(name: str, payload: Payload, config: EpConfig) -> list[_Need]:
    """Return where rows of tokens that have several slots lie: T of each rank, as they came or as sums for it."""
    row_bytes = _travelling_bytes(payload, config) if _dedups(config) else 0
    if _adds_by_rank(config):
        row_bytes = max(row_bytes, Payload.same().row_bytes_for(config.hidden, config.token_dtype))
    return [_Need(name, (config.num_ranks * config.max_tokens_per_rank, row_bytes), "uint8")] if row_bytes else []


def _cells(name: str, config: EpConfig) -> _Need:
    """Return one 8-byte cell per source rank."""
    return _Need(name, (config.num_ranks,), "int64")


def _token_rows(name: str, config: EpConfig, capacity_rows: int) -> _Need:
    return _Need(name, (capacity_rows, config.hidden), _TOKEN_DTYPE[config.token_dtype])


def _arena_needs(config: EpConfig, schedule: Schedule) -> list[_Need]:
    return [
        _Need("control", (CONTROL_BYTES,), "uint8"),
        _cells("abort_cells", config),
        _cells("progress_cells", config),
        _Need("frame_counters", (schedule.num_frames, 4), "int32"),
        _Need("forward_counters", (schedule.num_workspaces, 2), "int32"),
        _Need("backward_counters", (schedule.num_workspaces, 2), "int32"),
    ]


def _recv_needs(config: EpConfig, capacity_rows: int) -> list[_Need]:
    return _payload_needs(config.dispatch_payload, config, capacity_rows, "recv_", "recv_tokens")


def _holds_rows(config: EpConfig, policy: RecvPolicy) -> bool:
    """Tell whether a frame has regions for received rows; else they lie in the forward workspace."""
    return config.save_recv and policy == "keep"


def _frame_needs(config: EpConfig, capacity_rows: int, policy: RecvPolicy) -> list[_Need]:
    num_local_experts = config.num_local_experts
    needs = [
        _Need("count_cells", (config.num_ranks, config.num_experts + COUNT_HEADER_CELLS), "int64"),
        _cells("arrived_cells", config),
        _Need("slot_map", (config.max_tokens_per_rank, config.num_topk), "int64"),
        _Need("offs", (num_local_experts,), "int32"),
        _Need("counts", (2 * num_local_experts + 1,), "int64"),
        _Need("overflow", (1,), "float32"),
        _Need("recv_topk_weights", (capacity_rows,), "float32"),
    ]
    if policy == "stash":
        needs.append(_Need("stash_table", (STASH_TABLE_HEADER + _num_pages(capacity_rows),), "int32"))
    return needs + (_recv_needs(config, capacity_rows) if _holds_rows(config, policy) else [])


def _forward_needs(config: EpConfig, capacity_rows: int, holds_rows: bool) -> list[_Need]:
    num_chunks = -(-config.max_tokens_per_rank // ROUTE_CHUNK_TOKENS)
    needs = [
        _cells("ready_cells", config),
        _cells("ack_cells", config),
        _Need("route_base", (config.num_experts,), "int64"),
        _Need("route_scratch", (num_chunks, config.num_experts), "int32"),
    ]
    if holds_rows:
        needs += _recv_needs(config, capacity_rows)
    wire = _wire_needs(config.dispatch_payload, config, capacity_rows, "recv_scales")
    wire += _rows_by_wire("wire_rows", config.dispatch_payload, config)
    return [*needs, *wire, _token_rows("expert_out", config, capacity_rows)]


def _backward_needs(config: EpConfig, capacity_rows: int) -> list[_Need]:
    names = ("go_cells", "grad_arrived_cells", "grad_ready_cells", "grad_ack_cells")
    payload = config.combine_grad_payload
    return [
        *(_cells(name, config) for name in names),
        *_payload_needs(payload, config, capacity_rows, "grad_expert_out_", "grad_expert_out"),
        *_wire_needs(payload, config, capacity_rows, "grad_expert_out_scales"),
        *_rows_by_wire("grad_wire_rows", payload, config),
        _token_rows("grad_recv_tokens", config, capacity_rows),
        _Need("grad_recv_topk_weights", (capacity_rows,), "float32"),
    ]


def _num_pages(num_rows: int) -> int:
    return -(-num_rows // STASH_PAGE_ROWS)


def _page_offsets(config: EpConfig) -> tuple[int, ...]:
    sizes = [need.nbytes for need in _recv_needs(config, STASH_PAGE_ROWS)]
    return tuple(sum(sizes[:part]) for part in range(len(sizes) + 1))


def _stash_needs(config: EpConfig, num_pages: int) -> list[_Need]:
    page_bytes = _page_offsets(config)[-1]
    assert page_bytes % ALIGNMENT_BYTES == 0, "128 rows of multiples of 16 bytes, of their scales of 4"
    return [
        _Need("stash_counters", (STASH_COUNTERS_BYTES // 4,), "int32"),
        _Need("stash_free", (num_pages,), "int32"),
        _Need("stash_pages", (num_pages, page_bytes), "uint8"),
    ]


def _check_nccl_ep(config: EpConfig, capacity_rows: int, policies: RecvPolicies) -> None:
    """Refuse what the nccl_ep engine cannot give; the table in epbuf/engines/README.md says why."""
    facts: list[tuple[bool, str, str]] = [
        (config.num_ranks < 2, f"num_ranks={config.num_ranks}", "at least 2 ranks; one rank needs no network"),
        (
            config.num_topk > config.num_experts,
            f"num_topk={config.num_topk}",
            f"at most num_experts={config.num_experts}",
        ),
        (
            config.num_experts % NCCL_EP_EXPERTS_MULTIPLE != 0,
            f"num_experts={config.num_experts}",
            f"a multiple of {NCCL_EP_EXPERTS_MULTIPLE}",
        ),
        (
            capacity_rows < config.max_tokens_per_rank,
            f"a capacity of {capacity_rows} rows",
            f"at least max_tokens_per_rank={config.max_tokens_per_rank}",
        ),
        (policies != "keep", f"recv_policy={policies!r}", "'keep'"),
        (config.wire != "direct", f"wire={config.wire!r}", "'direct': it sends a token once for each rank anyway"),
        (
            config.combine_order != "k",
            f"combine_order={config.combine_order!r}",
            "'k'; its own order is in epbuf/engines/README.md",
        ),
        (bool(config.alias), f"alias={config.alias!r}", "no alias"),
        (
            config.combine_grad_payload.format != "same",
            f"combine_grad_payload={config.combine_grad_payload.format!r}",
            "'same': gradients travel in the token dtype",
        ),
        (
            config.dispatch_payload.format == "nvfp4" or config.dispatch_payload.scale_layout == "blocked",
            f"dispatch_payload={_payload_word(config.dispatch_payload)!r}",
            "'same', 'mxfp8', 'fp8_block128' or raw, with compact scales",
        ),
    ]
    for is_wrong, found, wanted in facts:
        if is_wrong:
            raise ConfigError(f"Plan.build(engine='nccl_ep') found {found} and takes {wanted}; or use engine='native'")


def _nccl_ep_token_bytes(config: EpConfig) -> int:
    payload, same = config.dispatch_payload, Payload.same()
    packed = payload.row_bytes_for(config.hidden, config.token_dtype) + payload.scale_row_bytes_for(config.hidden)
    return max(same.row_bytes_for(config.hidden, config.token_dtype), packed)


def _nccl_ep_bytes(config: EpConfig, capacity_rows: int) -> int:
    """Return the bytes of a group's shared buffers: rows, each token once, and weights, both ways; scales; routing."""
    token_bytes, num_tokens = _nccl_ep_token_bytes(config), config.num_ranks * config.max_tokens_per_rank
    rows, weights = num_tokens * token_bytes, capacity_rows * config.num_experts * _ITEM_BYTES["float32"]
    routing = num_tokens * -(-config.num_experts // 8)  # a bit for each expert
    return 2 * (rows + weights) + capacity_rows * token_bytes + routing


def _nccl_ep_handle_bytes(config: EpConfig, capacity_rows: int) -> int:
    """Return more bytes than any handle asks for, whatever ranks share an NVLink domain; `open` compares.

    Source: nccl-extensions 0.1.0, routing buffers of a high-throughput, expert-major handle with staging.
    """
    num_ranks, tokens, num_topk = config.num_ranks, config.max_tokens_per_rank, config.num_topk
    mask_bytes = 8 * -(-num_ranks // 64)
    per_token = num_ranks * (1 + 1 + 4 + mask_bytes + 4) + 4 * config.num_experts + 8 * num_topk
    per_row = config.num_local_experts + 8 * num_topk
    scratch = NCCL_EP_MAX_SMS * num_ranks * 64 + 12 * (config.num_local_experts + 1)
    padded_tokens = round_up(tokens, 16)
    return round_up(
        padded_tokens * per_token + capacity_rows * per_row + scratch + 32 * ALIGNMENT_BYTES, ALIGNMENT_BYTES
    )


def _nccl_ep_frame_needs(config: EpConfig, capacity_rows: int) -> list[_Need]:
    return [
        _Need("nccl_ep_handle", (_nccl_ep_handle_bytes(config, capacity_rows),), "uint8"),
        _Need("nccl_ep_topk_idx", (config.max_tokens_per_rank, config.num_topk), "int64"),
    ]


def _nccl_ep_arena_needs(config: EpConfig) -> list[_Need]:
    """Return what stands for tensors that the library demands and the caller did not give."""
    return [
        _Need("nccl_ep_ones", (config.max_tokens_per_rank, config.num_topk), "float32"),
        _Need("nccl_ep_no_token", (2, _nccl_ep_token_bytes(config)), "uint8"),
        _Need("nccl_ep_no_weights", (2, config.num_topk), "float32"),
    ]


def _place_all(
    config: EpConfig, schedule: Schedule, capacity_rows: int, policies: Sequence[RecvPolicy], stash_rows: int | None,
    engine: PlannedEngine,
) -> Iterator[Region]:  # fmt: skip
    """Yield all regions, one set after the other."""
    is_nccl_ep = engine == "nccl_ep"
    forward = _forward_needs(config, capacity_rows, not all(_holds_rows(config, policy) for policy in policies))
    backward = [] if config.inference_only else [_backward_needs(config, capacity_rows)]
    sets: list[tuple[Lifetime, list[list[_Need]]]] = [
        ("arena", [_arena_needs(config, schedule) + (_nccl_ep_arena_needs(config) if is_nccl_ep else [])]),
        (
            "frame",
            [
                _frame_needs(config, capacity_rows, policy)
                + (_nccl_ep_frame_needs(config, capacity_rows) if is_nccl_ep else [])
                for policy in policies
            ],
        ),
        ("forward", [forward] * schedule.num_workspaces),
        ("backward", backward * schedule.num_workspaces),
    ]
    if "stash" in policies:
        most_pages = policies.count("stash") * _num_pages(capacity_rows)
        num_pages = most_pages if stash_rows is None else min(most_pages, _num_pages(stash_rows))
        sets.append(("stash", [_stash_needs(config, num_pages)]))
    start = 0
    for lifetime, members in sets:
        for index, needs in enumerate(members):
            offsets, nbytes = _offsets(needs, dict(config.alias))
            for need in needs:
                offset = start + offsets[need.name]
                yield Region(need.name, index, offset, need.nbytes, ALIGNMENT_BYTES, need.shape, need.dtype, lifetime)
            start += nbytes


def _offsets(needs: list[_Need], alias: dict[str, str]) -> tuple[dict[str, int], int]:
    """Place one set: offsets from its start, and its size.

    Two aliased regions share the block of the larger and end together, so that scales follow their data without a gap
    whichever is larger. Example: data of 512 bytes aliased with 1024, scales of 64: 512, 0, 1024.
    """
    sizes = {need.name: need.nbytes for need in needs}
    offsets: dict[str, int] = {}
    end = 0
    for name in sizes:
        if name in offsets:
            continue
        members = [name, alias[name]] if alias.get(name) in sizes else [name]
        start = round_up(end, ALIGNMENT_BYTES)
        block_bytes = max(sizes[member] for member in members)
        for member in members:
            slack = block_bytes - sizes[member]
            offsets[member] = start + slack - slack % ALIGNMENT_BYTES
        end = start + block_bytes
    return offsets, round_up(end, ALIGNMENT_BYTES)


def _check_disjoint(regions: Sequence[Region], alias: Sequence[tuple[str, str]]) -> None:
    """Assert that regions share bytes only where `alias` says so: the plan's own promise, not the caller's."""
    reaching = regions[0]
    for region in sorted(regions, key=lambda region: region.offset):
        assert region.offset % region.alignment == 0, region
        if region is not reaching and region.offset < reaching.end:
            pair = {(reaching.name, region.name), (region.name, reaching.name)}
            assert pair & set(alias) and region.index == reaching.index, (reaching, region)
        reaching = max(reaching, region, key=lambda region: region.end)


def _describe(plan: Plan) -> list[str]:
    config = plan.config
    sizes = f"R={config.num_ranks} E={config.num_experts} (L={config.num_local_experts}) K={config.num_topk}"
    rows = f"H={config.hidden} {config.token_dtype} T={config.max_tokens_per_rank}"
    capacity = f"C={plan.capacity_rows} rows ({_capacity_source(config)}), A={config.expert_alignment}"
    payloads = f"dispatch {_payload_word(config.dispatch_payload)}"
    if not config.inference_only:
        payloads += f", combine backward {_payload_word(config.combine_grad_payload)}"
    lines = [f"{sizes} {rows}", f"{capacity}; {payloads}", f"{plan.schedule}{_policy_words(plan)}"]
    return [*lines, *_wire_words(plan)]


def _wire_words(plan: Plan) -> list[str]:
    """Say how rows cross and in which order sums are taken, and what "auto" has compared, unless both are defaults."""
    config, model = plan.config, plan.wire_model
    lines = []
    if config.combine_order == "by_rank":
        lines.append("combine adds by rank, then the sums of the ranks")
    if config.wire == "dedup":
        lines.append("wire dedup" if plan.dedups else "wire direct (dedup needs a peer)")
    if config.wire == "auto":
        direct = f"{human_bytes(model.direct_bytes)} in {model.direct_us:.0f} us"
        dedup = (
            f"{human_bytes(model.dedup_bytes)}, copying {human_bytes(model.copied_bytes)}, in {model.dedup_us:.0f} us"
        )
        lines.append(f"wire {'dedup' if plan.dedups else 'direct'} (auto): sending {direct}, or once a rank {dedup}")
    return lines


def _policy_words(plan: Plan) -> str:
    """Say what becomes of received rows, layer by layer, unless all are kept."""
    policies = plan.recv_policy
    if policies == "keep":
        return ""
    runs = [(policies, 1)] if isinstance(policies, str) else [(word, len([*run])) for word, run in groupby(policies)]
    words = ", ".join(f"{word} x {count}" if count > 1 else word for word, count in runs)
    pages = f" ({plan.num_stash_pages} pages of {STASH_PAGE_ROWS} rows)" if plan.num_stash_pages else ""
    return f", received rows: {words}{pages}"


def _capacity_source(config: EpConfig) -> str:
    if config.recv_capacity_per_rank is not None:
        return "given"
    return "worst case" if config.capacity_factor is None else f"factor {config.capacity_factor:g}"


def _payload_word(payload: Payload) -> str:
    return f"{payload.format} blocked" if payload.scale_layout == "blocked" else payload.format


def _set_label(lifetime: Lifetime, sets: Sequence[Sequence[Region]]) -> str:
    noun = f"{lifetime} workspace" if lifetime in ("forward", "backward") else lifetime
    return f"{noun} x {len(sets)}" if len(sets) > 1 else noun


def _each(sets: Sequence[Sequence[Region]]) -> str:
    return f"{human_bytes(_span(sets[0]))}{' each' if len(sets) > 1 else ''}"


def _span(regions: Sequence[Region]) -> int:
    """Return the bytes of one set, alignment gaps included."""
    return round_up(max(region.end for region in regions), ALIGNMENT_BYTES) - regions[0].offset


def _window_extents(lifetime: Lifetime, sets: Sequence[Sequence[Region]]) -> list[Extent]:
    """Return one range per set, or one for all when there are too many to tell apart."""
    if len(sets) > _MAX_DRAWN_SETS:
        return [Extent(_set_label(lifetime, sets), sets[0][0].offset, sum(map(_span, sets)))]
    names = [f"{lifetime} {index}" if len(sets) > 1 else lifetime for index in range(len(sets))]
    return [Extent(name, regions[0].offset, _span(regions)) for name, regions in zip(names, sets, strict=True)]


def _extent(region: Region) -> Extent:
    shape = " x ".join(str(size) for size in region.shape)
    return Extent(region.name, region.offset, region.nbytes, f"[{shape}] {region.dtype}")


def _table_row(region: Region, count: int) -> tuple[str, ...]:
    shape = f"[{', '.join(str(size) for size in region.shape)}]"
    sizes = human_bytes(region.nbytes), human_bytes(region.nbytes * count)
    return (f"  {region.name}", shape, region.dtype, *sizes, f"{region.offset:,}")


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Pad columns to equal width: words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _as_json(region: Region) -> dict[str, Any]:
    return {**vars(region), "shape": list(region.shape)}
