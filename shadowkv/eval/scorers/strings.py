"""RULER's two metrics, and those that the ShadowKV reference code puts in their place.

Source: NVIDIA/RULER scripts/eval/synthetic/constants.py and scripts/eval/evaluate.py; bytedance/ShadowKV
data/metrics.py. There an empty prediction counts as right for a question; here it never scores.
"""

import re
from collections.abc import Sequence

from shadowkv.eval.scorers.wording import english

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """A prediction as RULER's evaluation reads it: control characters become line breaks, ends are stripped."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def match_all(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """Share of references that the prediction contains, in any case of letters."""
    text = clean(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def match_part(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the prediction contains any reference."""
    text = clean(prediction).lower()
    return float(any(reference.lower() in text for reference in references))


def reference_needle(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the prediction begins with a reference or has it as a word, without punctuation and articles."""
    text = english(prediction)
    words = text.split()
    return float(any(text.startswith(wanted) or wanted in words for wanted in map(english, references)))


def reference_numbers(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """Share of references among the numbers of the prediction."""
    found = set(re.findall(r"\d+", prediction))
    return sum(reference in found for reference in references) / len(references)


def reference_words(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """Share of references among the whole words of the prediction."""
    found = set(re.findall(r"\b\w+\b", prediction.lower()))
    return sum(reference.lower() in found for reference in references) / len(references)


def reference_part(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the prediction contains a reference or a reference contains the prediction."""
    text = clean(prediction).lower()
    return float(any(one.lower() in text or text in one.lower() for one in references))
