"""Keys of fetched chunks against the plain rebuilding and rotation."""

import pytest
import torch

from shadowkv.ops.contract.base import excess
from shadowkv.ops.contract.fetches import UNTOUCHED
from shadowkv.ops.contract.keys import KeyCase, RebuildKeys
from shadowkv.ops.contract.rows import RowSpec, Sizes
from shadowkv.ops.rows import Address
from tests.conftest import DEVICE
from tests.ops.truth import assert_within

OP = RebuildKeys()
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OP.cases(), ids=range(len(OP.cases())))
def test_keys(case, device, dtype):
    assert excess(OP, case, device, dtype) == []


def test_only_slots_on_the_list_are_written(device):
    case = OP.cases()[0]
    inputs = OP.make(case, device, torch.float16)
    for i, k_KED in enumerate(OP.run(inputs).values()):
        written_KE = (k_KED != UNTOUCHED).any(-1)
        assert int(written_KE.sum()) == sum(case.fetched()[i]) * case.sizes.chunk_tokens


def test_lists_are_walked_to_their_end_by_few_programs(device, monkeypatch):
    from shadowkv.ops.triton import keys

    monkeypatch.setattr(keys, "TARGET_PROGRAMS", 1)
    monkeypatch.setattr(keys, "BLOCK_TOKENS", 16)
    case = KeyCase((RowSpec(20, 2, 9, 5, 24),), Sizes(2, 1, 64, 8, 24), 9, full=True)
    assert excess(OP, case, device, torch.float32) == []


def test_offsets_beyond_two_to_the_31(device):
    """The last chunk of coefficients that are more than 2^31 elements; memory that is not touched is not there."""
    sizes = Sizes(1, 1, 64, 64, 512)
    chunks = (1 << 31) // (sizes.chunk_tokens * sizes.rank) + 2
    small = KeyCase((RowSpec(2, 0, 1, 5, 24, spare_chunks=0),), sizes, 1, full=True)
    inputs = OP.make(small, device, torch.float16)
    held = inputs.tensors[0]
    chunk = int(inputs.lists[0][0].chunk_M)
    far = torch.empty(chunks, sizes.chunk_tokens, sizes.rank, dtype=torch.float16, device=device)
    far[-1] = held[Address.COEFF][chunk]
    rope_rows = torch.zeros(chunks * sizes.chunk_tokens, dtype=torch.int32, device=device)
    inputs.rope.table.inv_freq_XF.zero_()  # so that the position does not matter
    inputs.rope.table.factor_X.fill_(1)
    expected = OP.truth(inputs)
    inputs.rows.address_BX[0, Address.COEFF] = far.data_ptr()
    inputs.rows.address_BX[0, Address.ROPE_ROWS] = rope_rows.data_ptr()
    inputs.selection.fetch_chunk_BKP[0, 0, 0] = chunks - 1
    for name, k_KED in OP.run(inputs).items():
        assert_within(k_KED, expected[name])
