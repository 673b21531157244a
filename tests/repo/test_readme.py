"""What the README tells people to type exists, and its Python is Python."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from shadowkv.cli.app import app
from tests.repo.tree import ROOT

PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.is_file()]


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Every line of a shell block that starts with a program; a backslash continues a line."""
    found = []
    for page in PAGES:
        for block in blocks(page, "(?:sh|bash|console)"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words and words[0] == program:
                    found.append((page.name, words[1:]))
    return found


@pytest.mark.parametrize(("page", "words"), commands("shadowkv"))
def test_shadowkv_commands_parse(page: str, words: list[str]) -> None:
    for end in (">", "|", "<", "&&"):
        words = words[: words.index(end)] if end in words else words
    group = get_command(app)
    name, *rest = words
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, rest)


@pytest.mark.parametrize(("page", "words"), commands("make"))
def test_make_targets_exist(page: str, words: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert [word for word in words if "=" not in word and word not in targets] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Paths in backticks with a folder in front, as ``shadowkv/llm.py``."""
    named = re.findall(r"`((?:shadowkv|tests|docs)/[\w./-]+\.\w+)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_two_commands_are_in_the_readme() -> None:
    assert {tuple(words) for _, words in commands("make")} >= {("demo",), ("test",)}
