"""Sizes, docstrings, and what must not be in the tree."""

import ast
import re
from pathlib import Path

import pytest

from tests.repo.tree import definitions, short, sources, tracked, tree

MOST_LINES = 400
PYTHON = sources("shadowkv", "tests")

# Spelled in parts, so that this file does not hold what it forbids.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"pypi" + r"\.org",
            r"pythonhosted" + r"\.org",
            r"download\.pytorch" + r"\.org",
            r"registry\.npmjs",
            r"--(extra-)?" + r"index-url",
            r"(?<![\w.])/(home|root|Users|work|opt)/" + r"\w",
        )
    )
)


@pytest.mark.parametrize("path", PYTHON, ids=short)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MOST_LINES


def test_nothing_about_one_machine() -> None:
    """No registry hosts, which are the user's to choose, and no paths of somebody's machine."""
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{short(path)}: {match[0]}" for match in FORBIDDEN.finditer(text)]
    assert found == []


@pytest.mark.parametrize("path", [path for path in sources("shadowkv") if path.read_text(encoding="utf-8")], ids=short)
def test_modules_say_their_job(path: Path) -> None:
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize("path", sources("shadowkv"), ids=short)
def test_public_definitions_have_docstrings(path: Path) -> None:
    """Public functions and classes, and the methods of public classes that are more than a property or an
    implementation of something documented elsewhere."""
    bare = []
    for node in tree(path).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            bare.append(node.name)
    assert bare == []


def test_there_are_definitions() -> None:
    assert sum(1 for path in sources("shadowkv") for _ in definitions(path)) > 100
