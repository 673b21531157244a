"""Structured extraction: facts of many records, told in sentences all over a text, to be given as JSON.

Every sentence of the records and of the prompt is our own.
"""

import json
import random
from collections.abc import Iterator

from shadowkv.errors import ConfigError
from shadowkv.eval.fitting import fill
from shadowkv.eval.haystack import Haystack, depths_of, plant
from shadowkv.eval.ruler.words import ADJECTIVES, NOUNS, distinct
from shadowkv.eval.sample import Length, Sample

TASK = "extraction"
KEY = "parcel"
FIELDS = ("sender", "city", "weight_kg", "contents")
STEP_WORDS = 25
MOST_RECORDS = 1000
MARGIN_TOKENS = 32

_SENDERS = ("Abbott", "Barlow", "Castell", "Dunmore", "Ellery", "Farrow", "Gosling", "Hartnell", "Imrie", "Jessop")
_CITIES = ("Bremen", "Cork", "Dijon", "Evora", "Fano", "Ghent", "Haarlem", "Izmir", "Jena", "Kaunas", "Lecce", "Malmo")

INTRODUCTION = "Reports about parcels are scattered over the following text. The task after it is about these reports."


def extraction(
    length: Length, haystack: Haystack, records: int, *, asked: int | None = None, samples: int = 1, seed: int = 42
) -> Iterator[Sample]:
    """Samples with this many records, evenly spread.

    Args:
        asked: how many of them, chosen at random, the answer has to give; all by default.

    Raises:
        ConfigError: the numbers are not allowed.
        RequestError: the records with the question and the answer do not fit into the length.
    """
    wanted = records if asked is None else asked
    if not 1 <= wanted <= records <= MOST_RECORDS:
        raise ConfigError(
            f"{wanted} of {records} records were asked for; there are 1 to {MOST_RECORDS}, and not more are asked for"
        )

    def build(size: int, index: int) -> Sample:
        rng = random.Random(f"{seed}/{TASK}/{records}/{index}")
        made = [_record(rng, name) for name in distinct(_name, rng, records)]
        told = [_told(record) for record in made]
        parts = haystack.sentences(size)
        text = " ".join(plant(parts, told, [round((i + 0.5) / records * len(parts)) for i in range(records)]))
        chosen = sorted(rng.sample(range(records), wanted))
        answer = json.dumps([made[i] for i in chosen])
        which = "all parcels" if wanted == records else f"the parcels {', '.join(made[i][KEY] for i in chosen)}"
        fields = ", ".join((KEY, *FIELDS))
        return Sample(
            task=f"{TASK}_{wanted}_of_{records}[{haystack.name}]",
            index=index,
            context=f"{INTRODUCTION}\n{text}",
            question=f"Give the reports about {which} as a JSON list of objects with the fields {fields}. "
            "Write nothing but the JSON list.",
            answer_prefix="[",
            references=tuple(json.dumps(made[i]) for i in chosen),
            max_new_tokens=length.count_tokens(answer) + MARGIN_TOKENS,
            metric="json_facts",
            depths=depths_of(text, [told[i] for i in chosen]),
            classes=(KEY,),
            facts={"records": records, "asked": wanted},
        )

    yield from fill(build, length, STEP_WORDS, samples)


def _name(rng: random.Random) -> str:
    return f"{rng.choice('BCDFGHKLMNPRST')}{rng.choice('BCDFGHKLMNPRST')}-{rng.randrange(1000, 10000)}"


def _record(rng: random.Random, name: str) -> dict[str, str]:
    return {
        KEY: name,
        "sender": rng.choice(_SENDERS),
        "city": rng.choice(_CITIES),
        "weight_kg": str(rng.randrange(2, 90)),
        "contents": f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
    }


def _told(record: dict[str, str]) -> str:
    return (
        f"Parcel {record[KEY]} was sent from {record['city']} by {record['sender']}, weighs {record['weight_kg']} "
        f"kilograms and holds a {record['contents']}."
    )
