"""Values of fetched chunks: every one in its slot, and nothing else written."""

import pytest
import torch

from shadowkv.ops.contract.base import excess
from shadowkv.ops.contract.fetches import FetchCase
from shadowkv.ops.contract.rows import RowSpec, Sizes
from shadowkv.ops.contract.values import FetchValues
from shadowkv.ops.rows import Address
from tests.conftest import DEVICE

OP = FetchValues()
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OP.cases(), ids=range(len(OP.cases())))
def test_values(case, device, dtype):
    assert excess(OP, case, device, dtype) == []


def test_few_programs_go_round_several_times(device, monkeypatch):
    from shadowkv.ops.triton import values

    monkeypatch.setattr(values, "PROGRAMS", 2)
    monkeypatch.setattr(values, "TILE_BYTES", 1024)
    case = FetchCase((RowSpec(20, 2, 9, 5, 24),) * 2, Sizes(2, 1, 96, 8, 8), 9, full=True)
    assert excess(OP, case, device, torch.float16) == []
    assert excess(OP, case, device, torch.float32) == []


def test_offsets_beyond_two_to_the_31(device):
    """The last chunk of a store of more than 2^31 elements; memory that is not touched is not there."""
    sizes = Sizes(1, 1, 256, 64, 8)
    chunks = (1 << 31) // (sizes.chunk_tokens * sizes.head_dim) + 2
    inputs = OP.make(FetchCase((RowSpec(2, 0, 1, 5, 24),), sizes, 1, full=True), device, torch.float16)
    expected = OP.reference(inputs)
    far = torch.empty(1, chunks, sizes.chunk_tokens, sizes.head_dim, dtype=torch.float16, device=device)
    far[0, -1] = inputs.values_KCLD[0][0, inputs.lists[0][0].chunk_M[0].cpu()]
    inputs.rows.address_BX[0, Address.VALUES] = far.data_ptr()
    inputs.selection.fetch_chunk_BKP[0, 0, 0] = chunks - 1
    for name, v_KED in OP.run(inputs).items():
        assert torch.equal(v_KED, expected[name])
