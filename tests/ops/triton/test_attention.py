"""Decode attention over slots, against float64; through the interpreter on a CPU."""

import pytest
import torch

from shadowkv.errors import ShapeError
from shadowkv.ops.contract.attention import Attention, AttentionCase, attended
from shadowkv.ops.contract.base import excess
from shadowkv.ops.contract.bounds import Bounded
from shadowkv.ops.contract.rows import RowSpec, Sizes
from shadowkv.ops.rows import Address, Fact, LayerRows
from shadowkv.ops.splits import PROGRAMS_PER_SM, SM_COUNT, attention_splits
from shadowkv.ops.triton.attention import attend, attention_scratch
from tests.conftest import DEVICE
from tests.ops.truth import assert_within

OP = Attention()
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def scratch_for(q_BND: torch.Tensor, kv_heads: int, splits: int) -> dict[str, torch.Tensor]:
    batch, heads, dim = q_BND.shape
    shapes = attention_scratch(batch, heads, kv_heads, dim, 1, splits=splits)
    return {name: torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for name, (shape, dtype) in shapes.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OP.cases(), ids=lambda case: case.label)
def test_contract(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> None:
    assert excess(OP, case, device, dtype) == []


def test_a_row_in_a_batch_equals_the_row_alone(device: torch.device) -> None:
    case = OP.cases()[1]
    inputs = OP.make(case, device, torch.float32)
    together = OP.run(inputs)["out"]
    for i in range(len(case.rows)):
        one = LayerRows(inputs.rows.address_BX[i : i + 1], inputs.rows.facts_BI[i : i + 1])
        q_BND, selection = inputs.q_BND[i : i + 1], inputs.selection
        assert selection is not None
        mine = type(selection)(*(getattr(selection, name)[i : i + 1] for name in selection.__dataclass_fields__))
        out_BND, scratch = torch.full_like(q_BND, torch.nan), scratch_for(q_BND, case.sizes.kv_heads, 3)
        attend(one, q_BND, case.sizes.kv_heads, case.sizes.chunk_tokens, mine, out_BND, scratch)
        assert torch.equal(out_BND[0], together[i])


def test_padding_gives_zeros(device: torch.device) -> None:
    padding = RowSpec(chunks=0, outliers=0, resident=0, recent_tokens=0, window_slots=8)
    for selected in (True, False):
        for splits in (1, 2):
            case = AttentionCase("padding", Sizes(2, 2, 64, 8, 16), (padding,) * 2, selected=selected, splits=splits)
            assert not OP.run(OP.make(case, device, torch.float16))["out"].any()


def test_queries_and_results_may_be_strided(device: torch.device) -> None:
    """As when the queries are a part of the fused projection. Scratch may be for more rows."""
    case = OP.cases()[1]
    inputs = OP.make(case, device, torch.float32)
    batch, heads, dim = inputs.q_BND.shape
    fused_BXD = torch.full((batch, heads + 3, dim + 16), torch.nan, device=device)
    fused_BXD[:, 1 : heads + 1, :dim] = inputs.q_BND
    out_BXD = torch.full((batch, heads + 1, 2 * dim), 7.0, device=device)
    scratch = scratch_for(inputs.q_BND.repeat(2, 1, 1), case.sizes.kv_heads, 3)
    attend(
        inputs.rows,
        fused_BXD[:, 1 : heads + 1, :dim],
        case.sizes.kv_heads,
        case.sizes.chunk_tokens,
        inputs.selection,
        out_BXD[:, :heads, :dim],
        scratch,
    )
    assert torch.equal(out_BXD[:, :heads, :dim], OP.run(inputs)["out"])
    assert bool((out_BXD[:, heads:] == 7).all() and (out_BXD[:, :, dim:] == 7).all())


def test_slots_beyond_two_to_the_31_elements(device: torch.device) -> None:
    """Memory that nobody touches is not there, so this costs a few pages."""
    dim, recent, kv_heads = 64, 40, 1
    slots = (1 << 31) // dim + 64
    held_KED = torch.empty(kv_heads, slots, dim, dtype=torch.float16, device=device)
    held_KED[:, -recent:] = torch.randn(kv_heads, recent, dim).to(device, torch.float16)
    facts = [0] * len(Fact)
    facts[Fact.TOKENS], facts[Fact.SLOTS] = recent, slots
    facts[Fact.RING_START], facts[Fact.RING_SLOTS] = slots - recent, recent
    address = [0] * len(Address)
    address[Address.K] = address[Address.V] = held_KED.data_ptr()
    rows = LayerRows(torch.tensor([address], device=device), torch.tensor([facts], dtype=torch.int32, device=device))
    q_BND = torch.randn(1, 2, dim).to(device, torch.float16)
    out_BND = torch.full_like(q_BND, torch.nan)
    attend(rows, q_BND, kv_heads, 8, None, out_BND, scratch_for(q_BND, kv_heads, 1))
    seen_SD = Bounded.exact(held_KED[0, -recent:])
    assert_within(out_BND[0], attended(Bounded.exact(q_BND[0]), seen_SD, seen_SD, torch.float16))


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    """One key that takes all the weight, in whichever run it is."""
    case = AttentionCase("peaks", Sizes(1, 1, 64, 8, 16), (RowSpec(0, 0, 0, 600, 600),), selected=False, splits=3)
    for position in (0, 300, 599):
        inputs = OP.make(case, device, torch.float32)
        inputs.tensors[0]["K"][0, position] = 1e4 * inputs.q_BND[0, 0]
        assert torch.equal(OP.run(inputs)["out"][0, 0], inputs.tensors[0]["V"][0, position])


def test_too_large_a_group_is_refused(device: torch.device) -> None:
    case = OP.cases()[0]
    inputs = OP.make(case, device, torch.float32)
    q_BND = inputs.q_BND.new_zeros(len(case.rows), 34, case.sizes.head_dim)
    with pytest.raises(ShapeError, match="1 to 16"):
        attend(inputs.rows, q_BND, 2, 8, inputs.selection, q_BND, scratch_for(q_BND, 2, 1))


@pytest.mark.parametrize(("batch", "tokens"), [(1, 100), (1, 32768), (7, 122880), (14, 2500), (48, 2500), (1, 1 << 20)])
def test_splits_fill_the_machine_with_runs_that_are_worth_it(batch: int, tokens: int) -> None:
    splits = attention_splits(batch, 8, tokens)
    assert splits >= 1
    assert splits == 1 or tokens / splits >= 120
    assert batch * 8 * splits >= 200 or tokens / splits <= 128
    assert tokens / splits <= 4096


@pytest.mark.parametrize("batch", [4, 8, 14, 20, 28, 40, 48])
def test_what_fits_runs_all_at_once(batch: int) -> None:
    """Runs beyond the machine's places would wait for whole other ones."""
    places = SM_COUNT * PROGRAMS_PER_SM
    assert places / 2 < batch * 8 * attention_splits(batch, 8, 2492) <= places


def test_a_few_runs_too_many_are_divided_further() -> None:
    assert attention_splits(49, 8, 2492) == 1
    assert attention_splits(50, 8, 2492) > 1
