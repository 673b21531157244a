"""What a front door hands out: answers that come piece by piece, and contexts that outlive their questions."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shadowkv.config import SamplingParams
from shadowkv.engine.engine import KeptContext
from shadowkv.engine.request import RequestOutput, StreamChunk
from shadowkv.errors import RequestError

if TYPE_CHECKING:
    from shadowkv.llm import LLM

Prompt = str | Sequence[int]
"""Text, which is tokenised with the model's special tokens, or token ids, which are taken as they are."""
Progress = Callable[[str, int, int], None]
"""Told the name of a stage, what is done of it, and all there is."""


class Stream(Iterator[StreamChunk]):
    """One answer, piece by piece. Made by :meth:`LLM.stream` and :meth:`Context.stream`."""

    def __init__(self, llm: "LLM", request_id: str) -> None:
        self._llm = llm
        self._request_id = request_id
        self._chunks = llm._streams[request_id] = deque()

    def __next__(self) -> StreamChunk:
        while not self._chunks and self._running:
            self._llm._advance()
        if not self._chunks:
            raise StopIteration
        return self._chunks.popleft()

    @property
    def _running(self) -> bool:
        return self._llm._streams.get(self._request_id) is self._chunks

    def close(self) -> None:
        """End here; a request that is still running is cancelled."""
        if self._running:
            self._llm._abandon([self._request_id])
        self._chunks.clear()

    __del__ = close


class Context:
    """A prefilled text that any number of questions can be asked of. Made by :meth:`LLM.context`.

    Every question runs on a copy, so questions do not see each other, unless ``keep=True`` makes the
    context go on with the question and its answer (a conversation).
    """

    def __init__(self, llm: "LLM", kept: KeptContext) -> None:
        self._llm = llm
        self._kept = kept

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self._kept.token_ids + self._kept.pending

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return len(self.token_ids)

    def generate(
        self,
        questions: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        keep: bool = False,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer one question or several together.

        Args:
            keep: go on from this (single) question and its answer.

        Raises:
            RequestError: empty, too long, or the context was released.
        """
        asked = as_list(questions)
        if keep and (len(asked) != 1 or (params is not None and params.n != 1)):
            raise RequestError("keep goes on from one answer: ask one question with n=1")
        ids: list[str] = []
        try:
            for question in asked:
                ids.append(self.submit(question, params, keep=keep))
            with self._llm._reporting(progress):
                return self._llm.wait(ids)
        except BaseException:
            self._llm._abandon(ids)
            raise

    def submit(self, question: Prompt, params: SamplingParams | None = None, *, keep: bool = False) -> str:
        """Queue a question; its id, for :meth:`LLM.wait` or :meth:`LLM.step`. See :meth:`generate`."""
        if self._kept.seq is None:
            raise RequestError("the context was released")
        llm = self._llm
        ids = llm.tokenizer.encode(question, special=False) if isinstance(question, str) else llm.tokenize(question)
        if not ids:
            raise RequestError("the question has no tokens; give at least one")
        return llm._submit([*self.token_ids, *ids], params or SamplingParams(), context=self._kept, keep=keep)

    def stream(self, question: Prompt, params: SamplingParams | None = None, *, keep: bool = False) -> Stream:
        """Answer one question piece by piece."""
        if keep and params is not None and params.n != 1:
            raise RequestError("keep goes on from one answer: ask with n=1")
        return Stream(self._llm, self.submit(question, params, keep=keep))

    def release(self) -> None:
        """Give the memory back. A second time does nothing."""
        self._llm.engine.drop(self._kept)

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several.

    Raises:
        RequestError: neither.
    """
    given: Any = prompts
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise RequestError(f"prompts are text, token ids, or a list of either; got {type(given).__name__}")
    if isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int)):
        return [given]
    return list(given)
