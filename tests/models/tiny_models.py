"""Tiny random models of every family by transformers, and how far a run may be from the truth."""

import types
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shadowkv.cache.arena import Arena
from shadowkv.cache.base import CachedSequence
from shadowkv.cache.full import FullCache
from shadowkv.config import FullConfig
from shadowkv.models.decoder import Decoder
from shadowkv.ops.contract.bounds import Bounded
from tests.ops.truth import assert_within
from tests.rounding import allowance

VOCAB = 97

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(model_type: str, changes: dict[str, object], seed: int = 0) -> PreTrainedModel:
    """A model whose logits are of order one: the default initialisation would leave every layer near zero."""
    config = CONFIG_MAPPING[model_type](**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The same model in float64, its norms too, which transformers computes in float32 whatever the dtype."""
    twin = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64).eval()
    twin.load_state_dict(model.state_dict())
    twin.generation_config = model.generation_config

    def norm(self: torch.nn.Module, x: Tensor) -> Tensor:
        assert x.dtype == torch.float64
        eps = getattr(self, "variance_epsilon", None) or self.eps
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    for module in twin.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(norm, module)
    return twin.to(model.device)


@dataclass(frozen=True)
class Continuation:
    """A greedy continuation. Shapes: tokens [T]; logits [T, V], the ones that each token was chosen by."""

    tokens: list[int]
    logits: Tensor


@torch.no_grad()
def continue_with_transformers(
    model: PreTrainedModel, prompt: Tensor, new_tokens: int, *, use_cache: bool = True
) -> Continuation:
    ids = prompt[None].to(model.device)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = result.sequences[0, len(prompt) :].tolist()
    return Continuation(tokens, torch.stack([step[0] for step in result.logits]).cpu())


def full_cache(decoder: Decoder, megabytes: int = 64) -> FullCache:
    geometry = decoder.spec.geometry(decoder.dtype)
    arena = Arena(megabytes << 20, decoder.device)
    return FullCache(geometry, FullConfig(), decoder.rope, arena, Arena(1 << 10, "cpu"))


def all_logits(decoder: Decoder, prompt: Tensor) -> Tensor:
    cache = full_cache(decoder)
    hidden = decoder.prefill(prompt, cache, cache.open(len(prompt)), want_positions="all")
    return decoder.logits(hidden).cpu()


def continue_with_decoder(decoder: Decoder, prompt: Tensor, new_tokens: int) -> Continuation:
    """Prefill, then a token at a time; the prompt is computed again where RoPE's row makes keys stale."""
    cache = full_cache(decoder)
    capacity = len(prompt) + new_tokens
    tokens, logits = prompt.tolist(), []
    seq: CachedSequence = cache.open(capacity)
    hidden = decoder.prefill(prompt, cache, seq)
    for step in range(new_tokens):
        logits.append(decoder.logits(hidden).reshape(-1).cpu())
        tokens.append(int(logits[-1].argmax()))
        if step == new_tokens - 1:
            break
        if decoder.rope.must_recompute(len(tokens) - 1, len(tokens)):
            cache.release(seq)
            seq = cache.open(capacity)
            hidden = decoder.prefill(torch.tensor(tokens), cache, seq)
        else:
            hidden = decoder.forward(torch.tensor([tokens[-1:]]), cache, [seq])
    return Continuation(tokens[len(prompt) :], torch.stack(logits))


def rounding_of(decoder: Decoder, text: Tensor) -> float:
    """How far rounding may move any logit of a text, however it is cut into prompt and steps: the sums are the same."""
    return allowance(lambda: all_logits(decoder, text))


def assert_as_exact(ours: Tensor, truth: Tensor, allowed: float) -> None:
    """The logits are those of float64, but for rounding."""
    assert ours.dtype == torch.float32
    assert_within(ours, Bounded(truth.double(), torch.full(truth.shape, allowed, dtype=torch.float64)))


def save(model: PreTrainedModel, directory: Path, *, sharded: bool = False) -> Path:
    model.save_pretrained(directory, max_shard_size="40KB" if sharded else "1GB")
    return directory


def prompt_of(tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed))
