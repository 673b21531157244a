"""The columns of the tables, said in three places."""

import pytest

from shadowkv.ops.rows import Address, Fact, RowFacts


def test_a_row_has_the_columns_in_their_order() -> None:
    assert [name.upper() for name in RowFacts._fields] == [column.name for column in Fact]
    assert [*Fact] == [*range(len(Fact))]
    assert [*Address] == [*range(len(Address))]
    assert [column for column, value in zip(Fact, RowFacts(), strict=True) if value] == [Fact.WRITE_SLOT]


def test_kernels_read_the_same_columns() -> None:
    pytest.importorskip("triton")
    from shadowkv.ops.triton import rows

    for column in (*Address, *Fact):
        assert getattr(rows, column.name).value == column
    assert (rows.ADDRESSES.value, rows.FACTS.value) == (len(Address), len(Fact))
