"""What a decoder does beyond one sequence: batches of unequal lengths, slices, several new tokens, refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from shadowkv.errors import CapacityError, ConfigError, RequestError
from shadowkv.models.decoder import Decoder
from shadowkv.models.layers import rms_norm
from shadowkv.models.load import load_decoder, resolve_dtype
from shadowkv.models.locate import locate
from shadowkv.models.rope import build_rope
from tests.models.tiny_models import all_logits, assert_as_exact, full_cache, in_float64, prompt_of, save, tiny_model

LENGTHS = (37, 5, 64)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> tuple[Decoder, object]:
    directory = tmp_path_factory.mktemp("qwen3")
    model = tiny_model("qwen3", {"head_dim": 16})
    save(model, directory)
    return load_decoder(locate(directory), device=device, dtype=torch.float32), model.to(device)


def _reference(model: object, tokens: Tensor) -> tuple[Tensor, Tensor]:
    ids = tokens[None].to(model.device)  # type: ignore[attr-defined]
    with torch.no_grad():
        theirs, truth = (m(ids).logits[0].cpu() for m in (model, in_float64(model)))  # type: ignore[operator,arg-type]
    return theirs, truth


@pytest.mark.parametrize("new", [1, 3])
def test_rows_of_unequal_lengths_are_as_exact_as_alone(world: tuple[Decoder, object], new: int) -> None:
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
            theirs, truth = _reference(model, text)
            assert_as_exact(logits_TV, theirs[end : end + new], truth[end : end + new])


@pytest.mark.parametrize("slice_tokens", [1, 7, 37, 4096])
def test_slices_change_nothing(world: tuple[Decoder, object], slice_tokens: int) -> None:
    decoder, model = world
    weights = {"embed": decoder.embed, "norm": decoder.norm, "head": decoder.head}
    for i, layer in enumerate(decoder.layers):
        weights |= {f"layers.{i}.{name}": t for name, t in vars(layer).items() if t is not None}
    sliced = Decoder(decoder.spec, weights, decoder.rope, slice_tokens=slice_tokens)
    prompt = prompt_of(37)
    theirs, truth = _reference(model, prompt)
    assert_as_exact(all_logits(sliced, prompt), theirs, truth)
    cache = full_cache(sliced)
    last = sliced.logits(sliced.prefill(prompt, cache, cache.open(37))).cpu()
    assert last.shape == (1, sliced.spec.vocab)
    assert_as_exact(last, theirs[-1:], truth[-1:])


def test_a_prompt_of_one_token(world: tuple[Decoder, object]) -> None:
    decoder, model = world
    theirs, truth = _reference(model, prompt_of(1))
    assert_as_exact(all_logits(decoder, prompt_of(1)), theirs, truth)


def test_layers_and_positions_are_reported(world: tuple[Decoder, object]) -> None:
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
    world: tuple[Decoder, object], length: int, slice_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, _ = world
    monkeypatch.setattr(decoder, "slice_tokens", slice_tokens)
    everything = Observer(length)
    whole = decoder.prefill(prompt_of(length), everything, None, want_positions="all")
    nothing = Observer(0)
    last = decoder.prefill(prompt_of(length), nothing, None)
    assert nothing.queries == [None, None]
    for wanted in (1, 5, 100):
        observer = Observer(wanted)
        assert torch.equal(decoder.prefill(prompt_of(length), observer, None), last)
        for got, want in zip(observer.queries, everything.queries, strict=True):
            assert got is not None
            assert want is not None
            assert got.shape[1] == min(wanted, length)
            assert torch.equal(got, want[:, -wanted:])
    assert torch.allclose(whole[-1:], last, atol=1e-4, rtol=1e-4)


def test_refusals(world: tuple[Decoder, object]) -> None:
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
    """bfloat16 against transformers' bfloat16, both against float64; the same bound as in float32.

    Here transformers rounds cos and sin to bfloat16 and we do not, so the bound is easy; what it catches
    is a cast in the wrong place.
    """
    model = tiny_model("llama", {})
    save(model, tmp_path)
    decoder = load_decoder(locate(tmp_path), device=device, dtype=torch.bfloat16)
    assert decoder.dtype == torch.bfloat16
    ours = all_logits(decoder, prompt_of(50))
    _, truth = _reference(model.to(device), prompt_of(50))
    with torch.no_grad():
        theirs = model.to(torch.bfloat16)(prompt_of(50)[None].to(device)).logits[0].float().cpu()
    our_error, their_error = ((x - truth).square().mean().sqrt() for x in (ours, theirs))
    assert our_error <= 2 * their_error


def test_dtypes(world: tuple[Decoder, object]) -> None:
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
