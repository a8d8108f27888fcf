"""Draw named byte ranges to scale, as an SVG that a browser, a README and a person can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 960
_MARGIN = 24
_BAR = 26
_LINE = 18
_GAP = 20
_CHAR = 7  # width of one character of a label, generously
_COLUMNS = (16, 230, 590, 760)  # of a legend: where name and note begin, where size and offset end
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#a58a1f", "#9c755f")


@dataclass(frozen=True)
class Extent:
    """One named range of bytes, with a note for its legend."""

    name: str
    offset: int
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Band:
    """One bar of the picture. Ranges that share bytes are drawn in lanes below each other."""

    label: str
    extents: Sequence[Extent]


def human_bytes(nbytes: int) -> str:
    """Write a size with a binary unit: 512 B, 4.0 KiB, 672.0 MiB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def draw_svg(heading: Sequence[str], window: Band, bands: Sequence[Band]) -> str:
    """Draw the window as one bar, then each band as a bar of its own scale with a legend under it."""
    y = _MARGIN
    parts = []
    for number, line in enumerate(heading):
        y += _LINE
        parts.append(_text(_MARGIN, y, line, "title" if number == 0 else "note"))
    y += _GAP
    for band in (window, *bands):
        height, drawn = _draw_band(band, y, with_legend=band is not window)
        parts.extend(drawn)
        y += height + _GAP
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}">\n'
        "<style>text{font:12px monospace;fill:#222}.title{font-size:15px;font-weight:bold}.label{font-weight:bold}"
        ".note{fill:#555}.in{fill:#fff;text-anchor:middle}.right{text-anchor:end}</style>\n"
        f'<rect width="{_WIDTH}" height="{y}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _draw_band(band: Band, y: int, *, with_legend: bool) -> tuple[int, list[str]]:
    """Return the height of a band and its elements."""
    first = min(extent.offset for extent in band.extents)
    nbytes = max(extent.offset + extent.nbytes for extent in band.extents) - first
    parts = [_text(_MARGIN, y + 12, band.label, "label")]
    top = y + _LINE
    scale = (_WIDTH - 2 * _MARGIN) / nbytes
    lanes = _lanes(band.extents)
    for number, extent in enumerate(band.extents):
        x = _MARGIN + (extent.offset - first) * scale
        box = _Box(x, top + lanes[number] * _BAR, max(extent.nbytes * scale, 1.0), _colour(number))
        parts.extend(_draw_extent(extent, box))
    bottom = top + (max(lanes) + 1) * _BAR
    if with_legend:
        for number, extent in enumerate(band.extents):
            bottom += _LINE
            parts.extend(_legend(extent, bottom, _colour(number)))
    return bottom - y, parts


@dataclass(frozen=True)
class _Box:
    x: float
    y: int
    width: float
    colour: str


def _draw_extent(extent: Extent, box: _Box) -> Iterator[str]:
    hover = f"{extent.name}: {extent.nbytes:,} bytes at {extent.offset:,} {extent.note}"
    yield (
        f'<rect x="{box.x:.2f}" y="{box.y}" width="{box.width:.2f}" height="{_BAR - 2}" fill="{box.colour}" '
        f'stroke="#fff" stroke-width="0.5"><title>{escape(hover)}</title></rect>'
    )
    if box.width > _CHAR * len(extent.name) + 8:
        yield _text(box.x + box.width / 2, box.y + 16, extent.name, "in")


def _legend(extent: Extent, y: int, colour: str) -> Iterator[str]:
    name, note, size, offset = (_MARGIN + column for column in _COLUMNS)
    yield f'<rect x="{_MARGIN}" y="{y - 10}" width="11" height="11" fill="{colour}"/>'
    yield _text(name, y, extent.name)
    yield _text(note, y, extent.note, "note")
    yield _text(size, y, human_bytes(extent.nbytes), "right")
    yield _text(offset, y, f"at {extent.offset:,}", "note right")


def _lanes(extents: Sequence[Extent]) -> list[int]:
    """Give each range the first lane in which no range before it reaches its start."""
    lanes = [0] * len(extents)
    ends: list[int] = []
    for number in sorted(range(len(extents)), key=lambda number: extents[number].offset):
        extent = extents[number]
        lane = next((lane for lane, end in enumerate(ends) if end <= extent.offset), len(ends))
        ends[lane : lane + 1] = [extent.offset + extent.nbytes]
        lanes[number] = lane
    return lanes


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _text(x: float, y: int, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'
