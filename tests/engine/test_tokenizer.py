"""Prompts with BOS once, chats by the model's template, end tokens by the model's files, never the network."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from shadowkv.engine.tokenizer import Tokenizer
from shadowkv.errors import CheckpointError, RequestError
from tests.engine import vocabularies

LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tokenizer went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return vocabularies.build("byte_fallback")


@pytest.fixture(scope="module")
def chat() -> Tokenizer:
    backend = vocabularies.byte_fallback()
    backend.chat_template = LLAMA_LIKE
    return Tokenizer(backend)


# ---- prompts ----


def test_bos_once(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("ab")
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert byte_fallback.encode("<s>ab").count(1) == 1
    assert byte_fallback.encode("ab", special=False) == ids[1:]
    assert vocabularies.build("byte_level").encode("ab")[0] != 1


def test_no_end_token_is_put_behind_a_prompt() -> None:
    backend = vocabularies.byte_fallback()
    from tokenizers.processors import TemplateProcessing

    backend.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    ids = Tokenizer(backend).encode("ab")
    assert ids[0] == 1
    assert 2 not in ids


def test_an_empty_prompt_has_no_tokens(byte_fallback: Tokenizer) -> None:
    assert byte_fallback.encode("") == []


def test_prompts_are_never_cut() -> None:
    backend = vocabularies.byte_level()
    backend.backend_tokenizer.enable_truncation(4)
    assert len(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend.backend_tokenizer)).encode("a z " * 50)) > 50


@pytest.mark.parametrize(("bad", "fault"), [(b"ab", "bytes"), (None, "NoneType"), ("a\ud83d", "character 1")])
def test_bad_prompts_are_named(byte_fallback: Tokenizer, bad: str, fault: str) -> None:
    with pytest.raises(RequestError, match=fault):
        byte_fallback.encode(bad)


# ---- chats ----


def test_chat_has_one_bos(chat: Tokenizer) -> None:
    messages = [{"role": "user", "content": "ab"}]
    assert chat.render_chat(messages) == "<s>user: ab\nassistant: "
    assert chat.render_chat(messages, add_generation_prompt=False) == "<s>user: ab\n"
    ids = chat.encode_chat(messages)
    assert ids[0] == 1
    assert ids.count(1) == 1


def test_text_parts_are_joined(chat: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat.encode_chat([{"role": "user", "content": parts}]) == chat.encode_chat(
        [{"role": "user", "content": "ab"}]
    )


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "empty"),
        ("hello", "type str"),
        (None, "NoneType"),
        (["hello"], r"messages\[0\] is of type str"),
        ([{"content": "a"}], r"messages\[0\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": "a"}, {"role": 3, "content": "a"}], r"messages\[1\].role is 3"),
        ([{"role": "", "content": "a"}], "role is ''"),
        ([{"role": "user", "content": None}], "content is of type NoneType"),
        ([{"role": "user", "content": 5}], "content is of type int"),
        ([{"role": "user", "content": ["a"]}], r"content\[0\] is of type str"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'; only 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is of type NoneType"),
        ([{"role": "robot", "content": "a"}], "template refuses the messages: no robots"),
        ([{"role": "user", "content": "\udc00"}], "surrogate"),
    ],
)
def test_malformed_messages_are_named(chat: Tokenizer, messages: list[dict[str, object]], fault: str) -> None:
    with pytest.raises(RequestError, match=fault):
        chat.encode_chat(messages)


def test_without_a_template_the_error_says_what_to_do(byte_fallback: Tokenizer) -> None:
    assert not byte_fallback.has_chat_template
    with pytest.raises(RequestError, match=r"chat_template\.jinja"):
        byte_fallback.encode_chat([{"role": "user", "content": "a"}])


# ---- tokens ----


def test_token_text() -> None:
    bytes_of = vocabularies.build("byte_level")
    ids = bytes_of.encode("the 🎉<|turn|>", special=False)
    assert "".join(bytes_of.token_text(i) for i in ids[:1]) == "the"
    assert bytes_of.token_text(ids[-1]) == "<|turn|>"
    assert bytes_of.token_text(10**6) == ""
    spaced = vocabularies.build("byte_fallback")
    assert [spaced.token_text(i) for i in spaced.encode("ab b", special=False)][-1] == " b"


def test_byte_level_bytes_are_those_of_decode() -> None:
    tokenizer = vocabularies.build("byte_level")
    for token_id in range(tokenizer.vocab_size):
        if not tokenizer.is_skipped(token_id):
            assert tokenizer.token_bytes(token_id).decode("utf-8", "replace") == tokenizer.decode([token_id])


# ---- files ----


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ({}, {2}),
        ({"generation_config": {"eos_token_id": 7}}, {2, 7}),
        ({"generation_config": {"eos_token_id": [7, 8]}, "config": {"eos_token_id": 9}}, {2, 7, 8, 9}),
        ({"config": {"text_config": {"eos_token_id": [5]}}, "generation_config": {"eos_token_id": None}}, {2, 5}),
    ],
)
def test_end_tokens_of_a_directory(tmp_path: Path, configs: dict[str, object], expected: set[int]) -> None:
    tokenizer = Tokenizer.load(vocabularies.save("byte_fallback", tmp_path, **configs))
    assert tokenizer.end_token_ids == expected
    assert tokenizer.encode("ab") == vocabularies.build("byte_fallback").encode("ab")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no tokenizer could be read"):
        Tokenizer.load(tmp_path)
    vocabularies.save("byte_level", tmp_path, generation_config={"eos_token_id": "</s>"})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        Tokenizer.load(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        Tokenizer.load(tmp_path / "model.gguf")


def test_importing_the_module_imports_no_transformers() -> None:
    code = "import shadowkv.engine.tokenizer, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- GGUF ----

PROMPT = "x  12 🎉<|im_end|>"


def load_and_encode(path: Path) -> list[int]:
    return Tokenizer.load(path).encode(PROMPT)


@pytest.mark.slow
@pytest.mark.smollm2
def test_gguf_conversion_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes race for the first conversion; later loads convert nothing; damage is repaired."""
    path = vocabularies.smollm2_file()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        first, second = pool.map(load_and_encode, [path, path])
    assert first == second
    (entry,) = (tmp_path / "shadowkv" / "tokenizers").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("shadowkv.engine.tokenizer._correct", None)  # what a conversion would call
        tokenizer = Tokenizer.load(path)
    assert tokenizer.encode(PROMPT) == first
    assert tokenizer.end_token_ids == {2}
    assert tokenizer.vocab_size == 49152
    assert [tokenizer.token_text(i) for i in tokenizer.encode("x  12")] == ["x", "  ", "1", "2"]
    assert tokenizer.token_text(first[-1]) == "<|im_end|>"
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids).endswith("user\nhi\nassistant\n")
    assert [i for i in ids if i in tokenizer.end_token_ids] == [2, 2]

    (entry / "tokenizer.json").write_text("{")
    assert load_and_encode(path) == first
    assert (entry / "tokenizer.json").stat().st_size > 1000


@pytest.mark.smollm2
def test_an_unwritable_cache_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(blocked))
    assert len(load_and_encode(vocabularies.smollm2_file())) > 5
