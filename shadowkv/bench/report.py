"""Results as tables and documents: what stands in a row, and what is said beside it."""

from collections.abc import Mapping, Sequence

from shadowkv.bench.ceilings import Ceilings
from shadowkv.bench.decode import EQUIVALENT, Declined, Decoded, Row
from shadowkv.bench.parts import PARTS

SCHEMA = 1
"""Raised whenever a field of the documents changes its meaning."""

DECODE_COLUMNS = (
    "context",
    "method",
    "batch",
    "tokens/s",
    "x full",
    "step ms: median (10 % to 90 %)",
    "hit rate",
    "bus a step",
    "device",
    "host",
    "prefill s",
    "index s",
)
PART_COLUMNS = ("context", "method", *(f"{part} ms" for part in PARTS), "busy ms", "kernels")
FLOOR_COLUMNS = (
    "context",
    "method",
    "HBM a step",
    "HBM ms",
    "bus ms",
    "step / floor",
    "equivalent TB/s",
    "by formula TB/s",
)


def _size(count: float) -> str:
    """Decimal units, as bandwidths have."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def decode_cells(row: Row) -> list[str]:
    """Under :data:`DECODE_COLUMNS`: prefill, index building and decoding apart."""
    if isinstance(row, Declined):
        return [f"{row.context_tokens:,}", row.method, "0", "does not fit", *[""] * 8]
    batch = f"{row.batch}" if row.batch < row.largest_batch else f"{row.batch} ({row.limit})"
    return [
        f"{row.context_tokens:,}",
        row.method,
        batch,
        f"{row.tokens_per_second:.1f}",
        _number(row.speedup, ".2f"),
        row.step.text(),
        _number(row.hit_rate, ".3f"),
        _size(row.fetched_bytes),
        _size(row.device_bytes),
        _size(row.host_bytes),
        _number(row.prefill_s, ".2f"),
        f"{row.index_s:.2f}",
    ]


def part_cells(row: Decoded) -> list[str]:
    """Under :data:`PART_COLUMNS`."""
    assert row.parts is not None
    times = [f"{row.parts.by_part_ms[part]:.3f}" for part in PARTS]
    return [f"{row.context_tokens:,}", row.method, *times, f"{row.parts.busy_ms:.3f}", f"{row.parts.kernels:.0f}"]


def floor_cells(row: Decoded) -> list[str]:
    """Under :data:`FLOOR_COLUMNS`."""
    measured, formula = row.equivalent_gb_s, row.equivalent_formula_gb_s
    return [
        f"{row.context_tokens:,}",
        row.method,
        "" if row.traffic is None else _size(row.traffic.device_bytes),
        _number(row.hbm_ms, ".3f"),
        _number(row.bus_ms, ".3f"),
        _number(row.floor_share, ".2f"),
        _number(None if measured is None else measured / 1e3, ".2f"),
        _number(None if formula is None else formula / 1e3, ".2f"),
    ]


def decode_tables(rows: Sequence[Row]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, columns and cells of every table that there is something to put in."""
    ran = [row for row in rows if isinstance(row, Decoded)]
    split = [row for row in ran if row.parts is not None]
    found: list[tuple[str, Sequence[str], list[list[str]]]] = [
        ("decoding", DECODE_COLUMNS, [decode_cells(row) for row in rows])
    ]
    if split:
        title = "busy time of a step by part (parts that run side by side add up to more)"
        found.append((title, PART_COLUMNS, [part_cells(row) for row in split]))
    if ran:
        title = "a step beside the least that its bytes allow at the measured ceilings"
        found.append((title, FLOOR_COLUMNS, [floor_cells(row) for row in ran]))
    return found


def legend(rows: Sequence[Row]) -> list[str]:
    """What has to be said beside the tables: everything synthetic, and what a figure is."""
    ran = [row for row in rows if isinstance(row, Decoded)]
    lines = [f"synthetic: {one}" for one in dict.fromkeys(text for row in ran for text in row.synthetic)]
    lines += [f"{row.method} at {row.context_tokens:,}: {row.reason}" for row in rows if isinstance(row, Declined)]
    for row in ran:
        if row.parts is not None and row.parts.unmatched:
            lines.append(f"rest of {row.method} at {row.context_tokens:,}: {', '.join(row.parts.unmatched)}")
    lines += [f"decoding by {by}: {', '.join(names)}" for by, names in _by(ran).items()]
    lines += [f"settings: {one}" for one in dict.fromkeys(row.settings for row in ran)]
    return [*lines, f"equivalent bandwidth: {EQUIVALENT}"]


def _by(rows: Sequence[Decoded]) -> dict[str, list[str]]:
    made: dict[str, list[str]] = {}
    for row in rows:
        if row.method not in made.setdefault(row.by, []):
            made[row.by].append(row.method)
    return made


def decode_document(
    rows: Sequence[Row], about: Mapping[str, object], ceilings: Ceilings | None, measured: Mapping[str, str]
) -> dict[str, object]:
    """Everything, for JSON. Units are in the names."""
    return {
        "schema": SCHEMA,
        "kind": "decode",
        **about,
        "measured": dict(measured),
        "ceilings": None if ceilings is None else ceilings.to_dict(),
        "definitions": {"equivalent_gb_s": EQUIVALENT},
        "rows": [row.to_dict() for row in rows if isinstance(row, Decoded)],
        "declined": [row.to_dict() for row in rows if isinstance(row, Declined)],
    }
