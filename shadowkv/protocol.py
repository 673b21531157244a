"""OpenAI's completion and chat-completion bodies to requests, and results to response objects.

Knows the wire format and the result types; knows no file, no socket and no model. Whatever a body asks
for that cannot be done is refused by name, never ignored.
"""

from dataclasses import dataclass, fields
from typing import Literal

from shadowkv.config import SamplingParams
from shadowkv.engine.request import JSON_IMPOSSIBLE_LOGPROB, Completion, RequestOutput, TokenLogprob
from shadowkv.errors import ConfigError, RequestError

Json = dict[str, object]
Message = dict[str, str]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions API generates when a body names no ``max_tokens``."""

_PLAIN = {
    "top_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "min_p": float,
    "seed": int,
    "n": int,
    "top_k": int,
    "min_tokens": int,
    "ignore_eos": bool,
    "include_stop_str_in_output": bool,
}
"""Fields that mean the same in a body and in SamplingParams."""

_IGNORED = frozenset({"model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
"""Fields about the caller's books, which change no token."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are not supported, with the values (besides null) that ask for nothing."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class BodyError(RequestError):
    """A body that cannot be served: ``param`` names the field at fault, ``code`` the kind of fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class Work:
    """What one body asks for. Exactly one of ``prompts`` and ``messages`` is filled."""

    api: Literal["completions", "chat"]
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[Message, ...]
    params: SamplingParams


def read_body(url: str, body: object, default_max_tokens: int | None = None) -> Work:
    """Check a request body and translate it.

    Args:
        default_max_tokens: for bodies that name no limit; None takes 16 for completions, as OpenAI has
            it, and SamplingParams' own default for chat.

    Raises:
        BodyError: names the field and says what is allowed.
    """
    if url not in (COMPLETIONS, CHAT):
        raise BodyError(f"url is {url!r}; allowed: {COMPLETIONS}, {CHAT}", param="url", code="invalid_url")
    if not isinstance(body, dict):
        raise BodyError("body is missing or not an object", param="body", code="invalid_type")
    given = {name: value for name, value in body.items() if value is not None}
    chat = url == CHAT
    if "model" in given and not isinstance(given["model"], str):
        raise _wrong_type("model", given["model"], "a string")
    prompts = () if chat else _prompts(given.pop("prompt", None))
    messages = _messages(given.pop("messages", None)) if chat else ()
    if not chat and default_max_tokens is None:
        default_max_tokens = DEFAULT_COMPLETION_TOKENS
    params = _params(given, chat=chat, default_max_tokens=default_max_tokens)
    return Work("chat" if chat else "completions", prompts, messages, params)


def completion_object(work: Work, outputs: list[RequestOutput], *, model: str, object_id: str, created: int) -> Json:
    """OpenAI's ``text_completion`` or ``chat.completion`` for one body's results, in order of its prompts."""
    choices: list[Json] = []
    for output in outputs:
        for completion in output.completions:
            choices.append(_choice(work, completion, index=len(choices)))
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    return {
        "id": object_id,
        "object": "chat.completion" if work.api == "chat" else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def error_object(message: str, *, status: int, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's error body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _choice(work: Work, completion: Completion, *, index: int) -> Json:
    """One sample. Raises nothing: a sample that failed is its caller's to report."""
    entries = completion.logprobs
    choice: Json = {"index": index, "finish_reason": completion.finish_reason.value}
    if work.api == "chat":
        choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        choice["logprobs"] = (
            None if entries is None else {"content": [_chat_logprob(e) for e in entries], "refusal": None}
        )
    else:
        choice["text"] = completion.text
        choice["logprobs"] = None if entries is None else _completion_logprobs(entries)
    return choice


def _finite(logprob: float) -> float:
    return max(logprob, JSON_IMPOSSIBLE_LOGPROB)


