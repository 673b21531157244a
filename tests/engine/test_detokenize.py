"""Pieces of text: together the whole, never a part of a character, never a part of a stop string."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowkv.config import SamplingParams
from shadowkv.engine.detokenize import StopMatcher, TextStream
from shadowkv.engine.tokenizer import Tokenizer
from tests.engine import vocabularies

texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="ab é中🎉👩\u200d👧e\u0301\ufffd\n ", max_size=40),
    st.lists(st.sampled_from(["🇩🇪", "ab ", "日本", "  ", "\ufffd", "naïve", "<think it over>", "</s>"])).map("".join),
)


@pytest.fixture(scope="module", params=list(vocabularies.KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return vocabularies.build(request.param)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.load(vocabularies.smollm2_file())


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer, SamplingParams())
    return [stream.push(token)[0] for token in ids] + [stream.finish()]


def check_text(tokenizer: Tokenizer, text: str) -> None:
    """Pieces of encoded text are the text, cut between characters only.

    A vocabulary may lack a byte (SmolLM2's has no F1), and loses characters without our doing.
    """
    ids = tokenizer.encode(text)
    sent = pieces(tokenizer, ids)
    whole = tokenizer.decode(ids)
    assert "".join(sent) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in sent)


@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_pieces_of_text(tokenizer: Tokenizer, text: str) -> None:
    check_text(tokenizer, text)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_pieces_of_any_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A model may answer with any ids: broken bytes, special tokens in the middle, ids out of range."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.smollm2
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_pieces_of_text_smollm2(smollm2: Tokenizer, text: str) -> None:
    check_text(smollm2, text)


@pytest.mark.smollm2
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 49155), st.integers(0, 300)), max_size=40))
def test_pieces_of_any_tokens_smollm2(smollm2: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(smollm2, ids)) == smollm2.decode(ids)


def test_text_is_sent_as_it_comes(tokenizer: Tokenizer) -> None:
    """Nothing is held but what a later token could change: plain words leave token by token."""
    ids = tokenizer.encode("ab ab ab ab", special=False)
    sent = pieces(tokenizer, ids)
    assert sent[-1] == ""
    assert sum(bool(piece) for piece in sent) >= len(ids) - 1


def test_a_character_is_sent_when_its_last_byte_came() -> None:
    tokenizer = vocabularies.build("byte_level")
    ids = [tokenizer.encode("€🎉x", special=False)][0]
    sent = [piece for piece in pieces(tokenizer, ids) if piece]
    assert "".join(sent) == "€🎉x"
    assert all(piece in "€🎉x" for piece in sent)


@pytest.mark.parametrize("repeated", ["ab ", "🎉", "\ufffd", "é"])
def test_cost_is_linear(tokenizer: Tokenizer, repeated: str) -> None:
    """Eight times the tokens may take eight times as long, with room for noise, and not sixty-four."""

    def seconds(times: int) -> float:
        """Of this process only: other programs must not make it slower."""
        ids = tokenizer.encode(repeated * times)
        best = 1e9
        for _ in range(5):
            start = time.process_time()
            pieces(tokenizer, ids)
            best = min(best, time.process_time() - start)
        return best

    seconds(100)
    assert seconds(1600) < 8 * seconds(200) * 3


# ---- stop strings ----


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The match that ends first, and of those the one that begins first, by searching the whole text."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


@settings(max_examples=600, deadline=None)
@given(
    cuts=st.lists(st.text(alphabet="ab🎉", max_size=5), max_size=15),
    stops=st.lists(st.text(alphabet="ab🎉", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
def test_stops_equal_the_oracle_and_leak_nothing(cuts: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    expected, reason = oracle("".join(cuts), stops, include)
    sent = seen = ""
    for cut in cuts:
        seen += cut
        sent += matcher.push(cut)
        assert expected.startswith(sent)
        if matcher.stop_reason is None:
            held = seen[len(sent) :]
            assert held == "" or any(stop.startswith(held) for stop in stops), "text is held without need"
    assert sent + matcher.flush() == expected
    assert matcher.stop_reason == reason


def test_every_repetitive_stop_is_found() -> None:
    """Stops that overlap themselves are where a matcher that falls back too far misses one."""
    stops = ["".join(letters) for size in range(1, 10) for letters in itertools.product("ab", repeat=size)]
    for stop in stops:
        for begun in range(len(stop)):
            text = f"{stop[:begun]}c{stop[:begun]}{stop}"
            matcher = StopMatcher([stop])
            assert (matcher.push(text) + matcher.flush(), matcher.stop_reason) == oracle(text, [stop], False)


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a ST") == "a "
    assert matcher.push("OP b") == ""
    assert matcher.push("c") == matcher.flush() == ""
    assert matcher.stop_reason == "STOP"


@settings(max_examples=150, deadline=None)
@given(text=texts, data=st.data(), include=st.booleans())
def test_stream_joins_both(tokenizer: Tokenizer, text: str, data: st.DataObject, include: bool) -> None:
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    stops = [whole[i : i + 3] for i in data.draw(st.lists(st.integers(0, max(len(whole) - 1, 0)), max_size=2))]
    stops = [stop for stop in stops if stop] + ["zzz"]
    expected, reason = oracle(whole, stops, include)
    stream = TextStream(tokenizer, SamplingParams(stop=tuple(stops), include_stop_str_in_output=include))
    sent = ""
    for token in ids:
        piece, stop = stream.push(token)
        sent += piece
        assert expected.startswith(sent)
        if stop is not None:
            break
    assert sent + stream.finish() == expected
    assert stream.stop_reason == reason


def test_a_stop_across_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab cd: ef gh")
    stream = TextStream(tokenizer, SamplingParams(stop=("d: e",)))
    results = [stream.push(token) for token in ids]
    assert "".join(piece for piece, _ in results) == "ab c"
    assert results[-1] == ("", "d: e")
