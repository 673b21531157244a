"""Runs samples under methods: every method the same samples, every prompt computed once for all of them.

Each answer is one line of JSON with all that is needed to know where it came from, written as soon as it is
there, so a run that was broken off goes on where it was.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowkv.config import CacheConfig, FullConfig, SamplingParams
from shadowkv.errors import CheckpointError, RequestError
from shadowkv.eval.sample import Frame, Sample, by_context
from shadowkv.eval.scorers import score

if TYPE_CHECKING:
    from shadowkv.context import Context
    from shadowkv.engine.request import Completion, RequestOutput
    from shadowkv.engine.tokenizer import Tokenizer
    from shadowkv.lineup import Lineup
    from shadowkv.llm import LLM

Report = Callable[[str, int, int], None]
Row = dict[str, Any]
"""One answer: see :meth:`Harness.row`."""


@dataclass(frozen=True)
class Method:
    """A cache method with its settings.

    Args:
        name: what tables call it.
        budget: the share of the length that its budget is, where it was given as one.
    """

    name: str
    config: CacheConfig
    budget: float | None = None

    @property
    def label(self) -> str:
        """The name with the budget."""
        return self.name if self.budget is None else f"{self.name} {self.budget:.2%}"

    @property
    def settings(self) -> dict[str, object]:
        """Everything that the method was told."""
        assert is_dataclass(self.config)
        return asdict(self.config)

    @property
    def key(self) -> str:
        """The same for the same method and settings, in every run."""
        text = json.dumps([type(self.config).__name__, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class Answers:
    """The lines of a run, in a file.

    Raises:
        CheckpointError: a line before the last is no row of a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        whole = 0
        if path.exists():
            raw = path.read_bytes()
            for number, line in enumerate(raw.splitlines(keepends=True), start=1):
                if not line.endswith(b"\n"):
                    break  # the run was broken off while it wrote this one
                try:
                    self.rows.append(json.loads(line))
                    whole += len(line)
                except ValueError as error:
                    raise CheckpointError(f"{path}, line {number} is not JSON; give another --output") from error
            with path.open("r+b") as file:
                file.truncate(whole)
        self._done = {self.key(row) for row in self.rows}

    @staticmethod
    def key(row: Row) -> tuple[object, ...]:
        """What makes an answer the same one in a later run."""
        return tuple(row[name] for name in ("model", "method_key", "task", "length", "index", "turn", "seed"))

    def has(self, row: Row) -> bool:
        """Whether the answer that this row would be is there."""
        return self.key(row) in self._done

    def add(self, row: Row) -> None:
        """Write one answer down."""
        self._done.add(self.key(row))
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


class Harness:
    """Methods on the same samples, and what stands in every row of them.

    Args:
        about: provenance and settings that every row carries, the model's name among them.
        reference_rules: score RULER's tasks as the ShadowKV reference code does.
    """

    def __init__(self, lineup: "Lineup", answers: Answers, about: Row, *, reference_rules: bool = False) -> None:
        self.lineup = lineup
        self.answers = answers
        self.about = about
        self.reference_rules = reference_rules

    def run(
        self,
        samples: Sequence[Sample],
        frames: Callable[[Sample], Frame],
        length: int,
        methods: Sequence[Method],
        report: Report,
    ) -> None:
        """Answer what has no answer yet, greedily, as many contexts at a time as there is memory for.

        Args:
            frames: what stands around a sample's text.

        Raises:
            RequestError: a request failed; all answers before it are written down.
        """
        pending = [g for g in by_context(samples) if any(self._open(g, length, method) for method in methods)]
        for done, chunk in _chunks(pending, self.lineup.rows):
            asked = [Asked(self.lineup.llm.tokenizer, group, frames(group[0])) for group in chunk]
            with self.lineup.prompts([one.prompt_ids for one in asked]):
                for place, method in enumerate(methods):
                    stage = f"{chunk[0][0].task} at {length}: {method.label}"
                    report(stage, done * len(methods) + place * len(chunk), len(pending) * len(methods))
                    todo = [one for one in asked if self._open(one.group, length, method)]
                    answer = _questions if len(chunk[0]) == 1 else _dialogues
                    for sample, completion in answer(self.lineup.member(method.config), todo) if todo else ():
                        if self._open((sample,), length, method):
                            self.answers.add(self.row(sample, length, method, completion))
        if pending:
            report(f"{pending[-1][0].task} at {length}", len(pending) * len(methods), len(pending) * len(methods))

    def row(self, sample: Sample, length: int, method: Method, completion: "Completion | None") -> Row:
        """An answer with its score; without a completion, what it will be known by."""
        row: Row = {
            **self.about,
            "task": sample.task,
            "length": length,
            "index": sample.index,
            "turn": sample.turn,
            "method": method.label,
            "method_name": method.name,
            "budget": method.budget,
            "method_key": method.key,
        }
        if completion is None:
            return row
        stats = completion.stats
        assert stats is not None
        return {
            **row,
            "settings": method.settings,
            "metric": sample.metric,
            "score": score(sample, completion.text, reference_rules=self.reference_rules),
            "prediction": completion.text,
            "references": list(sample.references),
            "depths": list(sample.depths),
            "facts": dict(sample.facts),
            "finish_reason": completion.finish_reason.value,
            "tokens": stats.tokens,
            "attention": stats.attention,
            "hit_rate": stats.hit_rate,
            "fetched_bytes": stats.fetched_bytes,
            "device_bytes": stats.device_bytes,
            "host_bytes": stats.host_bytes,
        }

    def _open(self, samples: Sequence[Sample], length: int, method: Method) -> bool:
        """Whether one of them has no answer yet."""
        return not all(self.answers.has(self.row(sample, length, method, None)) for sample in samples)


