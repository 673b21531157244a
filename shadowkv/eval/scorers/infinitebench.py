"""The metrics of InfiniteBench, and of SCBench where it changes them.

Source: OpenBMB/InfiniteBench src/compute_scores.py and microsoft/MInference scbench/compute_scores.py. A label
that is a number there is its decimal text here.
"""

import re
from collections.abc import Sequence

from shadowkv.eval.scorers.rouge import rouge_l_sum
from shadowkv.eval.scorers.wording import chinese, english, overlap_f1, spaced

_MARKS = ("\n", ":", '"', "'", ".", ",", "?", "!", "{", "}")
_CHOICE_LEADS = ("answer is:", "answer:", "answer is", "option is")
_DEBUG_LEADS = ("answer is:", "is:", "answer:")


def first_integer(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the first run of digits is the reference (passkey, number string)."""
    found = re.search("[0-9]+", prediction)
    return float(found is not None and found[0] == references[0])


def word(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the reference is one of the words (key-value retrieval)."""
    return float(references[0] in spaced(prediction, _MARKS).split())


def word_upper(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the first reference is one of the words in capitals (dialogue)."""
    return float(references[0] in spaced(prediction, _MARKS).upper().split())


def contained(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the first reference is in the text, its letters' case kept (SCBench key-value)."""
    return float(references[0] in prediction)


def any_contained_upper(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if any reference is in the text, in any case of letters (SCBench dialogue, English questions)."""
    text = prediction.strip().upper()
    return float(any(one.upper() in text for one in references))


def f1(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """F1 of words (English questions)."""
    return max(overlap_f1(english(prediction).split(), english(one).split()) for one in references)


def f1_characters(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """F1 of characters (Chinese questions)."""
    return max(overlap_f1(chinese(prediction), chinese(one)) for one in references)


def summary(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """ROUGE-L over lines (summaries)."""
    return max(rouge_l_sum(prediction, one) for one in references)


def choice(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the answer is the reference's letter or text, by the first letter, a lead such as "answer is", or
    the first word that is a letter."""
    if prediction[0] in "ABCD":
        return float(prediction[0] in references)
    text = _single_spaced(spaced(prediction, (mark for mark in _MARKS if mark != ":")))
    led = _after_lead(text, _CHOICE_LEADS)
    if led is not None:
        return float(any(led.startswith(one) for one in references))
    letter = next((one for one in text.split() if one in "ABCD"), None)
    return float(letter in references)


def choice_stripped(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """As :func:`choice` after stripping, and 1 for an answer that is the reference's whole text (SCBench)."""
    text = prediction.strip()
    return 1.0 if text[0] not in "ABCD" and text in references else choice(text, references, classes)


def code_debug(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the answer is the letter or the name of the function (name, letter), at its start or after a lead."""
    name, letter = references[0], references[1]
    if prediction[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = spaced(prediction.strip(), ("\n", "`", "'", '"', "-", "*", "Option", "option"))
    led = _after_lead(_single_spaced(text), _DEBUG_LEADS)
    return float(led is not None and led.startswith((letter, name)))


def last_integer(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the last word is the reference's number (code run)."""
    words = spaced(prediction.strip(), ("\n", ".", "`", "'", '"', ":")).split()
    try:
        return float(int(words[-1]) == int(references[0]))
    except (ValueError, IndexError):
        return 0.0


def first_number(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the first number is the reference's; of a whole reference, if its whole part is (math find)."""
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if found is None:
        return 0.0
    if "." in references[0]:
        return float(float(found[0]) == float(references[0]))
    return float(int(float(found[0])) == int(references[0]))


def leading_numbers(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """Share of the references that the predicted numbers match before the first wrong one (math calc)."""
    right = 0
    for number, wanted in zip(re.findall("[0-9]+", prediction), references, strict=False):
        if int(number) != int(wanted):
            break
        right += 1
    return right / len(references)


def _single_spaced(text: str) -> str:
    return re.sub(" {2,}", " ", text)


def _after_lead(text: str, leads: Sequence[str]) -> str | None:
    """What follows the first of the leads that is there, one character skipped."""
    for lead in leads:
        place = text.find(lead)
        if place >= 0:
            return text[place + len(lead) + 1 :]
    return None
