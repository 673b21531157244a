"""How every command gets its model: the shared flags, and the call that loads."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shadowkv.cli.terminal import Terminal
from shadowkv.config import CacheConfig, SamplingParams
from shadowkv.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from shadowkv.llm import LLM

USUAL_BATCH = 64
TEMPLATE_TOKENS = 256
"""More than a chat template adds to a message (a default system message among it)."""
MODEL_HELP = "Directory in Hugging Face layout, GGUF file, or a name: smollm2, smollm2-32k."


@dataclass(frozen=True)
class LoadSettings:
    """Where the model runs and what it may use."""

    adapter: str | None = None
    """Directory of a LoRA adapter in peft's format, merged into the weights while they load."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: the first GPU if there is one."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: the model's own on a GPU, float32 on a CPU."""
    device_memory_bytes: int | None = None
    """Memory that weights, caches and activations may take on the device; by default what is free."""
    host_memory_bytes: int | None = None
    """Memory that values may take on the host; by default what is free."""
    max_context_tokens: int | None = None
    """Longest prompt plus answer to be served; by default what the model knows."""
    max_batch: int | None = None
    """Sequences that run at the same time, at most; by default what the command needs, or 64."""

    def __post_init__(self) -> None:
        for option, count in (("--max-batch", self.max_batch), ("--max-context-tokens", self.max_context_tokens)):
            if count is not None and count < 1:
                raise ConfigError(f"{option} is {count}; it must be at least 1")


def open_llm(model: str, cache: CacheConfig, load: LoadSettings, terminal: Terminal) -> "LLM":
    """Load a model and say what was planned for it."""
    from shadowkv.llm import LLM

    with terminal.progress():
        llm = LLM(
            model,
            cache=cache,
            adapter=load.adapter,
            device=load.device,
            dtype=load.dtype,
            device_memory_bytes=load.device_memory_bytes,
            host_memory_bytes=load.host_memory_bytes,
            max_context_tokens=load.max_context_tokens,
            max_batch=load.max_batch or USUAL_BATCH,
            progress=terminal.report,
        )
    for line in llm.plan.lines():
        terminal.note(line)
    return llm


def just_enough(load: LoadSettings, model: str, texts: list[str], sampling: SamplingParams) -> LoadSettings:
    """Where the user set no limit: memory for these texts and answers only, since pinning memory takes time."""
    from shadowkv.engine.tokenizer import Tokenizer
    from shadowkv.models.load import load_spec
    from shadowkv.models.locate import locate

    context, batch = load.max_context_tokens, load.max_batch
    if context is None:
        files = locate(model, load.adapter)
        tokenizer = Tokenizer.load(files.path)
        context = sum(len(tokenizer.encode(text)) for text in texts) + sampling.max_tokens + TEMPLATE_TOKENS
        context = min(context, load_spec(files).context_tokens)
    if batch is None:
        batch = sampling.n + (len(texts) > 1)  # the samples, and the context that they are copies of
    return replace(load, max_context_tokens=context, max_batch=batch)


def read_text(path: str) -> str:
    """The text of a file, or of standard input for ``-``.

    Raises:
        RequestError: not UTF-8 (names the byte), or nothing in it.
    """
    name = "standard input" if path == "-" else path
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text: byte {raw[error.start]:#04x} at offset {error.start}") from None
    if not text.strip():
        raise RequestError(f"{name} is empty")
    return text
