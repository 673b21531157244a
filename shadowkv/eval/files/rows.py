"""Rows of a user's JSON file, whose fields are read with an error that says file, line and field."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowkv.errors import RequestError


@dataclass(frozen=True)
class Row:
    """One object of a file. ``where`` names it for people."""

    where: str
    fields: Mapping[str, Any]

    def wrong(self, field: str, must: str) -> RequestError:
        """An error about a field."""
        given = repr(self.fields[field])[:80] if field in self.fields else "missing"
        return RequestError(f"{self.where}, field {field!r}: it is {given}; it must be {must}")

    def has(self, *names: str) -> bool:
        """All of these fields are there and not null."""
        return all(self.fields.get(name) is not None for name in names)

    def text(self, field: str, default: str | None = None) -> str:
        """A string.

        Args:
            default: for a field that is missing or null.

        Raises:
            RequestError: it is none, or missing without a default.
        """
        value = self.fields.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        return value

    def filled(self, field: str) -> str:
        """A string with something in it.

        Raises:
            RequestError: it is none.
        """
        value = self.fields.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(field, "a string that is not empty")
        return value

    def integer(self, field: str, default: int | None = None) -> int:
        """A whole number, not negative.

        Raises:
            RequestError: it is none, or missing without a default.
        """
        value = self.fields.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(field, "a whole number that is not negative")
        return value

    def texts(self, field: str, *, empty: bool = False) -> tuple[str, ...]:
        """A list of strings or numbers, or one of them alone, as strings.

        Args:
            empty: the list may be empty or missing, and may hold empty strings.

        Raises:
            RequestError: it is something else, or holds nothing.
        """
        value = self.fields.get(field)
        if value is None and empty:
            return ()
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
            raise self.wrong(field, "a list of strings or numbers")
        found = tuple(str(item) for item in items if empty or item != "")
        if not found and not empty:
            raise self.wrong(field, "a list with at least one answer that is not empty")
        return found

    def rows(self, field: str) -> "list[Row]":
        """A list of objects.

        Raises:
            RequestError: it is something else, or empty.
        """
        value = self.fields.get(field)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.wrong(field, "a list of objects that is not empty")
        return [Row(f"{self.where}, {field}[{place}]", item) for place, item in enumerate(value)]


def read_rows(path: str | Path) -> Iterator[Row]:
    """The objects of a JSONL file, or of a JSON file that is one list.

    Raises:
        RequestError: the file cannot be read, or a line is not a JSON object.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise RequestError(f"{path} is not valid JSON: {error}") from error
        numbered: Iterator[tuple[str, Any]] = ((f"{path}, record {place}", one) for place, one in enumerate(listed))
    else:
        numbered = _lines(path, text)
    empty = True
    for where, one in numbered:
        if not isinstance(one, dict):
            raise RequestError(f"{where}: it is of type {type(one).__name__}; it must be an object")
        empty = False
        yield Row(where, one)
    if empty:
        raise RequestError(f"{path} holds no rows")


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # Only line feeds end a line of JSONL: other line breaks may stand inside of strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise RequestError(f"{path}, line {number}: not valid JSON: {error}") from error
