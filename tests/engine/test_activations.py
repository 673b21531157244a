"""What a prefill really holds at its peak, beside what the plan says."""

import dataclasses
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shadowkv.config import FullConfig, ShadowKVConfig
from shadowkv.engine.plan import activation_bytes
from tests.engine.tiny import tiny_decoder, tiny_engine, tiny_spec

SPARSE = ShadowKVConfig(rank=16, budget_tokens=256, outlier_chunks=8)


class PeakBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still referred to, at their highest."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.bytes = self.peak = 0

    def know(self, *tensors):
        self.live |= {t.untyped_storage()._cdata: 0 for t in tensors}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.freed, storage._cdata)
        return out

    def freed(self, key):
        self.bytes -= self.live.pop(key)


@pytest.mark.parametrize("config", [FullConfig(), SPARSE], ids=["full", "sparse"])
@pytest.mark.parametrize(("kv_heads", "ffn", "length"), [(2, 700, 3000), (2, 64, 12000), (16, 64, 12000)])
def test_a_prefill_holds_no_more_than_was_planned(config, kv_heads, ffn, length):
    cpu = torch.device("cpu")
    spec = dataclasses.replace(tiny_spec(1 << 16), hidden=256, heads=16, kv_heads=kv_heads, ffn=ffn)
    decoder = tiny_decoder(cpu, torch.bfloat16, spec)
    cache = tiny_engine(config, cpu, decoder=decoder).runner.cache
    seq, ids = cache.open(length), torch.arange(length) % spec.vocab
    peak = PeakBytes()
    own = [tensor for layer in decoder.layers for tensor in vars(layer).values() if tensor is not None]
    peak.know(ids, decoder.embed, decoder.norm, decoder.head, *own, *seq.tensors.values())
    with peak, torch.inference_mode():
        decoder.prefill(ids, cache, seq)
    planned = activation_bytes(spec, torch.bfloat16, length, 1)
    assert planned / 2 < peak.peak <= planned
