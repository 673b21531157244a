"""ROUGE-L by the two packages that benchmarks use, which do not agree with each other.

Both look for the longest common subsequence of each reference sentence with each predicted one and take the
union over the latter. Source of the rules: pltrdy/rouge (LongBench) and google-research rouge_score without
stemming (InfiniteBench, SCBench).
"""

import re
from collections import Counter
from collections.abc import Sequence


def rouge_l(prediction: str, reference: str) -> float:
    """F as LongBench computes it: sentences end at full stops, words count once however often they stand.

    A text without any sentence scores 0.
    """
    predicted, expected = _split_at_stops(prediction), _split_at_stops(reference)
    if not predicted or not expected:
        return 0.0
    union: set[str] = set()
    for sentence in expected:
        for other in predicted:
            union |= {sentence[i] for i in _shared(sentence, other, keep_row_on_tie=True)}
    precision = len(union) / len({word for sentence in predicted for word in sentence})
    recall = len(union) / len({word for sentence in expected for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_sum(prediction: str, reference: str) -> float:
    """F as InfiniteBench computes it ("rougeLsum"): sentences end at line breaks, words are lower-case letters
    and digits, and a word counts as often as it stands in both texts."""
    predicted, expected = _split_at_lines(prediction), _split_at_lines(reference)
    left, right = (Counter(word for sentence in text for word in sentence) for text in (predicted, expected))
    total_left, total_right = left.total(), right.total()
    hits = 0
    for sentence in expected:
        union = {i for other in predicted for i in _shared(sentence, other, keep_row_on_tie=False)}
        for i in sorted(union):
            word = sentence[i]
            if left[word] > 0 and right[word] > 0:
                left[word] -= 1
                right[word] -= 1
                hits += 1
    if hits == 0:
        return 0.0
    precision, recall = hits / total_left, hits / total_right
    return 2 * precision * recall / (precision + recall)


def _split_at_stops(text: str) -> list[list[str]]:
    # A sentence of white space alone is one empty word there, and so it is here.
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _split_at_lines(text: str) -> list[list[str]]:
    lines = (re.sub("[^a-z0-9]+", " ", line.lower()).split() for line in text.split("\n"))
    return [line for line in lines if line]


def _shared(rows: Sequence[str], columns: Sequence[str], *, keep_row_on_tie: bool) -> list[int]:
    """Places in ``rows`` of one longest common subsequence; which one of several decides the walk back."""
    table = [[0] * (len(columns) + 1)]
    for row in rows:
        above = table[-1]
        line = [0]
        for j, column in enumerate(columns):
            line.append(above[j] + 1 if row == column else max(above[j + 1], line[j]))
        table.append(line)
    places: list[int] = []
    i, j = len(rows), len(columns)
    while i and j:
        if rows[i - 1] == columns[j - 1]:
            places.append(i - 1)
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1] or (table[i - 1][j] == table[i][j - 1] and not keep_row_on_tie):
            i -= 1
        else:
            j -= 1
    return places
