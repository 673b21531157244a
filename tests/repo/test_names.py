"""One legend of axis letters, and words that say nothing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.tree import definitions, short, sources, tracked, tree

LEGEND = {
    "B": "sequences",
    "T": "new tokens",
    "S": "context",
    "N": "query heads",
    "K": "KV heads",
    "G": "query heads per KV head",
    "D": "head width",
    "M": "model width",
    "F": "MLP width",
    "V": "vocabulary",
    "C": "chunks",
    "L": "tokens per chunk",
    "R": "rank",
    "P": "selected chunks",
    "W": "window",
}
"""The letters of the whole project."""

LOCAL = {
    "E": "slots of the exact region",
    "I": "facts of a row",
    "O": "outliers of one KV head",
    "Q": "queries of one KV head, G*T",
    "X": "width of all keys together, K*D; any axis in code that serves several",
}
"""Letters that some rooms add."""

AXES = re.compile(r"[a-z][a-z0-9_]*_(?P<axes>(?:[A-Z]|1)+)")
NOT_AXES = {"lora_A", "lora_B"}
"""Names that others gave."""

BANNED = {"utils", "util", "helpers", "helper", "misc", "common", "manager", "temp", "tmp", "stuff"}


def names(path: Path) -> Iterator[str]:
    """Every name that a file gives to a variable, argument or attribute."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


@pytest.mark.parametrize("path", sources("shadowkv"), ids=short)
def test_axes_are_in_the_legend(path: Path) -> None:
    letters = set(LEGEND) | set(LOCAL) | {"1"}
    found = (AXES.fullmatch(name) for name in names(path))
    unknown = {m[0] for m in found if m and m[0] not in NOT_AXES and not set(m["axes"]) <= letters}
    assert unknown == set()


@pytest.mark.parametrize("path", sources("shadowkv", "tests"), ids=short)
def test_names_say_something(path: Path) -> None:
    """Files, and functions and classes of the package; a local variable may be as short-lived as its name."""
    defined = definitions(path) if short(path).startswith("shadowkv/") else ()
    named = (path.stem, *(node.name for node in defined))
    said = {word for name in named for word in re.sub("([A-Z])", r"_\1", name).lower().split("_")}
    assert said & BANNED == set()


def test_folders_say_something() -> None:
    assert {part for path in tracked() for part in Path(short(path)).parts[:-1]} & BANNED == set()


@pytest.mark.parametrize("path", sources("shadowkv"), ids=short)
def test_no_open_ended_arguments(path: Path) -> None:
    """``**kwargs`` hides what a function takes. The one exception is where typer calls back by keyword."""
    taking = [
        node.name
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg
    ]
    assert taking == (["called"] if short(path) == "shadowkv/cli/options.py" else [])
