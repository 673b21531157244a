"""Settings that cannot be meant are refused when they are made, by name."""

import pytest

from shadowkv import ConfigError, SamplingParams


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
@pytest.mark.parametrize("value", [5, None, [""], ["a", 5], [True], [2.0]])
def test_what_ends_an_answer_is_checked(name, value):
    with pytest.raises(ConfigError, match=rf"{name} is .*; give"):
        SamplingParams(**{name: value})


def test_what_ends_an_answer_may_come_as_any_iterable():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=(s for s in "ab")).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=range(2)).stop_token_ids == (0, 1)
