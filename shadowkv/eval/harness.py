"""Runs samples under methods: every method the same samples, a context of several questions computed once.

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
    from shadowkv.engine.request import Completion, RequestOutput
    from shadowkv.llm import LLM

Report = Callable[[str, int, int], None]
Row = dict[str, Any]
"""One answer: see :meth:`Harness.row`."""


@dataclass(frozen=True)
class Method:
    """A cache method with its settings, under the name that tables give it."""

    label: str
    config: CacheConfig

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
    """One model, and what stands in every row of it.

    Args:
        about: provenance and settings that every row carries, the model's name among them.
        reference_rules: score RULER's tasks as the ShadowKV reference code does.
    """

    def __init__(self, llm: "LLM", answers: Answers, about: Row, *, reference_rules: bool = False) -> None:
        self.llm = llm
        self.answers = answers
        self.about = about
        self.reference_rules = reference_rules

    def run(
        self, samples: Sequence[Sample], frames: Callable[[Sample], Frame], length: int, method: Method, report: Report
    ) -> None:
        """Answer what has no answer yet, greedily.

        Args:
            frames: what stands around a sample's text.
        """
        pending = [group for group in by_context(samples) if not all(self._has(s, length, method) for s in group)]
        if not pending:
            return
        llm = self.llm if method.config == self.llm.config else self.llm.with_cache(method.config)
        for done, group in enumerate(pending):
            report(f"{method.label}, {length}: {group[0].task}", done, len(pending))
            for sample, completion in self._answer(llm, group, frames(group[0])):
                if not self._has(sample, length, method):
                    self.answers.add(self.row(sample, length, method, completion))
        report(f"{method.label}, {length}: {pending[-1][0].task}", len(pending), len(pending))

    def _answer(self, llm: "LLM", group: tuple[Sample, ...], frame: Frame) -> Iterator[tuple[Sample, "Completion"]]:
        head, rest = frame.parts(group[0])
        ids = llm.tokenizer.encode(head, special=frame.head_tokens > 0)
        if len(group) == 1:  # one prompt, as the benchmarks have it: exact attention sees context and question
            ids += llm.tokenizer.encode(rest, special=False)
            (output,) = llm.generate([ids], _params(group[0]), progress=_unseen)
            yield group[0], _sole(group[0], output)
            return
        dialogue = group[0].turn is not None
        with llm.context(ids, progress=_unseen) as context:
            for place, sample in enumerate(group):
                text = frame.next_turn(sample) if dialogue and place else frame.parts(sample)[1]
                ids = llm.tokenizer.encode(text, special=False)
                if ids[0] == context.token_ids[-1] and ids[0] in llm.tokenizer.end_token_ids:
                    ids = ids[1:]  # the answer before ended with it, and the template's text begins with it
                # In a dialogue the model's own answers are kept.
                (output,) = context.generate([ids], _params(sample), keep=dialogue, progress=_unseen)
                yield sample, _sole(sample, output)

    def row(self, sample: Sample, length: int, method: Method, completion: "Completion | None") -> Row:
        """An answer with its score; without a completion, what it will be known by."""
        row: Row = {
            **self.about,
            "task": sample.task,
            "length": length,
            "index": sample.index,
            "turn": sample.turn,
            "method": method.label,
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

    def _has(self, sample: Sample, length: int, method: Method) -> bool:
        return self.answers.has(self.row(sample, length, method, None))


def _params(sample: Sample) -> SamplingParams:
    return SamplingParams(max_tokens=sample.max_new_tokens)


def _sole(sample: Sample, output: "RequestOutput") -> "Completion":
    (completion,) = output.completions
    if completion.error is not None:
        raise RequestError(f"{sample.task}, sample {sample.index}: {completion.error}")
    return completion


def _unseen(stage: str, done: int, total: int) -> None:
    """A prefill's own progress: the samples are what is counted here."""


def with_budget(name: str, config: CacheConfig, share: float, length: int) -> Method:
    """A method with a budget that is a share of the length; full attention has none."""
    if isinstance(config, FullConfig):
        return Method(name, config)
    return Method(f"{name} {share:.2%}", replace(config, budget_tokens=max(round(share * length), 1)))
