"""Where the public material for these tests is, and the ways of counting that they use."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shadowkv.engine.tokenizer import Tokenizer
from tests.engine.vocabularies import smollm2_file

DATA = Path(os.environ.get("SHADOWKV_TEST_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data")


@pytest.fixture(scope="session")
def material() -> Callable[[str], Path]:
    """The path of a file of the public material; skips the test where it is absent."""

    def find(name: str) -> Path:
        path = DATA / name
        if not path.exists():
            pytest.skip(f"{name} is not in {DATA}; set SHADOWKV_TEST_DATA to the folder that holds it")
        return path

    return find


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return Tokenizer.load(smollm2_file())
