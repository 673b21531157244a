"""Rows of results without a run, and a machine's ceilings without a machine."""

from shadowkv.bench.ceilings import Ceilings
from shadowkv.bench.decode import Decoded
from shadowkv.bench.parts import PartTimes
from shadowkv.bench.statistics import Spread
from shadowkv.bench.traffic import StepTraffic

H200 = Ceilings(4320.0, 4270.0, 50.0, 808.0)


def decoded(method: str = "full", tokens_per_second: float = 100.0, context_tokens: int = 1024) -> Decoded:
    parts = {"select": 1.0, "keys": 0.5, "values": 2.0, "attention": 1.5, "linears": 4.0, "rest": 0.25}
    return Decoded(
        method=method,
        settings=f"{method}()",
        by="kernels",
        context_tokens=context_tokens,
        batch=7,
        largest_batch=7,
        limit="device memory",
        tokens_per_second=tokens_per_second,
        step=Spread(10.0, 9.5, 11.0, 64),
        prefill_s=None,
        index_s=1.25,
        hit_rate=0.6,
        fetched_bytes=5e8,
        device_bytes=100_000_000_000,
        host_bytes=1_500_000,
        traffic=StepTraffic({"weights": 16_000_000_000, "index": 5_600_000_000}, 250_000_000),
        hbm_ms=5.0,
        bus_ms=4.0,
        parts=PartTimes(parts, 8.5, 600.0, ("odd_kernel",)),
        equivalent_gb_s=12_000.0,
        equivalent_formula_gb_s=13_000.0,
        synthetic=("random weights",),
    )
