"""Tables and documents."""

import json
from dataclasses import replace

import pytest

from shadowkv.bench.decode import Declined, Row, with_speedups
from shadowkv.bench.report import (
    DECODE_COLUMNS,
    FLOOR_COLUMNS,
    PART_COLUMNS,
    decode_document,
    decode_tables,
    legend,
)
from tests.bench.fakes import H200, decoded


def test_every_table_has_as_many_cells_as_columns() -> None:
    rows: list[Row] = [
        decoded(),
        Declined("full", 4096, "out of memory"),
        replace(decoded("quest"), parts=None, traffic=None),
    ]
    tables = decode_tables(rows)
    assert [columns for _, columns, _ in tables] == [DECODE_COLUMNS, PART_COLUMNS, FLOOR_COLUMNS]
    for _, columns, lines in tables:
        assert {len(line) for line in lines} == {len(columns)}
    assert tables[0][2][1][3] == "does not fit"
    assert len(tables[1][2]) == 1


def test_speedups_are_against_full_attention_at_the_same_length() -> None:
    rows = with_speedups(
        [
            decoded("full", 100.0),
            decoded("shadowkv", 650.0),
            decoded("shadowkv", 80.0, 4096),
            Declined("full", 4096, ""),
        ]
    )
    assert [getattr(row, "speedup", "declined") for row in rows] == [1.0, 6.5, None, "declined"]


def test_a_step_beside_its_floor() -> None:
    assert decoded().floor_share == 2.0
    assert replace(decoded(), bus_ms=20.0).floor_share == 0.5
    assert replace(decoded(), hbm_ms=None).floor_share is None


def test_whatever_is_synthetic_is_said() -> None:
    lines = legend([decoded(), Declined("full", 4096, "out of memory: 1 byte")])
    assert "synthetic: random weights" in lines
    assert "full at 4,096: out of memory: 1 byte" in lines
    assert "rest of full at 1,024: odd_kernel" in lines
    assert any(line.startswith("equivalent bandwidth: keys and values that full attention") for line in lines)


def test_the_document_is_json_with_a_schema() -> None:
    made = decode_document([decoded(), Declined("full", 4096, "x")], {"model": "m"}, H200, {"commit": "c"})
    read = json.loads(json.dumps(made))
    assert (read["schema"], read["kind"], read["model"]) == (1, "decode", "m")
    assert read["measured"] == {"commit": "c"}
    assert read["ceilings"]["bus_gb_s"] == 50.0
    (row,) = read["rows"]
    assert row["synthetic"] == ["random weights"]
    assert row["step"]["median_ms"] == 10.0
    assert row["parts"]["by_part_ms"]["linears"] == 4.0
    assert row["step_over_floor"] == 2.0
    assert read["declined"] == [{"method": "full", "context_tokens": 4096, "reason": "x"}]


def test_ceilings() -> None:
    assert H200.hbm_gb_s == 4320.0
    assert H200.device_ms(4.32e9) == pytest.approx(1.0)
    assert H200.bus_ms(5e7) == pytest.approx(1.0)
    assert H200.compute_ms(808e9) == pytest.approx(1.0)
    assert H200.line().startswith("HBM 4.32 TB/s read, 4.27 TB/s copy; host to device 50.0 GB/s")
