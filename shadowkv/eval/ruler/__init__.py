"""RULER: thirteen synthetic tasks, each at any length.

Structure, parameters, length fitting and scores are RULER's; the sentences of the prompts and the word lists
are our own, so that a score is not to be put beside published ones. The user's own official files, which
:mod:`shadowkv.eval.files` reads, give exact parity. A task's name says what its text is: ``niah_single_2[book]``.

Source: NVIDIA/RULER, scripts/synthetic.yaml.
"""

from collections.abc import Iterator
from typing import Protocol

from shadowkv.errors import ConfigError
from shadowkv.eval.fitting import fill
from shadowkv.eval.ruler.counting import FrequentWordsTask, ListedWordsTask
from shadowkv.eval.ruler.needles import NEEDLE_TASKS
from shadowkv.eval.ruler.questions import QuestionTask
from shadowkv.eval.ruler.recipe import SAMPLES, Materials, Recipe
from shadowkv.eval.ruler.tracking import TrackingTask
from shadowkv.eval.sample import Length, Sample


class Task(Protocol):
    """A family of samples with a name."""

    @property
    def name(self) -> str:
        """Without the haystack."""

    def recipe(self, materials: Materials, length: Length) -> Recipe:
        """How samples are made at a length."""


_ALL: tuple[Task, ...] = (
    *NEEDLE_TASKS,
    TrackingTask(),
    ListedWordsTask(),
    FrequentWordsTask(),
    QuestionTask("qa_1", "squad"),
    QuestionTask("qa_2", "hotpot"),
)

TASKS: dict[str, Task] = {task.name: task for task in _ALL}
"""All thirteen, in RULER's order."""


def generate(task: str, length: Length, materials: Materials, samples: int = SAMPLES) -> Iterator[Sample]:
    """Samples of a task at a length.

    Raises:
        ConfigError: there is no such task, or it needs a file that was not given.
        RequestError: the length is too small for it, or the file cannot be read or has too few questions.
    """
    if task not in TASKS:
        raise ConfigError(f"RULER has no task {task!r}; it has {', '.join(TASKS)}")
    recipe = TASKS[task].recipe(materials, length)
    yield from fill(recipe.build, length, recipe.step, samples, recipe.most)
