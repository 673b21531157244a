"""RULER's own files, which carry prompts as published, and rows of the table that kvpress uses for it.

Source of the layouts: NVIDIA/RULER scripts/data (index, input, outputs, length; newer ones with answer_prefix
apart from the input) and simonjegou/ruler (context, question, answer_prefix, answer, task, max_new_tokens).
"""

import re
from collections.abc import Iterator
from pathlib import Path

from shadowkv.errors import RequestError
from shadowkv.eval.files.rows import Row, read_rows
from shadowkv.eval.key_values import key_value_sample
from shadowkv.eval.sample import Layout, Sample

ANSWER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""Tokens to generate by the first part of a task's name."""

OFFICIAL = "official"
"""Stands in brackets after the name of a task whose prompts are the published ones."""


_ANSWER_BEGINS = re.compile(r"(?<=\?)\s+The special magic [^?]*\Z|\s*Answer:(?:(?!Answer:).)*\Z", re.DOTALL)
"""The answer's beginning at the end of an input: after the last question mark, or from the last "Answer:" on."""


def metric_of(task: str) -> str:
    """RULER's metric for a task."""
    return "string_match_part" if task.startswith("qa") else "string_match_all"


def answer_tokens_of(task: str, where: str) -> int:
    """RULER's number of tokens to generate.

    Raises:
        RequestError: the task is none of RULER's.
    """
    kind = task.partition("_")[0]
    if kind not in ANSWER_TOKENS:
        raise RequestError(f"{where}: {task!r} is no task of RULER's; name the task, such as niah_single_1, vt or qa_1")
    return ANSWER_TOKENS[kind]


def read_ruler(path: str | Path, task: str, *, templated: bool = True) -> Iterator[Sample]:
    """Samples of an official file. The prompt is the row's input and answer prefix, byte for byte.

    Args:
        task: RULER's name of it; the file does not say.
        templated: the inputs hold a model's chat template already, or are meant for a base model. Otherwise the
            model's own template is put around an input, and an answer's beginning that ends the input (older
            files) is taken out and put after the assistant's header.

    Raises:
        RequestError: a row is malformed, or the task unknown.
    """
    limit = answer_tokens_of(task, str(path))
    layout: Layout = "complete" if templated else "chat"
    for place, row in enumerate(read_rows(path)):
        text, prefix = row.filled("input"), row.text("answer_prefix", "")
        if not templated and not prefix and (begun := _ANSWER_BEGINS.search(text)):
            text, prefix = text[: begun.start()], begun[0].strip()
        yield Sample(
            task=f"{task}[{OFFICIAL}]",
            index=place,
            context=text,
            question="",
            answer_prefix=prefix,
            references=row.texts("outputs"),
            max_new_tokens=limit,
            metric=metric_of(task),
            facts={"length": row.integer("length")} if row.has("length") else {},
            layout=layout,
            separator="",
        )


def read_table(path: str | Path, *, metric: str | None = None) -> Iterator[Sample]:
    """Samples of rows with context, question, answer (or answers), answer_prefix, task and max_new_tokens.

    Args:
        metric: instead of RULER's for the row's task.

    Raises:
        RequestError: a row is malformed.
    """
    for place, row in enumerate(read_rows(path)):
        yield _of_table(row, place, metric)


def _of_table(row: Row, place: int, metric: str | None) -> Sample:
    task = row.filled("task")
    limit = row.integer("max_new_tokens") if row.has("max_new_tokens") else answer_tokens_of(task, row.where)
    if limit < 1:
        raise row.wrong("max_new_tokens", "at least 1")
    return Sample(
        task=f"{task}[{OFFICIAL}]",
        index=place,
        context=row.filled("context"),
        question=row.text("question"),
        answer_prefix=row.text("answer_prefix", ""),
        references=row.texts("answers" if row.has("answers") else "answer"),
        max_new_tokens=limit,
        metric=metric or metric_of(task),
        separator="",
    )


def read_key_values(path: str | Path) -> Iterator[Sample]:
    """Samples of rows with ordered_kv_records, key and value ("Lost in the Middle").

    Raises:
        RequestError: a row is malformed.
    """
    for place, row in enumerate(read_rows(path)):
        records = row.fields.get("ordered_kv_records")
        pairs = [tuple(pair) for pair in records if isinstance(pair, list)] if isinstance(records, list) else []
        if not pairs or any(len(pair) != 2 or not all(isinstance(part, str) for part in pair) for pair in pairs):
            raise row.wrong("ordered_kv_records", "a list of pairs of strings")
        wanted = (row.filled("key"), row.filled("value"))
        if wanted not in pairs:
            raise row.wrong("key", "the key of one of the records, with its value")
        yield key_value_sample(f"key_values[{Path(path).stem}]", place, pairs, pairs.index(wanted))
