"""Text in which needles are hidden: a user's file, a book, essays, or sentences made up here.

The sentences of the noise and of the generated text are our own.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from shadowkv.errors import RequestError

NOISE = "The grass grows. The sky stays wide. The sun climbs. On we walk. Out and home once more."
"""Five short sentences that are repeated. The structure is RULER's, the words are our own."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)\]])\s+")  # noqa: RUF001


def _listed(text: str) -> list[str]:
    return text.split(",")


_WHO = _listed(
    "The ferryman,A young surveyor,The baker's cousin,An old cartographer,The night porter,A travelling clerk,"
    "The lockkeeper,My neighbour,The schoolmaster,A retired pilot,The beekeeper,A quiet stranger,The postmistress,"
    "The glazier,An apprentice,The harbour master,A tired musician,The archivist,The gardener,A visiting doctor"
)
_DID = _listed(
    "carried,repaired,described,forgot,painted,borrowed,counted,sketched,returned,examined,sold,hid,praised,"
    "measured,polished,delivered,misplaced,inherited,unwrapped,collected,weighed,recognised,washed,labelled"
)
_WHAT = _listed(
    "a copper kettle,the broken clock,three wooden chairs,an unsigned letter,the blue lantern,a basket of pears,"
    "the long ladder,a bundle of maps,two glass jars,the rusty anchor,a woollen coat,an empty drawer,the stone basin,"
    "a pair of boots,the torn curtain,a small engine,the silver whistle,a heavy ledger,the folded sail,a jar of ink"
)
_WHERE = _listed(
    "by the canal,behind the chapel,near the old mill,at the edge of the orchard,in the upper gallery,"
    "under the railway bridge,beside the frozen pond,in the market hall,along the coast road,at the far station,"
    "on the second terrace,in a rented room,across the square,next to the weir,above the workshop,at the ford"
)
_WHEN = _listed(
    "before the rain came,while the bells were ringing,after the harvest,one evening in March,without a word,"
    "as the lamps were lit,long before breakfast,when the snow had melted,for the second time,in a great hurry,"
    "on the last day of the fair,as everybody expected,to the surprise of the children,during the long strike"
)


@dataclass(frozen=True)
class Haystack:
    """Words that go on for as long as anybody asks.

    Args:
        name: what a result says that it is.
        take: the first ``n`` words.
    """

    name: str
    take: Callable[[int], Sequence[str]]

    @classmethod
    def of_text(cls, text: str, name: str) -> "Haystack":
        """A text with its white space made single; it starts again where it ends.

        Raises:
            RequestError: no words.
        """
        words = text.split()
        if not words:
            raise RequestError(f"the haystack {name!r} holds no words; give a longer text")

        def take(count: int) -> Sequence[str]:
            return (words * (count // len(words) + 1))[:count]

        return cls(name, take)

    @classmethod
    def of_file(cls, path: str | Path, name: str | None = None) -> "Haystack":
        """A text file, or a JSON object with a ``text`` as RULER keeps its essays.

        Args:
            name: by default ``essay`` for such an object and ``book`` for a text file.

        Raises:
            RequestError: the file cannot be read or holds no words.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the haystack {path} cannot be read as UTF-8 text: {error}") from error
        if Path(path).suffix == ".json":
            try:
                text = json.loads(text)["text"]
            except (ValueError, KeyError, TypeError):
                raise RequestError(f"{path} is not a JSON object with a 'text'; give one, or a text file") from None
            if not isinstance(text, str):
                raise RequestError(f"{path}: 'text' is of type {type(text).__name__}; it must be a string")
            return cls.of_text(text, name or "essay")
        return cls.of_text(text, name or "book")

    @classmethod
    def generated(cls, seed: int = 0) -> "Haystack":
        """Sentences made up here, from a seed."""
        rng = random.Random(f"haystack/{seed}")
        words: list[str] = []

        def take(count: int) -> Sequence[str]:
            while len(words) < count:
                words.extend(_made_up(rng).split())
            return words[:count]

        return cls("generated", take)

    def sentences(self, words: int) -> list[str]:
        """The first words, cut into sentences."""
        return sentences(" ".join(self.take(words)))


def _made_up(rng: random.Random) -> str:
    who, did, what, where, when = (rng.choice(part) for part in (_WHO, _DID, _WHAT, _WHERE, _WHEN))
    shape = rng.randrange(4)
    if shape == 0:
        return f"{who} {did} {what} {where}."
    if shape == 1:
        return f"{when[0].upper()}{when[1:]}, {who[0].lower()}{who[1:]} {did} {what}."
    if shape == 2:
        return f"{who} {did} {what} {where} {when}."
    return f"{who} {did} {what} and {rng.choice(_DID)} {rng.choice(_WHAT)} {where}."


def sentences(text: str) -> list[str]:
    """A text cut where a sentence ends, by its punctuation.

    RULER uses NLTK's splitter; this one cuts after abbreviations too, which only moves a needle by a few words.
    """
    return [part for part in _SENTENCE_END.split(text) if part]


def plant(units: Sequence[str], needles: Sequence[str], places: Sequence[int]) -> list[str]:
    """Units with needles before the units at these places; ``len(units)`` is the end."""
    planted: list[str] = []
    rest = iter(units)
    done = 0
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
        planted.extend(islice(rest, place - done))
        planted.append(needle)
        done = place
    planted.extend(rest)
    return planted


def depths_of(context: str, needles: Sequence[str]) -> tuple[float, ...]:
    """Where needles stand in a context, as shares of its characters; one that is given twice stands twice.

    Raises:
        RequestError: one is not there.
    """
    last: dict[str, int] = {}
    places = []
    for needle in needles:
        place = context.find(needle, last.get(needle, -1) + 1)
        if place < 0:
            raise RequestError(f"the needle {needle!r} is not in its context")
        last[needle] = place
        places.append(place / len(context))
    return tuple(places)
