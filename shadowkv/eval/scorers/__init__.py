"""What an answer is worth: one number from 0 to 1, by the rule of the benchmark that asked.

One rule stands above all of them: an answer of nothing but white space scores 0.
"""

from collections.abc import Callable, Sequence

from shadowkv.errors import ConfigError
from shadowkv.eval.sample import Sample
from shadowkv.eval.scorers import facts, infinitebench, longbench, strings

Metric = Callable[[str, Sequence[str], Sequence[str]], float]
"""From a prediction, the references and the possible classes."""

_Single = Callable[[str, str, Sequence[str]], float]


def _best(single: _Single) -> Metric:
    """A metric of one reference, over all of them."""

    def best(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
        return max(single(prediction, one, classes) for one in references)

    return best


METRICS: dict[str, Metric] = {
    "string_match_all": strings.match_all,
    "string_match_part": strings.match_part,
    "reference_needle": strings.reference_needle,
    "reference_numbers": strings.reference_numbers,
    "reference_words": strings.reference_words,
    "reference_part": strings.reference_part,
    "longbench_f1": _best(longbench.f1),
    "longbench_f1_zh": _best(longbench.f1_chinese),
    "longbench_rouge": _best(longbench.rouge),
    "longbench_rouge_zh": _best(longbench.rouge_chinese),
    "longbench_classification": _best(longbench.classification),
    "longbench_retrieval": _best(longbench.retrieval),
    "longbench_count": _best(longbench.count),
    "longbench_code": _best(longbench.code_similarity),
    "longbench2_choice": _best(longbench.choice),
    "longbench2_choice_compensated": _best(longbench.choice_compensated),
    "infinitebench_first_integer": infinitebench.first_integer,
    "infinitebench_word": infinitebench.word,
    "infinitebench_word_upper": infinitebench.word_upper,
    "infinitebench_f1": infinitebench.f1,
    "infinitebench_f1_zh": infinitebench.f1_characters,
    "infinitebench_summary": infinitebench.summary,
    "infinitebench_choice": infinitebench.choice,
    "infinitebench_code_debug": infinitebench.code_debug,
    "infinitebench_last_integer": infinitebench.last_integer,
    "infinitebench_first_number": infinitebench.first_number,
    "infinitebench_leading_numbers": infinitebench.leading_numbers,
    "scbench_contained": infinitebench.contained,
    "scbench_any_contained": infinitebench.any_contained_upper,
    "scbench_choice": infinitebench.choice_stripped,
    "exact_number": facts.exact_number,
    "first_class": facts.first_class,
    "json_facts": facts.json_facts,
}
"""Every metric by its name."""

REFERENCE = {"vt": "reference_words", "cwe": "reference_words", "fwe": "reference_words"} | {
    "niah_multiquery": "reference_numbers",
    "niah_multivalue": "reference_numbers",
    "qa_1": "reference_part",
    "qa_2": "reference_part",
}
"""The ShadowKV reference code's metric for RULER tasks; the other needle tasks have ``reference_needle``."""


def score_text(metric: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """What a prediction is worth by a metric, from 0 to 1.

    Raises:
        ConfigError: there is no such metric, there are no references, or a package that it needs is missing.
    """
    rule = METRICS.get(metric)
    if rule is None:
        raise ConfigError(f"there is no metric {metric!r}; there are {', '.join(METRICS)}")
    wanted = [reference for reference in references if reference]
    if not wanted:
        raise ConfigError(f"the metric {metric} has no reference to compare with")
    return rule(prediction, wanted, classes) if prediction.strip() else 0.0


def score(sample: Sample, prediction: str, *, reference_rules: bool = False) -> float:
    """What an answer to a sample is worth, from 0 to 1.

    Args:
        reference_rules: score RULER's tasks as the ShadowKV reference code does.

    Raises:
        ConfigError: a package that the metric needs is missing.
    """
    metric = reference_metric(sample) if reference_rules else sample.metric
    return score_text(metric, sample.answered_by(prediction), sample.references, sample.classes)


def reference_metric(sample: Sample) -> str:
    """The ShadowKV reference code's metric for a sample; other benchmarks keep their own."""
    task = sample.task.partition("[")[0]
    if task.startswith("niah_"):
        return REFERENCE.get(task, "reference_needle")
    return REFERENCE.get(task, sample.metric)
