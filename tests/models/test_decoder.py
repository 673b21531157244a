"""What a decoder does beyond one sequence: batches of unequal lengths, slices, several new tokens, refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shadowkv.errors import CapacityError, ConfigError, RequestError
from shadowkv.models.decoder import Decoder
from shadowkv.models.layers import rms_norm
from shadowkv.models.load import load_decoder, resolve_dtype
from shadowkv.models.locate import locate
from shadowkv.models.rope import build_rope
from tests.models.tiny_models import (
    all_logits,
    assert_as_exact,
    full_cache,
    in_float64,
    prompt_of,
    rounding_of,
    save,
    tiny_model,
)
from tests.rounding import ROTATION, allowance

LENGTHS = (37, 5, 64)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> tuple[Decoder, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("qwen3")
    model = tiny_model("qwen3", {"head_dim": 16})
    save(model, directory)
    return load_decoder(locate(directory), device=device, dtype=torch.float32), model.to(device)


def _reference(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return in_float64(model)(tokens[None].to(model.device)).logits[0].cpu()


@pytest.mark.parametrize("new", [1, 3])
def test_rows_of_unequal_lengths_are_as_exact_as_alone(world: tuple[Decoder, PreTrainedModel], new: int) -> None:
    decoder, model = world
    cache = full_cache(decoder)
    texts = [prompt_of(length + 2 * new, seed=length) for length in LENGTHS]
    seqs = [cache.open(100) for _ in LENGTHS]
    for text, seq, length in zip(texts, seqs, LENGTHS, strict=True):
        decoder.prefill(text[:length], cache, seq)
    for step in range(2):
        ends = [length + step * new for length in LENGTHS]
        tokens_BT = torch.stack([text[end : end + new] for text, end in zip(texts, ends, strict=True)])
        logits_BTV = decoder.logits(decoder.forward(tokens_BT, cache, seqs)).cpu()
        assert logits_BTV.shape == (3, new, decoder.spec.vocab)
        for logits_TV, text, end in zip(logits_BTV, texts, ends, strict=True):
            truth = _reference(model, text)[end : end + new]
            assert_as_exact(logits_TV, truth, rounding_of(decoder, text[: end + new]))


@pytest.mark.parametrize("slice_tokens", [1, 7, 37, 4096])
def test_slices_change_nothing(world: tuple[Decoder, PreTrainedModel], slice_tokens: int) -> None:
    decoder, model = world
    weights = {"embed": decoder.embed, "norm": decoder.norm, "head": decoder.head}
    for i, layer in enumerate(decoder.layers):
        weights |= {f"layers.{i}.{name}": t for name, t in vars(layer).items() if t is not None}
    sliced = Decoder(decoder.spec, weights, decoder.rope, slice_tokens=slice_tokens)
    prompt = prompt_of(37)
    truth, allowed = _reference(model, prompt), rounding_of(decoder, prompt)
    assert_as_exact(all_logits(sliced, prompt), truth, allowed)
    cache = full_cache(sliced)
    last = sliced.logits(sliced.prefill(prompt, cache, cache.open(37))).cpu()
    assert last.shape == (1, sliced.spec.vocab)
    assert_as_exact(last, truth[-1:], allowed)


def test_a_prompt_of_one_token(world: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, model = world
    truth, allowed = _reference(model, prompt_of(1)), rounding_of(decoder, prompt_of(1))
    assert_as_exact(all_logits(decoder, prompt_of(1)), truth, allowed)


def test_layers_and_positions_are_reported(world: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, _ = world
    seen: list[tuple[int, int]] = []
    cache = full_cache(decoder)
    hidden = decoder.prefill(prompt_of(9), cache, cache.open(9), progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)]
    assert hidden.shape == (1, decoder.spec.hidden)


class Observer:
    """Keeps the queries that it asked for."""

    def __init__(self, prompt_queries: int) -> None:
        self.prompt_queries = prompt_queries
        self.queries: list[Tensor | None] = []

    def begin_prompt(self, seq: None, tokens: int) -> None:
        self.tokens = tokens

    def take_layer(
        self, layer: int, seq: None, k_pre_SKD: Tensor, k_KSD: Tensor, v_KSD: Tensor, q_NWD: Tensor | None = None
    ) -> None:
        assert k_KSD.shape[1] == v_KSD.shape[1] == k_pre_SKD.shape[0] == self.tokens
        self.queries.append(q_NWD)


@pytest.mark.parametrize("length", [1, 2, 5, 37])
@pytest.mark.parametrize("slice_tokens", [4, 4096])
def test_a_cache_gets_the_last_queries_that_it_asks_for(
    world: tuple[Decoder, PreTrainedModel], length: int, slice_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, _ = world
    monkeypatch.setattr(decoder, "slice_tokens", slice_tokens)
    everything = Observer(length)
    whole = decoder.prefill(prompt_of(length), everything, None, want_positions="all")
    nothing = Observer(0)
    last = decoder.prefill(prompt_of(length), nothing, None)
    assert nothing.queries == [None, None]
    # The same sums throughout, but queries turned by cos and sin of other blocks of positions.
    allowed = allowance(lambda: decoder.prefill(prompt_of(length), Observer(0), None))
    assert (whole[-1:] - last).abs().max() <= allowed
    for wanted in (1, 5, 100):
        observer = Observer(wanted)
        assert (decoder.prefill(prompt_of(length), observer, None) - last).abs().max() <= allowed
        for got, want in zip(observer.queries, everything.queries, strict=True):
            assert got is not None
            assert want is not None
            assert got.shape[1] == min(wanted, length)
            off = (got - want[:, -wanted:]).norm(dim=-1)
            assert (off <= 2 * ROTATION * got.norm(dim=-1)).all()


def test_refusals(world: tuple[Decoder, PreTrainedModel]) -> None:
    decoder, _ = world
    cache = full_cache(decoder)
    seq = cache.open(4)
    with pytest.raises(RequestError, match="at least one"):
        decoder.prefill(torch.empty(0, dtype=torch.long), cache, seq)
    with pytest.raises(RequestError, match="vocabulary is 0 to 96"):
        decoder.prefill(torch.tensor([1, 97]), cache, seq)
    with pytest.raises(RequestError, match="from -1"):
        decoder.prefill(torch.tensor([-1, 9]), cache, seq)
    with pytest.raises(CapacityError):
        decoder.prefill(prompt_of(5), cache, seq)
    decoder.prefill(prompt_of(4), cache, seq)
    with pytest.raises(CapacityError):
        decoder.forward(torch.tensor([[1]]), cache, [seq])
    with pytest.raises(ConfigError, match="slice_tokens"):
        Decoder(decoder.spec, {}, decoder.rope, slice_tokens=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_casts_where_transformers_does(dtype: torch.dtype, device: torch.device) -> None:
    theirs = LlamaRMSNorm(192, eps=1e-5).to(device, dtype)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(192))
    x = 3 * torch.randn(7, 5, 192, device=device).to(dtype)
    assert torch.equal(rms_norm(x, theirs.weight, 1e-5), theirs(x))


def test_low_precision_runs(tmp_path: Path, device: torch.device) -> None:
    """bfloat16 against float64 with the same weights."""
    model = tiny_model("llama", {}).to(torch.bfloat16).float()
    save(model, tmp_path)
    decoder = load_decoder(locate(tmp_path), device=device, dtype=torch.bfloat16)
    assert decoder.dtype == torch.bfloat16
    truth, allowed = _reference(model.to(device), prompt_of(50)), rounding_of(decoder, prompt_of(50))
    assert_as_exact(all_logits(decoder, prompt_of(50)), truth, allowed)


def test_dtypes(world: tuple[Decoder, PreTrainedModel]) -> None:
    spec = world[0].spec
    assert resolve_dtype(spec, torch.device("cpu"), "auto") == torch.float32
    assert resolve_dtype(spec, torch.device("cuda"), "auto") == spec.dtype
    assert resolve_dtype(spec, torch.device("cpu"), torch.float16) == torch.float16
    with pytest.raises(ConfigError, match="float64"):
        resolve_dtype(spec, torch.device("cpu"), torch.float64)


def test_longrope_asks_for_recomputation_and_dynamic_does_not(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "partial_rotary_factor": 1.0}
    phi3 = tiny_model(
        "phi3",
        {"original_max_position_embeddings": 32, "rope_parameters": {"rope_type": "longrope", **factors}},
    )
    save(phi3, tmp_path / "phi3")
    rope = load_decoder(locate(tmp_path / "phi3")).rope
    assert not rope.must_recompute(31, 32)
    assert rope.must_recompute(32, 33)
    assert not rope.must_recompute(33, 34)
    llama = tiny_model("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}})
    save(llama, tmp_path / "llama")
    decoder = load_decoder(locate(tmp_path / "llama"))
    assert not decoder.rope.must_recompute(256, 257)
    rope = build_rope(decoder.spec)
    assert rope.row(1) == rope.row(256) != rope.row(257) != rope.row(258)
