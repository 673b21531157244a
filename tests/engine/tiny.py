"""A tiny random model in memory and a tokenizer of letters: an engine without files."""

import torch

from shadowkv.cache.arena import Arena
from shadowkv.cache.methods import method_of
from shadowkv.config import CacheConfig, SamplingParams
from shadowkv.engine.engine import Engine
from shadowkv.engine.graphs import StepRunner
from shadowkv.engine.request import Request, RequestOutput
from shadowkv.engine.runner import Runner
from shadowkv.engine.scheduler import Scheduler
from shadowkv.models.decoder import Decoder
from shadowkv.models.rope import build_rope
from shadowkv.models.spec import ModelSpec, RopeSpec

VOCAB = 96
END = 0


def tiny_spec(context_tokens: int = 8192) -> ModelSpec:
    rope = RopeSpec("default", {"rope_type": "default", "rope_theta": 10000.0}, 16, False, context_tokens)
    return ModelSpec(
        architecture="tiny",
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=96,
        vocab=VOCAB,
        norm_eps=1e-5,
        activation="silu",
        rope=rope,
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        sandwich_norms=False,
        tied_embeddings=False,
        max_position_tokens=context_tokens,
        context_tokens=context_tokens,
        context_limit="made so",
        dtype=torch.float32,
    )


def tiny_decoder(device: torch.device, dtype: torch.dtype = torch.float32, spec: ModelSpec | None = None) -> Decoder:
    spec = spec or tiny_spec()
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for name, shape in spec.weight_shapes().items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * (2.0 / shape[-1] ** 0.5)
    return Decoder(spec, {k: w.to(device, dtype) for k, w in weights.items()}, build_rope(spec, device))


class Letters:
    """Token i is the character with code 32 + i; token 0 ends an answer and has no text."""

    end_token_ids = frozenset({END})
    byte_level = True
    has_chat_template = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([32 + token_id])

    def is_byte_fallback(self, token_id: int) -> bool:
        return False

    def is_skipped(self, token_id: int) -> bool:
        return token_id == END

    def decode(self, token_ids) -> str:
        return "".join(chr(32 + t) for t in token_ids if t != END)

    def token_text(self, token_id: int) -> str:
        return chr(32 + token_id)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(c) - 32 for c in text]


def tiny_engine(
    config: CacheConfig,
    device: torch.device,
    *,
    max_batch: int = 8,
    device_bytes: int = 64 << 20,
    host_bytes: int = 64 << 20,
    max_context_tokens: int = 8192,
    decoder: Decoder | None = None,
    max_admit: int = 1,
    kernels: bool = False,
) -> Engine:
    decoder = decoder or tiny_decoder(device)
    geometry, method = decoder.spec.geometry(decoder.dtype), method_of(config)
    on_device, on_host = Arena(device_bytes, device), Arena(host_bytes, "cpu", pinned=device.type == "cuda")

    def price(tokens: int) -> tuple[int, int]:
        cost = method.price(geometry, config, tokens)
        return cost.device_bytes, cost.host_bytes

    cache = method(geometry, config, decoder.rope, on_device, on_host)
    step = cache.make_step(max_batch, max_context_tokens) if kernels else None
    return Engine(
        Runner(decoder, cache, StepRunner(decoder, step) if step else None),
        Letters(),  # type: ignore[arg-type]
        Scheduler(on_device, on_host, price, max_batch, max_admit),
        max_context_tokens=max_context_tokens,
        end_token_ids=Letters.end_token_ids,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return (1 + torch.randint(VOCAB - 1, (length,), generator=generator)).tolist()


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams, limit: int = 5000) -> list[RequestOutput]:
    """All outputs, in the order of the prompts."""
    for i, ids in enumerate(prompts):
        engine.submit(Request(f"r{i}", ids, params))
    return [outputs[f"r{i}"] for outputs in [drain(engine, limit)] for i in range(len(prompts))]


def drain(engine: Engine, limit: int = 5000) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        for output in engine.step().outputs:
            assert output.request_id not in outputs, "a request ended twice"
            outputs[output.request_id] = output
    raise AssertionError("the engine does not come to an end")


def assert_idle(engine: Engine) -> None:
    cache, scheduler = engine.runner.cache, engine.scheduler
    assert scheduler.idle
    assert not engine.has_work
    assert not engine._entries
    for arena in (cache.device_arena, cache.host_arena):
        assert arena.used_bytes == 0
        assert arena.largest_free_bytes == arena.size_bytes
