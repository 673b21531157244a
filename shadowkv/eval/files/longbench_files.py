"""LongBench's files, version 1 in both dialects and version 2.

The instructions here are our own and short. Give the benchmark's own ``dataset2prompt.json`` for its wording;
its placeholders {context} and {input} are filled, and the prompt is cut after the context.

Source: THUDM/LongBench pred.py, eval.py, config/dataset2maxlen.json; the second dialect (context, question,
answer_prefix, answers, task) is that of Xnhyacinth/LongBench.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shadowkv.errors import RequestError
from shadowkv.eval.files.rows import Row, read_rows
from shadowkv.eval.sample import Sample

_QA = "Answer the question from the text above, as briefly as you can, in a few words.\n\nQuestion: {input}\n\nAnswer:"
_QA_ZH = "请根据上文，用尽量简短的话回答问题。\n\n问题：{input}\n\n回答："  # noqa: RUF001
_SUMMARY = "Write a summary of the text above.\n\n{input}\n\nSummary:"
_SUMMARY_ZH = "请总结上文的内容。\n\n{input}\n\n总结："  # noqa: RUF001
_SHOTS = "{input}"
_COUNT = "How many different paragraphs are there above, repeated ones counted once? Answer with the number alone:"
_FIND = "From which paragraph above is this summary? Answer as in 'Paragraph 3'.\n\n{input}\n\nAnswer:"
_FIND_ZH = "下面的摘要出自上文哪个段落？请按“段落3”的格式回答。\n\n{input}\n\n回答："  # noqa: RUF001
_CODE = "{input}Next line of code:\n"


@dataclass(frozen=True)
class _Dataset:
    metric: str
    answer_tokens: int
    instruction: str
    chat: bool = True
    first_line: bool = False


DATASETS = {
    "narrativeqa": _Dataset("longbench_f1", 128, _QA),
    "qasper": _Dataset("longbench_f1", 128, _QA),
    "multifieldqa_en": _Dataset("longbench_f1", 64, _QA),
    "multifieldqa_zh": _Dataset("longbench_f1_zh", 64, _QA_ZH),
    "hotpotqa": _Dataset("longbench_f1", 32, _QA),
    "2wikimqa": _Dataset("longbench_f1", 32, _QA),
    "musique": _Dataset("longbench_f1", 32, _QA),
    "dureader": _Dataset("longbench_rouge_zh", 128, _QA_ZH),
    "gov_report": _Dataset("longbench_rouge", 512, _SUMMARY),
    "qmsum": _Dataset("longbench_rouge", 512, _QA),
    "multi_news": _Dataset("longbench_rouge", 512, _SUMMARY),
    "vcsum": _Dataset("longbench_rouge_zh", 512, _SUMMARY_ZH),
    "trec": _Dataset("longbench_classification", 64, _SHOTS, chat=False, first_line=True),
    "triviaqa": _Dataset("longbench_f1", 32, _SHOTS, chat=False, first_line=True),
    "samsum": _Dataset("longbench_rouge", 128, _SHOTS, chat=False, first_line=True),
    "lsht": _Dataset("longbench_classification", 64, _SHOTS, chat=False, first_line=True),
    "passage_count": _Dataset("longbench_count", 32, _COUNT),
    "passage_retrieval_en": _Dataset("longbench_retrieval", 32, _FIND),
    "passage_retrieval_zh": _Dataset("longbench_retrieval", 32, _FIND_ZH),
    "lcc": _Dataset("longbench_code", 64, _CODE, chat=False),
    "repobench-p": _Dataset("longbench_code", 64, _CODE, chat=False),
}
"""Version 1: the metric, how long an answer may be, and whether the chat template is used."""

CHOICE_TOKENS = 128
_CHOICE = "Which choice is right? Answer as in 'The correct answer is (A)'."


def read_longbench(path: str | Path, *, prompts: str | Path | None = None) -> Iterator[Sample]:
    """Samples of a file of version 1.

    Args:
        prompts: the benchmark's dataset2prompt.json.

    Raises:
        RequestError: a file or a row is malformed.
    """
    given = _prompts(prompts) if prompts is not None else {}
    for place, row in enumerate(read_rows(path)):
        name = row.filled("dataset" if row.has("dataset") else "task").removesuffix("_e")
        if name not in DATASETS:
            raise RequestError(f"{row.where}: {name!r} is no dataset of LongBench's; it has {', '.join(DATASETS)}")
        yield _of_version_1(row, place, name, given.get(name))


def _of_version_1(row: Row, place: int, name: str, prompt: str | None) -> Sample:
    dataset = DATASETS[name]
    context = row.filled("context")
    separator, prefix, source = "\n\n", "", "own words"
    if row.has("question") and not row.has("input"):
        question, prefix, separator = row.text("question"), row.text("answer_prefix", ""), ""
        source = "question as given"
    elif prompt is not None:
        before, _, after = prompt.partition("{context}")
        asked = row.text("input")
        context = before.replace("{input}", asked) + context
        question, separator, source = after.replace("{input}", asked), "", OFFICIAL_PROMPT
    else:
        question = dataset.instruction.replace("{input}", row.text("input")).strip()
    facts: dict[str, str | int | float] = {"prompt": source}
    if dataset.first_line:
        facts["first_line"] = 1
    if row.has("length"):
        facts |= {"length": row.integer("length"), "bucket": _bucket(row.integer("length"))}
    return Sample(
        task=f"longbench_{name}",
        index=place,
        context=context,
        question=question,
        answer_prefix=prefix,
        references=row.texts("answers"),
        max_new_tokens=row.integer("max_new_tokens", dataset.answer_tokens),
        metric=dataset.metric,
        classes=row.texts("all_classes", empty=True),
        facts=facts,
        layout="chat" if dataset.chat else "plain",
        separator=separator,
    )


OFFICIAL_PROMPT = "dataset2prompt.json"


def _bucket(length: int) -> str:
    """LongBench-E's."""
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


def _prompts(path: str | Path) -> Mapping[str, str]:
    try:
        prompts = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(prompts, dict):
        raise RequestError(f"{path} is not an object of prompts by dataset")
    for name, prompt in prompts.items():
        if not isinstance(prompt, str) or prompt.count("{context}") != 1:
            raise RequestError(f"{path}, field {name!r}: a prompt is a string with one {{context}}")
    return prompts


def read_longbench2(path: str | Path, *, compensated: bool = False) -> Iterator[Sample]:
    """Samples of version 2's file, without chain of thought.

    Args:
        compensated: an answer that settles on no letter gets a guess's quarter.

    Raises:
        RequestError: the file or a record is malformed.
    """
    for place, row in enumerate(read_rows(path)):
        answer = row.filled("answer")
        if answer not in ("A", "B", "C", "D"):
            raise row.wrong("answer", "A, B, C or D")
        choices = "\n".join(f"({letter}) {row.text(f'choice_{letter}').strip()}" for letter in "ABCD")
        yield Sample(
            task="longbench2",
            index=place,
            context=row.filled("context").strip(),
            question=f"{row.filled('question').strip()}\n\n{choices}\n\n{_CHOICE}",
            answer_prefix="",
            references=(answer,),
            max_new_tokens=CHOICE_TOKENS,
            metric="longbench2_choice_compensated" if compensated else "longbench2_choice",
            facts={name: row.text(name, "") for name in ("difficulty", "length", "domain", "sub_domain")},
        )
