"""Text and chats to token ids and back, for a Hugging Face directory or a GGUF file. Knows no network.

Tokens that end an answer come from the model's own files, never from a list of spellings.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shadowkv.errors import CheckpointError, RequestError

CACHE_FORMAT = 2
"""Raised when a converted tokenizer in the cache would no longer be what a conversion gives."""

SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of ``tokenizer.ggml.pre`` that cut numbers into single digits before GPT-2's pattern applies.
transformers reads them as plain GPT-2, which cuts the spaces before a number otherwise."""

END_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
"""GGUF keys of end tokens: of text, of a turn, of a message."""

NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
"""transformers' names and GGUF's keys. transformers 5.17 gives SmolLM2's BOS as its EOS."""

PROBE = "Naïve  cafés: 1234  56\n\t🎉 <s></s> ▁x"


class Tokenizer:
    """A transformers tokenizer as the engine needs it.

    Args:
        backend: any transformers tokenizer; loaded ones come from :meth:`load`.
        end_token_ids: tokens that end an answer, besides the backend's own.
    """

    def __init__(self, backend: Any, end_token_ids: Iterable[int] = ()) -> None:
        self._backend = backend
        own = backend.eos_token_id
        self.end_token_ids = frozenset(end_token_ids) | ({own} if own is not None else set())
        self._special = frozenset(i for i, token in backend.added_tokens_decoder.items() if token.special)
        self._prefix = _prefix(backend)
        self._spelling: dict[int, str | None] = {}
        kinds = _decoder_kinds(backend)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a model directory or of a GGUF file.

        Converting a GGUF file's takes seconds, so the result is kept in the user's cache directory.

        Raises:
            CheckpointError: the files are missing or damaged.
        """
        path = Path(path).absolute()
        if path.is_file():
            return cls(*_from_gguf(path))
        if not path.is_dir():
            raise CheckpointError(f"{path} does not exist; give a model directory or a GGUF file")
        return cls(_pretrained(path), _ends_of_directory(path))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return len(self._backend)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text.

        An empty text gives no tokens at all. Special tokens that the text spells out are recognised.

        Args:
            special: put the leading tokens before it that the model wants (BOS), unless they are there.

        Raises:
            RequestError: not a string, or one that is not valid Unicode.
        """
        if not isinstance(text, str):
            raise RequestError(f"a prompt is text; this one is of type {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text holds half of a surrogate pair at character {error.start}") from None
        ids = list(self._backend.encode(text, add_special_tokens=False, verbose=False))
        if not special or not ids or ids[: len(self._prefix)] == self._prefix:
            return ids
        return self._prefix + ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation: those of :meth:`render_chat`, which holds BOS if there is one."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt), special=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """A conversation as the model's chat template writes it.

        Raises:
            RequestError: a message is malformed, or the template is missing or refuses the conversation.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template; give a prompt that is formatted already, or put the "
                "template as chat_template.jinja into the model's directory"
            )
        conversation = [_message(i, message) for i, message in enumerate(_listed(messages))]
        try:
            text = self._backend.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            raise RequestError(f"the model's chat template refuses the messages: {error}") from error
        return str(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens; special ones have none."""
        text = self._backend.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def token_text(self, token_id: int) -> str:
        """One token for people to read, special ones by name. Parts of a character are shown as U+FFFD."""
        token = self._token(token_id)
        if token is None:
            return ""
        if self._byte_level and token_id not in self._special:
            return self.token_bytes(token_id).decode("utf-8", "replace")
        return token.replace("▁", " ")

    @property
    def byte_level(self) -> bool:
        return self._byte_level

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary."""
        token = self._token(token_id) or ""
        spelled = [BYTE_OF_CHARACTER.get(character) for character in token]
        # A token with other characters than the alphabet's was added as plain text.
        values = [value for value in spelled if value is not None]
        return bytes(values) if len(values) == len(spelled) else token.encode()

    def is_byte_fallback(self, token_id: int) -> bool:
        token = self._token(token_id) or ""
        return self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")

    def is_skipped(self, token_id: int) -> bool:
        return token_id in self._special or self._token(token_id) is None

    def _token(self, token_id: int) -> str | None:
        if token_id not in self._spelling:
            known = 0 <= token_id < 1 << 32
            self._spelling[token_id] = self._backend.convert_ids_to_tokens(token_id) if known else None
        return self._spelling[token_id]


def _byte_alphabet() -> dict[str, int]:
    """Which character stands for which byte in byte-level vocabularies: printable Latin-1 for itself, the
    others for 256 on, in order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def _decoder_kinds(backend: Any) -> set[str]:
    """The kinds of decoders in the chain, by their names in tokenizer.json."""
    decoder = getattr(getattr(backend, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _prefix(backend: Any) -> list[int]:
    """What the tokenizer puts before a text."""
    plain = list(backend.encode("a", add_special_tokens=False))
    full = list(backend.encode("a"))
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


# ---- messages ----


def _listed(messages: object) -> Sequence[object]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages must be a list; it is of type {type(messages).__name__}")
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    return messages


def _message(index: int, message: object) -> dict[str, object]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is of type {type(message).__name__}; give an object with role and content")
    for key in ("role", "content"):
        if key not in message:
            raise RequestError(f"{where} has no {key}")
    role = message["role"]
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {role!r}; give a non-empty string such as 'user'")
    return {**message, "content": _content(where, message["content"])}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{where}.content is of type {type(content).__name__}; give a string or a list of text parts"
        )
    return "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} is of type {type(part).__name__}; give an object with type and text")
    if part.get("type") != "text":
        raise RequestError(f"{where}.type is {part.get('type')!r}; only 'text' is served")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text is of type {type(text).__name__}; give a string")
    return text


# ---- files ----


def _pretrained(directory: Path, gguf_file: str | None = None) -> Any:
    from transformers import AutoTokenizer

    source = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **source)
    except Exception as error:  # transformers raises whatever its parsers raise
        where = directory / gguf_file if gguf_file else directory
        raise CheckpointError(f"no tokenizer could be read from {where}: {error}") from error


def _ends_of_directory(directory: Path) -> set[int]:
    """End tokens by the model's configuration files, where there are any."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
        for section in (config, config.get("text_config") if isinstance(config, dict) else None):
            if isinstance(section, dict):
                ends |= _end_ids(path, section.get("eos_token_id"))
    return ends


def _end_ids(path: Path, value: object) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; it must be an integer or a list of integers")
    return set(ids)


def _from_gguf(path: Path) -> tuple[Any, set[int]]:
    from shadowkv.models.gguf_file import GgufFile

    cached = _cache_entry(path)
    if cached is not None and cached.is_dir():
        try:
            return _read_cached(cached)
        except (CheckpointError, OSError, ValueError):
            shutil.rmtree(cached, ignore_errors=True)
    file = GgufFile(path)
    file.require_whole()  # transformers reads the tensors too, for seconds, and then speaks of shapes
    metadata = file.metadata
    backend = _pretrained(path.parent, path.name)
    _correct(backend, metadata)
    ends = {int(metadata[key]) for key in END_KEYS if key in metadata}
    if cached is not None:
        _write_cached(cached, backend, ends)
    return backend, ends


def _correct(backend: Any, metadata: Mapping[str, Any]) -> None:
    """Bring a conversion in line with the file's metadata, where some version of transformers is not."""
    from tokenizers import pre_tokenizers

    for name, key in NAMED_TOKENS.items():
        token_id = metadata.get(key)
        if token_id is not None and token_id < len(backend):
            setattr(backend, name, backend.convert_ids_to_tokens(int(token_id)))
    if metadata.get("tokenizer.ggml.pre") in SINGLE_DIGITS:
        backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _cache_entry(path: Path) -> Path | None:
    """Where this file's converted tokenizer is kept; None where the user has no home."""
    import tokenizers
    import transformers

    status = path.stat()
    identity = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]
    key = json.dumps([CACHE_FORMAT, transformers.__version__, tokenizers.__version__, *identity])
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "shadowkv" / "tokenizers" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _read_cached(entry: Path) -> tuple[Any, set[int]]:
    path = entry / "end_token_ids.json"
    return _pretrained(entry), _end_ids(path, json.loads(path.read_text(encoding="utf-8")))


def _write_cached(entry: Path, backend: Any, ends: set[int]) -> None:
    """Keep a conversion, if it survives the way through the files and the directory can be written.

    A finished directory is renamed into place; of several processes the first one wins.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent, prefix="new-", ignore_cleanup_errors=True) as new:
            made = Path(new) / "entry"
            backend.save_pretrained(made)
            (made / "end_token_ids.json").write_text(json.dumps(sorted(ends)), encoding="utf-8")
            again, _ = _read_cached(made)
            same = again.encode(PROBE) == backend.encode(PROBE) and again.all_special_ids == backend.all_special_ids
            if same and again.chat_template == backend.chat_template:
                made.rename(entry)
    except (OSError, CheckpointError):
        return
