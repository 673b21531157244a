"""``shadowkv eval`` refuses what it cannot do before it loads a model."""

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--budget", "0%"], "--budget is '0%'"),
        (["--budget", "120%"], "--budget is '120%'"),
        (["--methods", "full,telepathy"], "--methods names 'telepathy'"),
        (["--methods", "quest:telepathy=3"], "--methods has 'telepathy=3'; give SETTING=VALUE"),
        (["--methods", "quest:page-tokens"], "--methods has 'quest:page-tokens'"),
        (["--samples", "0"], "--samples is 0"),
        (["--workers", "0"], "--workers is 0"),
        (["--tasks", "niah_single_9"], "there is no task 'niah_single_9'"),
        (["--haystack", "/no/such/book.txt"], "/no/such/book.txt"),
        (["--lengths", "4x"], "4x"),
    ],
)
def test_bad_input_is_one_line(run: Run, tmp_path, flags, said) -> None:
    result = run("eval", "no-such-model", "--output", tmp_path / "out", *flags)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "no-such-model" not in result.output  # the model was not looked for yet
    assert "Traceback" not in result.output