def _completion_logprobs(entries: tuple[TokenLogprob, ...]) -> Json:
    offsets, at = [], 0
    for entry in entries:
        offsets.append(at)
        at += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [{token: _finite(logprob) for _, token, logprob in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _chat_logprob(entry: TokenLogprob) -> Json:
    return {
        **_one_logprob(entry.token, entry.logprob),
        "top_logprobs": [_one_logprob(token, logprob) for _, token, logprob in entry.top],
    }


def _one_logprob(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode("utf-8"))}


def _wrong_type(name: str, value: object, wanted: str) -> BodyError:
    return BodyError(f"{name} is {value!r}; it must be {wanted}", param=name, code="invalid_type")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """A prompt is a string, token ids, or a list of either."""
    if value is None:
        raise BodyError("prompt is missing", param="prompt", code="missing_field")
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    found: list[str | tuple[int, ...]] = []
    for prompt in value if several and isinstance(value, list) else [value]:
        if isinstance(prompt, str):
            found.append(prompt)
        elif isinstance(prompt, list) and all(_is_int(token) for token in prompt):
            found.append(tuple(prompt))
        else:
            raise BodyError(
                "prompt must be a string, a list of token ids, or a list of either", param="prompt", code="invalid_type"
            )
        if not prompt:
            raise BodyError("prompt is empty; give at least one token", param="prompt", code="empty_prompt")
    return tuple(found)


def _messages(value: object) -> tuple[Message, ...]:
    if value is None:
        raise BodyError("messages is missing", param="messages", code="missing_field")
    if not isinstance(value, list) or not value:
        raise BodyError("messages must be a list with at least one message", param="messages", code="empty_prompt")
    return tuple(_message(f"messages[{at}]", message) for at, message in enumerate(value))


def _message(name: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise _wrong_type(name, message, "an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise BodyError(f"{name}.role is {role!r}; allowed: {', '.join(_ROLES)}", param=f"{name}.role")
    unsupported = sorted(key for key, value in message.items() if key not in ("role", "content", "name") and value)
    if unsupported:
        raise BodyError(
            f"{name}.{unsupported[0]} is not supported", param=f"{name}.{unsupported[0]}", code="unsupported_parameter"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(f"{name}.content[{at}]", part) for at, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong_type(f"{name}.content", content, "a string or a list of text parts")
    return {"role": _ROLES[role], "content": content}


def _text_part(name: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BodyError(f"{name} is not a text part; only text is supported", param=name, code="unsupported_parameter")


def _params(given: Json, *, chat: bool, default_max_tokens: int | None) -> SamplingParams:
    """SamplingParams of a body whose prompt has been taken out; refuses what is left over."""
    settings: dict[str, object] = {"temperature": _typed("temperature", given.pop("temperature", 1.0), float)}
    for name, kind in _PLAIN.items():
        if name in given:
            settings[name] = _typed(name, given.pop(name), kind)
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    limits = {name: _typed(name, given.pop(name), int) for name in names if name in given}
    if len(set(limits.values())) > 1:
        raise BodyError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
    if limits or default_max_tokens is not None:
        settings["max_tokens"] = next(iter(limits.values()), default_max_tokens)
    if "stop" in given:
        settings["stop"] = _stop(given.pop("stop"))
    if "stop_token_ids" in given:
        settings["stop_token_ids"] = _token_ids("stop_token_ids", given.pop("stop_token_ids"))
    settings["logprobs"] = _logprobs(given, chat=chat)
    for name, value in given.items():
        if name not in _IGNORED and value not in _NEUTRAL.get(name, ()):
            kept = name in _NEUTRAL
            raise BodyError(
                f"{name}={value!r} is not supported" if kept else f"{name} is not a supported parameter",
                param=name,
                code="unsupported_parameter",
            )
    return _sampling(settings)


def _sampling(settings: dict[str, object]) -> SamplingParams:
    try:
        return SamplingParams(**settings)  # type: ignore[arg-type]
    except ConfigError as error:
        message = str(error)
        named = [item.name for item in fields(SamplingParams) if message.startswith(item.name)]
        raise BodyError(message, param=max(named, key=len, default=None)) from None


def _typed(name: str, value: object, kind: type) -> object:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and _is_int(value):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise _wrong_type(name, value, {bool: "true or false", int: "an integer", float: "a number"}[kind])


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _wrong_type("stop", value, "a non-empty string or a list of them")
    return tuple(stops)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_int(token) for token in value):
        raise _wrong_type(name, value, "a list of token ids")
    return tuple(value)


def _logprobs(given: Json, *, chat: bool) -> int | None:
    """Completions count alternatives in ``logprobs``; chat switches with it and counts in ``top_logprobs``."""
    if not chat:
        wanted = given.pop("logprobs", None)
        count = None if wanted is None else _typed("logprobs", wanted, int)
    else:
        switched = _typed("logprobs", given.pop("logprobs", False), bool)
        wanted = given.pop("top_logprobs", None)
        if wanted is not None and not switched:
            raise BodyError("top_logprobs needs logprobs to be true", param="top_logprobs")
        count = (0 if wanted is None else _typed("top_logprobs", wanted, int)) if switched else None
    if isinstance(count, int) and not 0 <= count <= 20:
        name = "top_logprobs" if chat else "logprobs"
        raise BodyError(f"{name} is {count}; allowed: 0 to 20", param=name)
    assert count is None or isinstance(count, int)
    return count
