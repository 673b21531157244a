"""A model that answers from its prompt at once, with the front door's verbs and none of its weight."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shadowkv.cache.base import CacheStats
from shadowkv.config import SamplingParams
from shadowkv.engine.request import Completion, FinishReason, RequestOutput, StreamChunk, Timing, TokenLogprob
from shadowkv.errors import RequestError


class FakeTokenizer:
    """One token per character."""

    has_chat_template = True

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return ([1] if special else []) + [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != 1)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}</{m['role']}>" for m in messages) + "<assistant>"

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(self.render_chat(messages), special=False)


class FakePlan:
    def lines(self) -> list[str]:
        return ["plan: a fake one"]

    def to_dict(self) -> dict[str, object]:
        return {"fake": True}


@dataclass
class FakeContext:
    llm: "FakeLLM"
    ids: list[int]

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def __enter__(self) -> "FakeContext":
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.released += 1

    def stream(self, question: list[int], params: SamplingParams) -> Iterator[StreamChunk]:
        return self.llm.stream(self.ids + question, params)

    def generate(self, questions: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        return [self.llm.answer("q", self.ids + question, params) for question in questions]


@dataclass
class FakeLLM:
    """Answers with the last characters of the prompt, backwards. ``steps_per_answer`` delays batch work."""

    max_prompt: int = 10_000
    at_once: int = 3
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    plan: FakePlan = field(default_factory=FakePlan)
    contexts: list[int] = field(default_factory=list)
    submitted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    queue: list[tuple[str, list[int], SamplingParams]] = field(default_factory=list)
    released: int = 0
    deepest: int = 0
    die_after: int | None = None
    computed_tokens: int = 0

    def with_cache(self, config: object) -> "FakeLLM":
        return self

    def answer(self, request_id: str, ids: list[int], params: SamplingParams) -> RequestOutput:
        text = self.tokenizer.decode(ids)[-params.max_tokens :][::-1]
        tokens = tuple(ord(c) for c in text)
        logprobs = None
        if params.logprobs is not None:
            top = ((65, "A", float("-inf")),) * params.logprobs
            logprobs = tuple(TokenLogprob(ord(c), c, -0.5, top) for c in text)
        failed = "FAIL" in self.tokenizer.decode(ids)
        completions = tuple(
            Completion(
                index=i,
                text=text,
                token_ids=tokens,
                finish_reason=FinishReason.ERROR if failed else FinishReason.LENGTH,
                error="layer 3 has NaN keys" if failed else None,
                logprobs=logprobs,
                stats=CacheStats("shadowkv", "sparse", len(ids), 2048, 4096, hits=3, misses=1),
            )
            for i in range(params.n)
        )
        timing = Timing(0.0, 0.5, 0.25, len(ids), 0, len(tokens) * params.n, params.n)
        return RequestOutput(request_id, tuple(ids), completions, timing)

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        return [self.answer("g", ids, params) for ids in prompts]

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[StreamChunk]:
        (completion,) = self.answer("s", prompt, params).completions
        for character in completion.text[:-1]:
            yield StreamChunk("s", 0, character, (ord(character),))
        yield StreamChunk("s", 0, completion.text[-1:], completion.token_ids[-1:], completion)

    def context(self, prompt: list[int]) -> FakeContext:
        self.contexts.append(len(prompt))
        return FakeContext(self, prompt)

    def submit(self, prompt: str | list[int], params: SamplingParams, request_id: str | None = None) -> str:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if len(ids) > self.max_prompt:
            raise RequestError(f"the prompt has {len(ids)} tokens; the longest is {self.max_prompt}")
        name = request_id or f"r{len(self.submitted)}"
        self.submitted.append(name)
        self.queue.append((name, ids, params))
        self.deepest = max(self.deepest, len(self.queue))
        return name

    def step(self) -> list[RequestOutput]:
        if self.die_after is not None:
            self.die_after -= 1
            if self.die_after < 0:
                raise KeyboardInterrupt
        now, self.queue = self.queue[: self.at_once], self.queue[self.at_once :]
        return [self.answer(name, ids, params) for name, ids, params in reversed(now)]

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.queue = [entry for entry in self.queue if entry[0] != request_id]

    @property
    def has_work(self) -> bool:
        return bool(self.queue)
