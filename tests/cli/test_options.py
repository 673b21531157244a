"""Every setting is a flag, and every flag a setting."""

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from shadowkv.cli.options import field_docs, flags_of, methods, settings_as_flags
from shadowkv.config import CacheConfig, FullConfig, SamplingParams, ShadowKVConfig


@dataclass
class Caught:
    cache: CacheConfig | None = None
    sampling: SamplingParams | None = None


@pytest.fixture
def caught() -> Caught:
    return Caught()


@pytest.fixture
def app(caught: Caught) -> typer.Typer:
    made = typer.Typer(pretty_exceptions_enable=False)

    @made.command()
    @settings_as_flags
    def show(name: Annotated[str, typer.Argument()] = "x", *, cache: CacheConfig, sampling: SamplingParams) -> None:
        """Keep what was built."""
        caught.cache, caught.sampling = cache, sampling

    return made


def test_no_flags_give_the_defaults(app: typer.Typer, caught: Caught) -> None:
    assert CliRunner().invoke(app, []).exit_code == 0
    assert caught == Caught(ShadowKVConfig(), SamplingParams())


def test_flags_reach_their_fields(app: typer.Typer, caught: Caught) -> None:
    words = (
        "--method shadowkv --rank 64,48 --chunk-tokens 4 --budget-tokens 1k --no-reuse --value-store device "
        "--index landmarks --temperature 0.5 --stop A --stop B --stop-token-ids 7 --seed -3 --ignore-eos"
    )
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    assert caught.cache == ShadowKVConfig(
        rank=(64, 48), chunk_tokens=4, budget_tokens=1024, reuse=False, value_store="device"
    )
    assert caught.sampling == SamplingParams(
        temperature=0.5, stop=("A", "B"), stop_token_ids=(7,), seed=-3, ignore_eos=True
    )


def test_one_rank(app: typer.Typer, caught: Caught) -> None:
    CliRunner().invoke(app, ["--rank", "64"])
    assert caught.cache == ShadowKVConfig(rank=64)


def test_full(app: typer.Typer, caught: Caught) -> None:
    CliRunner().invoke(app, ["--method", "full"])
    assert caught.cache == FullConfig()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--method none", f"--method is 'none'; allowed: {', '.join(methods())}"),
        ("--method full --rank 3", "--rank is a setting of --method shadowkv, not of --method full"),
        ("--rank 0", "rank is 0; it must be an integer of at least 1"),
        ("--rank x", "--rank: 'x' is not a whole number"),
        ("--attend all", "--attend: 'all' is not allowed; allowed: selected, resident"),
        ("--temperature warm", "--temperature: 'warm' is not a number"),
        ("--top-p 2", "top_p is 2.0; allowed: 0.0 to 1.0"),
        ("--budget-tokens 3x", "--budget-tokens: '3x' is not a number of tokens such as 4096, 8k or 1M"),
    ],
)
def test_a_wrong_value_is_one_line(app: typer.Typer, words: str, says: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert (result.exit_code, result.stderr, result.stdout) == (2, f"error: {says}\n", "")


@pytest.mark.parametrize("config", [*methods().values(), SamplingParams])
def test_every_field_has_a_flag(config: type) -> None:
    assert [flag.field for flag in flags_of(config)] == [item.name for item in fields(config)]


def test_help_is_the_docstring_of_the_field() -> None:
    docs = field_docs(ShadowKVConfig)
    assert docs["budget_tokens"] == "Tokens selected per KV head and step."
    assert set(docs) == {item.name for item in fields(ShadowKVConfig)}
