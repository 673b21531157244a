"""Tasks by name: the benchmarks that are generated here, at a length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast, get_args

from shadowkv.errors import ConfigError
from shadowkv.eval.dense_evidence import Ask, dense_evidence
from shadowkv.eval.extraction import extraction
from shadowkv.eval.haystack import Haystack
from shadowkv.eval.key_values import key_values
from shadowkv.eval.needle_grid import needle_grid, needle_turns
from shadowkv.eval.ruler import TASKS, generate
from shadowkv.eval.ruler.recipe import Materials
from shadowkv.eval.sample import Length, Sample

DENSE_NEEDLES = 32
DENSE_LADDER = (1, 4, 16, 64)
RECORDS = 8
TURNS = 5

GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(TASKS),
    "ruler-synthetic": tuple(name for name in TASKS if not name.startswith("qa_")),
    "dense_evidence-sweep": tuple(f"dense_evidence:{count}:values" for count in DENSE_LADDER),
}
"""Names that stand for several tasks; ``ruler-synthetic`` needs no files."""

Maker = Callable[[Length, Materials, int], Iterator[Sample]]


def _grid(length: Length, materials: Materials, samples: int) -> Iterator[Sample]:
    return needle_grid(length, materials.text("niah_grid"), samples=samples, seed=materials.seed)


def _turns(length: Length, materials: Materials, samples: int) -> Iterator[Sample]:
    return needle_turns(length, materials.text("niah_turns"), turns=TURNS, samples=samples, seed=materials.seed)


def _key_values(length: Length, materials: Materials, samples: int) -> Iterator[Sample]:
    return key_values(length, samples=samples, seed=materials.seed)


def _dense(
    length: Length, materials: Materials, samples: int, needles: int = DENSE_NEEDLES, ask: Ask = "majority"
) -> Iterator[Sample]:
    text = materials.text("dense_evidence")
    return dense_evidence(length, text, needles, ask=ask, samples=samples, seed=materials.seed)


def _extraction(length: Length, materials: Materials, samples: int) -> Iterator[Sample]:
    return extraction(length, materials.text("extraction"), RECORDS, samples=samples, seed=materials.seed)


OWN_TASKS: dict[str, Maker] = {
    "niah_grid": _grid,
    "niah_turns": _turns,
    "key_values": _key_values,
    "dense_evidence": _dense,
    "extraction": _extraction,
}


@dataclass(frozen=True)
class Task:
    """A task that was asked for."""

    name: str
    make: Maker


def find_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks of names and group names, each once, in the order given.

    Raises:
        ConfigError: no such task.
    """
    found: dict[str, Task] = {}
    for name in names:
        for single in GROUPS.get(name, (name,)):
            if single in TASKS:
                found[single] = Task(single, partial(_ruler, single))
            elif single.startswith("dense_evidence:"):
                found[single] = Task(single, _dense_of(single))
            elif single in OWN_TASKS:
                found[single] = Task(single, OWN_TASKS[single])
            else:
                known = ", ".join((*GROUPS, *TASKS, *OWN_TASKS, "dense_evidence:NEEDLES[:ASK]"))
                raise ConfigError(f"there is no task {single!r}; there are: {known}")
    return list(found.values())


def _dense_of(name: str) -> Maker:
    """``dense_evidence:NEEDLES`` or ``dense_evidence:NEEDLES:ASK``."""
    count, _, ask = name.partition(":")[2].partition(":")
    if not count.isdecimal() or not int(count) or ask not in ("", *get_args(Ask)):
        raise ConfigError(
            f"the task is {name!r}; give dense_evidence:NEEDLES or dense_evidence:NEEDLES:ASK, where ASK is one of "
            f"{', '.join(get_args(Ask))}"
        )
    return partial(_dense, needles=int(count), ask=cast("Ask", ask or "majority"))


def _ruler(name: str, length: Length, materials: Materials, samples: int) -> Iterator[Sample]:
    return generate(name, length, materials, samples)


def find_haystack(name: str) -> Haystack:
    """``generated``, or a user's file."""
    return Haystack.generated() if name == "generated" else Haystack.of_file(name)
