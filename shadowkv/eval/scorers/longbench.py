"""The metrics of LongBench, version 1 and 2, for one reference each.

Source: THUDM/LongBench metrics.py, eval.py (version 1), pred.py and result.py (version 2).
"""

import difflib
import re
from collections.abc import Sequence

from shadowkv.eval.scorers.rouge import rouge_l
from shadowkv.eval.scorers.wording import chinese, chinese_words, english, overlap_f1

_CHOICE = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


def f1(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """F1 of words."""
    return overlap_f1(english(prediction).split(), english(reference).split())


def f1_chinese(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """F1 of words as jieba cuts them.

    Raises:
        ConfigError: the package jieba is not installed.
    """
    left, right = ([chinese(word) for word in chinese_words(text)] for text in (prediction, reference))
    return overlap_f1([word for word in left if word], [word for word in right if word])


def rouge(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """ROUGE-L."""
    return rouge_l(prediction, reference)


def rouge_chinese(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """ROUGE-L of words as jieba cuts them.

    Raises:
        ConfigError: the package jieba is not installed.
    """
    return rouge_l(" ".join(chinese_words(prediction)), " ".join(chinese_words(reference)))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that are named, if the right one is among them."""
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            # The list closes up and the next name is passed over: so it is upstream.
            del named[place]
        place += 1
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Share of the predicted numbers that are the reference's number ("Paragraph 12", "段落27")."""
    wanted = re.search(r"\d+", reference)
    return count(prediction, wanted[0], classes) if wanted else 0.0


def count(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Share of the predicted numbers that are the reference."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """How like the reference the first line is that is neither comment nor fence, in whole percent.

    As fuzzywuzzy's ratio without its C extension, which is difflib's.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def choice_of(prediction: str) -> str | None:
    """The letter that a version 2 answer settles on."""
    text = prediction.replace("*", "")
    for pattern in _CHOICE:
        if found := pattern.search(text):
            return found[1]
    return None


def choice(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 if the answer settles on the reference's letter (version 2)."""
    return float(choice_of(prediction) == reference)


def choice_compensated(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """As :func:`choice`, with a guess's quarter for an answer that settles on nothing; none for an empty one."""
    return 0.25 if choice_of(prediction) is None else choice(prediction, reference, classes)
