"""Who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, short, sources, tree

HOMES = {
    "triton": ("shadowkv/ops/triton/",),
    "transformers": ("shadowkv/integrations/", "shadowkv/engine/tokenizer.py", "shadowkv/models/"),
    "fastapi": ("shadowkv/server/",),
    "rich": ("shadowkv/cli/",),
    "typer": ("shadowkv/cli/",),
}
"""Packages that only some rooms know."""

PURE = ("shadowkv.cli.app", "shadowkv.config", "shadowkv.cache.pool", "shadowkv.engine.scheduler", "shadowkv.protocol")
"""Modules that bring in neither torch nor transformers, nor does anything that they import."""


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_floors() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("package", HOMES)
def test_packages_stay_at_home(package: str) -> None:
    strangers = [
        short(path)
        for path in sources("shadowkv")
        if package in imported(path) and not short(path).startswith(HOMES[package])
    ]
    assert strangers == []


@pytest.mark.parametrize("module", PURE)
def test_pure_modules(module: str) -> None:
    program = f"import sys, {module}; print([p for p in ('torch', 'transformers') if p in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "[]\n"


def test_importing_the_package_touches_no_gpu() -> None:
    program = (
        "import sys, shadowkv\n"
        "shadowkv.SamplingParams, shadowkv.ShadowKVConfig\n"
        "print('torch' in sys.modules and sys.modules['torch'].cuda.is_initialized())"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "False\n"


def test_help_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from shadowkv.cli.app import app\n"
        "for command in ([], ['generate'], ['batch'], ['plan'], ['demo']):\n"
        "    app([*command, '--help'], standalone_mode=False)\n"
        "print([p for p in ('torch', 'transformers') if p in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).endswith("[]\n")
