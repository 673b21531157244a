"""InfiniteBench's files, and SCBench's, whose records hold several turns over one context.

The instructions are our own. Source of layouts, answer lengths and scoring: OpenBMB/InfiniteBench src and
microsoft/MInference scbench.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shadowkv.errors import RequestError
from shadowkv.eval.files.rows import Row, read_rows
from shadowkv.eval.sample import Sample

_BRIEF = "Answer from the text above, as briefly as you can.\n\n{input}"
_BRIEF_ZH = "请根据上文，用尽量简短的话回答。\n\n{input}"  # noqa: RUF001
_CHOOSE = "Answer from the text above with the letter of the right option alone.\n\n{input}\n\n{options}"
_NUMBER = "{input}\n\nAnswer with the number alone."
_PLAIN = "{input}"


@dataclass(frozen=True)
class _Kind:
    metric: str
    answer_tokens: int
    instruction: str
    answer_prefix: str = ""


TASKS = {
    "passkey": _Kind("infinitebench_first_integer", 6, _PLAIN, "The pass key is"),
    "number_string": _Kind("infinitebench_first_integer", 12, _PLAIN, "The sequence of digits is"),
    "kv_retrieval": _Kind("infinitebench_word", 50, _PLAIN),
    "longbook_sum_eng": _Kind("infinitebench_summary", 1200, "Write a summary of the book above.\n\n{input}"),
    "longbook_choice_eng": _Kind("infinitebench_choice", 40, _CHOOSE),
    "longbook_qa_eng": _Kind("infinitebench_f1", 40, _BRIEF),
    "longbook_qa_chn": _Kind("infinitebench_f1_zh", 40, _BRIEF_ZH),
    "longdialogue_qa_eng": _Kind(
        "infinitebench_word_upper", 40, "{input}\n\nWhose name does the mark $$MASK$$ stand for? Answer with the name."
    ),
    "math_find": _Kind("infinitebench_first_number", 3, _NUMBER),
    "math_calc": _Kind("infinitebench_leading_numbers", 30000, _PLAIN),
    "code_run": _Kind("infinitebench_last_integer", 5, _NUMBER),
    "code_debug": _Kind("infinitebench_code_debug", 5, _CHOOSE),
}
"""InfiniteBench's twelve."""

TURN_TASKS = {
    "scbench_kv": _Kind("scbench_contained", 150, _PLAIN),
    "scbench_prefix_suffix": _Kind("scbench_contained", 150, _PLAIN),
    "scbench_vt": _Kind("string_match_all", 30, _PLAIN),
    "scbench_qa_eng": _Kind("scbench_any_contained", 40, _BRIEF),
    "scbench_qa_chn": _Kind("infinitebench_f1_zh", 40, _BRIEF_ZH),
    "scbench_choice_eng": _Kind("scbench_choice", 40, _CHOOSE),
    "scbench_many_shot": _Kind("scbench_any_contained", 10, _PLAIN),
    "scbench_mf": _Kind("infinitebench_first_number", 5, _NUMBER),
    "scbench_summary": _Kind("infinitebench_summary", 200, _PLAIN),
    "scbench_passkey": _Kind("infinitebench_first_integer", 15, _PLAIN),
}
"""SCBench's, and the parts of its mixed ones. Its repository questions are not here: they are scored by
parsing the answer's code."""

MIXED = {
    "scbench_summary_with_needles": {"scbench_summary": 800, "scbench_passkey": 15},
    "scbench_repoqa_and_kv": {"scbench_kv": 80},
}
"""Tasks whose turns name their own part, with that part's answer length."""

MAX_TURNS = 5


def read_infinitebench(path: str | Path, task: str | None = None) -> Iterator[Sample]:
    """Samples of a file.

    Args:
        task: its name; by default the file's.

    Raises:
        RequestError: a row is malformed, or there is no such task.
    """
    name = task or Path(path).stem
    if name not in TASKS:
        raise RequestError(f"{path}: {name!r} is no task of InfiniteBench's; it has {', '.join(TASKS)}")
    for place, row in enumerate(read_rows(path)):
        yield _sample(f"infinitebench_{name}", place, row.filled("context"), row, TASKS[name], row.text("input", ""))


def read_scbench(path: str | Path, task: str | None = None, *, dialogue: bool = True) -> Iterator[Sample]:
    """Samples of a file; the turns of one record follow each other and share its context.

    Of the mixed task with repository questions only the other turns are given, and the task's name says so.

    Args:
        task: its name; by default the file's.
        dialogue: turns of one conversation; otherwise independent questions on one context.

    Raises:
        RequestError: a row is malformed, the task unknown or scored by parsing code.
    """
    name = task or Path(path).stem
    name = name if name.startswith("scbench_") else f"scbench_{name}"
    if name not in TURN_TASKS and name not in MIXED:
        known = ", ".join([*TURN_TASKS, *MIXED])
        raise RequestError(f"{path}: {name!r} is no task of SCBench's that can be scored here; there are {known}")
    for place, row in enumerate(read_rows(path)):
        context = row.filled("context" if row.has("context") else "input")
        for number, turn in enumerate(row.rows("multi_turns")[:MAX_TURNS]):
            part = turn.filled("task") if name in MIXED else name
            limit = MIXED[name].get(part) if name in MIXED else TURN_TASKS[name].answer_tokens
            if limit is None or part not in TURN_TASKS:
                continue  # a repository question between others
            yield _sample(
                part if part == name else f"{name}/{part.removeprefix('scbench_')}",
                place,
                context,
                turn,
                TURN_TASKS[part],
                turn.filled("input"),
                turn=number if dialogue else None,
                answer_tokens=limit,
            )


def _sample(
    task: str,
    place: int,
    context: str,
    row: Row,
    kind: _Kind,
    asked: str,
    *,
    turn: int | None = None,
    answer_tokens: int | None = None,
) -> Sample:
    options = row.texts("options", empty=True)
    references = row.texts("answer")
    if "choice" in kind.metric or "debug" in kind.metric:
        references = _choice(row, references, options)
    lettered = "\n".join(f"{chr(ord('A') + i)}. {option}" for i, option in enumerate(options))
    return Sample(
        task=task,
        index=place,
        context=context,
        question=kind.instruction.replace("{options}", lettered).replace("{input}", asked).strip(),
        answer_prefix=kind.answer_prefix,
        references=references,
        max_new_tokens=answer_tokens or kind.answer_tokens,
        metric=kind.metric,
        turn=turn,
    )


def _choice(row: Row, answer: tuple[str, ...], options: tuple[str, ...]) -> tuple[str, ...]:
    """The right option's text and its letter."""
    if len(answer) == 2 and answer[1] in ("A", "B", "C", "D"):
        return answer
    if len(answer) == 1 and answer[0] in options:
        return answer[0], chr(ord("A") + options.index(answer[0]))
    if len(answer) == 1 and answer[0] in "ABCD" and ord(answer[0]) - ord("A") < len(options):
        return options[ord(answer[0]) - ord("A")], answer[0]
    raise row.wrong("answer", "one of the options, or its letter")
