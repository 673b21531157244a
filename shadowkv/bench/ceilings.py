"""What the machine can do at most, measured in the same run as whatever is compared with it."""

from dataclasses import asdict, dataclass

import torch

from shadowkv.bench.timing import Stopwatch
from shadowkv.ops.contract.base import Traffic

BUFFER_BYTES = 2 << 30
BUS_BYTES = 512 << 20
GEMM = 8192
GB = 1e9


@dataclass(frozen=True)
class Ceilings:
    """Bandwidths in GB/s (1e9 bytes) and matrix products in TFLOP/s; copies count bytes read and written."""

    hbm_read_gb_s: float
    hbm_copy_gb_s: float
    bus_gb_s: float
    """Page-locked host memory to the device, by the copy engine."""
    gemm_tflop_s: float

    @property
    def hbm_gb_s(self) -> float:
        """What shares are taken of: the faster of reading and copying."""
        return max(self.hbm_read_gb_s, self.hbm_copy_gb_s)

    def device_ms(self, bytes_moved: float) -> float:
        """The least time that these bytes of device memory take."""
        return bytes_moved / self.hbm_gb_s / GB * 1e3

    def bus_ms(self, bytes_moved: float) -> float:
        """The least time that these bytes take from the host."""
        return bytes_moved / self.bus_gb_s / GB * 1e3

    def compute_ms(self, flops: float) -> float:
        """The least time of these operations."""
        return flops / self.gemm_tflop_s / 1e9

    def bounds_ms(self, traffic: Traffic) -> dict[str, float]:
        """The least time by each limit; a kernel cannot be faster than the longest."""
        return {
            "HBM": self.device_ms(traffic.device_bytes),
            "bus": self.bus_ms(traffic.bus_bytes),
            "compute": self.compute_ms(traffic.flops),
        }

    def line(self) -> str:
        """For people."""
        return (
            f"HBM {self.hbm_read_gb_s / 1e3:.2f} TB/s read, {self.hbm_copy_gb_s / 1e3:.2f} TB/s copy; host to device "
            f"{self.bus_gb_s:.1f} GB/s; bf16 GEMM {self.gemm_tflop_s:.0f} TFLOP/s"
        )

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def measure_ceilings(watch: Stopwatch) -> Ceilings:
    """Large transfers and one large product of random matrices, medians."""
    read_ms, copy_ms = _memory(watch)
    per_second = 1e3 / GB
    return Ceilings(
        hbm_read_gb_s=BUFFER_BYTES / read_ms * per_second,
        hbm_copy_gb_s=2 * BUFFER_BYTES / copy_ms * per_second,
        bus_gb_s=BUS_BYTES / _bus(watch) * per_second,
        gemm_tflop_s=2 * GEMM**3 / _gemm(watch) / 1e9,
    )


def _memory(watch: Stopwatch) -> tuple[float, float]:
    source = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device=watch.device)
    target = torch.empty_like(source)
    total = torch.empty((), dtype=torch.float32, device=watch.device)
    read = watch.time([lambda: torch.sum(source, 0, out=total)], repetitions=10)
    copy = watch.time([lambda: target.copy_(source)], repetitions=10)
    return read.median_ms, copy.median_ms


def _bus(watch: Stopwatch) -> float:
    host = torch.empty(BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    landed = torch.empty(BUS_BYTES, dtype=torch.uint8, device=watch.device)
    return watch.time([lambda: landed.copy_(host, non_blocking=True)], repetitions=5).median_ms


def _gemm(watch: Stopwatch) -> float:
    left, right = (torch.randn(GEMM, GEMM, device=watch.device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    return watch.time([lambda: torch.mm(left, right, out=product)], repetitions=10).median_ms
