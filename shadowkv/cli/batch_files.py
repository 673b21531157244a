"""The files of a batch: requests read one at a time, results appended so that an interruption costs one line.

A result is one ``write`` of one line, where the disk has room for it. What an interruption can leave is
therefore a torn last line, which is cut off when the file is opened again. Knows the format's envelope;
knows no model.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shadowkv.errors import ConfigError
from shadowkv.protocol import BodyError, Json, Work, read_body

_FIRST_BYTES = b'{"id": "batch_req_'
"""Every line written here starts so; a torn line that does not is someone else's, and is left alone."""
_SYNC_LINES = 64
_SYNC_SECONDS = 5.0


@dataclass(frozen=True)
class Envelope:
    """One input line. ``fault`` says what is wrong with it, and then there is no work."""

    number: int
    custom_id: str | None
    work: Work | None
    fault: BodyError | None

    @property
    def key(self) -> str:
        """What tells this line from all others: its custom_id, or its number where it has no own one."""
        own = self.custom_id is not None and (self.fault is None or self.fault.code != "duplicate_custom_id")
        return f"id:{self.custom_id}" if own else f"line:{self.number}"


@dataclass(frozen=True)
class Survey:
    """What there is to do: all lines, how many are not in the results, custom_ids that are only there."""

    lines: int
    left: int
    gone: tuple[str, ...]


def survey(path: Path, known: set[str]) -> Survey:
    """Compare a batch file with the results that are there already."""
    keys = {envelope.key for envelope in read_envelopes(path, None)}
    gone = sorted(key.removeprefix("id:") for key in known - keys if key.startswith("id:"))
    return Survey(len(keys), len(keys - known), tuple(gone))


def read_envelopes(path: Path, default_max_tokens: int | None) -> Iterator[Envelope]:
    """Every non-empty line of a batch file; keeps only the custom_ids that it has seen."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            custom_id, line, fault = _custom_id(raw)
            if custom_id is not None and custom_id in seen:
                fault = BodyError(
                    f"custom_id {custom_id!r} is in an earlier line already",
                    param="custom_id",
                    code="duplicate_custom_id",
                )
            elif custom_id is not None:
                seen.add(custom_id)
            work = None
            if fault is None:
                try:
                    work = _work(line, default_max_tokens)
                except BodyError as error:
                    fault = error
            yield Envelope(number, custom_id, work, fault)


def _custom_id(raw: bytes) -> tuple[str | None, Json, BodyError | None]:
    try:
        line = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return None, {}, BodyError(f"the line is not JSON: {error}", code="invalid_json")
    if not isinstance(line, dict):
        return None, {}, BodyError("the line is not a JSON object", code="invalid_json")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        message = f"custom_id is {custom_id!r}; every line needs a non-empty string of its own"
        return None, line, BodyError(message, param="custom_id", code="missing_custom_id")
    return custom_id, line, None


def _work(line: Json, default_max_tokens: int | None) -> Work:
    if line.get("method", "POST") != "POST":
        raise BodyError(f"method is {line['method']!r}; allowed: POST", param="method", code="invalid_method")
    url = line.get("url")
    return read_body(url if isinstance(url, str) else repr(url), line.get("body"), default_max_tokens)


class Results:
    """The output file, open for appending. ``known`` holds the keys of the lines that are there."""

    def __init__(self, file: BinaryIO, known: set[str]) -> None:
        self.known = known
        self._file = file
        self._unsynced = 0
        self._synced_at = time.monotonic()

    def write(self, row: Json) -> None:
        """Append one result, in a single write unless the disk is full."""
        line = memoryview(_line(row))
        while line:  # a disk with room for a part takes it without a word, and refuses only what follows
            line = line[self._file.write(line) :]
        self._unsynced += 1
        if self._unsynced >= _SYNC_LINES or time.monotonic() - self._synced_at > _SYNC_SECONDS:
            self._sync()

    def close(self) -> None:
        """Everything to the disk."""
        self._sync()
        self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._unsynced, self._synced_at = 0, time.monotonic()


def _line(row: Json) -> bytes:
    text = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can carry
        return (json.dumps(row, allow_nan=False) + "\n").encode("ascii")


def open_results(path: Path, *, overwrite: bool = False, retry_errors: bool = False) -> Results:
    """Open the output, cut off a torn last line, and learn which lines are done.

    Raises:
        ConfigError: the file holds something that is not a result of this command, or is no file.
    """
    known: set[str] = set()
    if str(path) == "-" or (path.exists() and not path.is_file()):
        raise ConfigError(f"--output {path} is no file that finished lines can be read from again; name one")
    if overwrite or not path.exists():
        return Results(path.open("wb", buffering=0), known)
    _mend(path)
    drop: set[int] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            key, failed = _row_key(path, number, raw)
            if failed and retry_errors:
                drop.add(number)
            else:
                known.add(key)
    if drop:
        _rewrite_without(path, drop)
    return Results(path.open("ab", buffering=0), known)


def _mend(path: Path) -> None:
    """End the file with a whole line: complete one that lacks only its newline, cut off a torn one."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        at = size
        while at > 0:
            step = min(at, 1 << 16)
            file.seek(at - step)
            newline = file.read(step).rfind(b"\n")
            if newline >= 0:
                at += newline + 1 - step
                break
            at -= step
        file.seek(at)
        tail = file.read()
        if not tail:
            return
        if tail[: len(_FIRST_BYTES)] != _FIRST_BYTES[: len(tail)]:
            raise ConfigError(f"{path} does not end with a result of this command; name another --output")
        try:
            json.loads(tail)
        except ValueError:
            file.truncate(at)
        else:
            file.seek(size)
            file.write(b"\n")


def _row_key(path: Path, number: int, raw: bytes) -> tuple[str, bool]:
    try:
        row = json.loads(raw)
        custom_id, line, error = row["custom_id"], row.get("line"), row["error"]
        assert raw.startswith(_FIRST_BYTES)
        assert isinstance(line, int) if line is not None else isinstance(custom_id, str)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise ConfigError(f"{path}, line {number}, is not a result of this command; name another --output") from None
    return (f"line:{line}" if line is not None else f"id:{custom_id}"), error is not None


def _rewrite_without(path: Path, drop: set[int]) -> None:
    """The same file without some lines, replaced at once so that no interruption loses a result."""
    fresh = path.with_name(path.name + ".part")
    with path.open("rb") as old, fresh.open("wb") as new:
        for number, raw in enumerate(old, start=1):
            if number not in drop:
                new.write(raw)
        new.flush()
        os.fsync(new.fileno())
    os.replace(fresh, path)
