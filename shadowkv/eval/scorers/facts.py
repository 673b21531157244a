"""The metrics of our own tasks: numbers counted, one class chosen, facts in JSON."""

import json
import re
from collections.abc import Iterator, Sequence


def exact_number(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if the first number, thousands commas left out, is the reference."""
    found = re.search(r"\d+", re.sub(r"(?<=\d),(?=\d{3})", "", prediction))
    return float(found is not None and int(found[0]) == int(references[0]))


def first_class(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 if of all classes the first one named is the reference."""
    text = prediction.lower()
    places = {name: text.find(name.lower()) for name in classes}
    named = [name for name in classes if places[name] >= 0]
    return float(bool(named) and min(named, key=lambda name: places[name]) == references[0])


def json_facts(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """F1 of facts. A reference is one record as a JSON object; ``classes`` holds the name of its key field.

    A fact is a key, a field and a value. Objects are found wherever they stand, so that a list which the
    answer's length cut off still counts for the records that it holds. A record given twice counts once.
    """
    key = classes[0]
    expected = {fact for reference in references for fact in _facts(json.loads(reference), key)}
    found = {fact for record in _objects(prediction) for fact in _facts(record, key)}
    same = len(expected & found)
    if same == 0:
        return 0.0
    precision, recall = same / len(found), same / len(expected)
    return 2 * precision * recall / (precision + recall)


def _facts(record: object, key: str) -> Iterator[tuple[str, str, str]]:
    if not isinstance(record, dict) or key not in record:
        return
    name = _plain(record[key])
    for field, value in record.items():
        if field != key:
            yield name, field.strip().lower(), _plain(value)


def _plain(value: object) -> str:
    return " ".join(str(value).lower().split())


def _objects(text: str) -> Iterator[object]:
    """JSON objects of a text, the innermost of those that hold others left to :func:`_facts`."""
    decoder = json.JSONDecoder()
    place = text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            yield found
        place = text.find("{", end)