class Asked:
    """The questions on one context, in tokens.

    ``prompt_ids`` are computed once: a whole prompt where there is one question, exactly as the benchmarks have it;
    else the context, on which every question is asked.
    """

    def __init__(self, tokenizer: "Tokenizer", group: tuple[Sample, ...], frame: Frame) -> None:
        self.tokenizer = tokenizer
        self.group = group
        self.frame = frame
        head, rest = frame.parts(group[0])
        self.prompt_ids = tokenizer.encode(head, special=frame.head_tokens > 0)
        if len(group) == 1:
            self.prompt_ids += tokenizer.encode(rest, special=False)

    def question_ids(self, place: int, before: Sequence[int]) -> list[int]:
        """What is asked at this place, after these tokens: in a dialogue, from the end of the answer before it on."""
        sample = self.group[place]
        answered = sample.turn is not None and place > 0
        text = self.frame.next_turn(sample) if answered else self.frame.parts(sample)[1]
        ids = self.tokenizer.encode(text, special=False)
        if ids[0] == before[-1] and ids[0] in self.tokenizer.end_token_ids:
            return ids[1:]  # the answer before ended with it, and the template's text begins with it
        return ids


def _chunks(groups: Sequence[tuple[Sample, ...]], rows: int) -> Iterator[tuple[int, Sequence[tuple[Sample, ...]]]]:
    """Groups that are answered together, and how many come before them. Where a context has several questions it
    stays beside the copies that answers are made on, so half as many fit."""
    start = 0
    while start < len(groups):
        several = len(groups[start]) > 1
        stop = start + 1
        most = max(rows // 2, 1) if several else rows
        while stop < min(len(groups), start + most) and (len(groups[stop]) > 1) == several:
            stop += 1
        yield start, groups[start:stop]
        start = stop


def _questions(llm: "LLM", asked: Sequence[Asked]) -> Iterator[tuple[Sample, "Completion"]]:
    """One question on each context."""
    samples = [one.group[0] for one in asked]
    outputs = llm.generate([one.prompt_ids for one in asked], [_params(sample) for sample in samples], progress=_unseen)
    for sample, output in zip(samples, outputs, strict=True):
        yield sample, _sole(sample, output)


def _dialogues(llm: "LLM", asked: Sequence[Asked]) -> Iterator[tuple[Sample, "Completion"]]:
    """Several questions on each context: turn by turn where they are a dialogue, in which the model's own answers are
    kept, else all of them on copies of the context."""
    contexts: list[Context] = []
    try:
        for one in asked:
            contexts.append(llm.context(one.prompt_ids, progress=_unseen))
        most = max(len(one.group) for one in asked)
        turns = asked[0].group[0].turn is not None
        for places in ([place] for place in range(most)) if turns else [range(most)]:
            samples, ids = list[Sample](), list[str]()
            for place in places:
                for one, context in zip(asked, contexts, strict=True):
                    if place < len(one.group):
                        samples.append(one.group[place])
                        question = one.question_ids(place, context.token_ids)
                        ids.append(context.submit(question, _params(samples[-1]), keep=turns))
            for sample, output in zip(samples, llm.wait(ids), strict=True):
                yield sample, _sole(sample, output)
    finally:
        for context in contexts:
            context.release()


def _params(sample: Sample) -> SamplingParams:
    return SamplingParams(max_tokens=sample.max_new_tokens)


def _sole(sample: Sample, output: "RequestOutput") -> "Completion":
    (completion,) = output.completions
    if completion.error is not None:
        raise RequestError(f"{sample.task}, sample {sample.index}: {completion.error}")
    return completion


def _unseen(stage: str, done: int, total: int) -> None:
    """A request's own progress: the samples are what is counted here."""


def with_budget(method: Method, share: float, length: int) -> Method:
    """The method with a budget that is a share of the length; full attention has none."""
    if isinstance(method.config, FullConfig):
        return method
    config = replace(method.config, budget_tokens=max(round(share * length), 1))
    return Method(method.name, config, share)


def budgeted(methods: Sequence[Method], shares: Sequence[float] | None, length: int) -> list[Method]:
    """Every method with every budget; as they are where no budgets are given."""
    if shares is None:
        return list(methods)
    made = [with_budget(method, share, length) for method in methods for share in shares]
    return list({(method.label, method.key): method for method in made}.values())
