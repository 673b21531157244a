"""Where and by what a figure was measured."""

import datetime
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import shadowkv


@dataclass(frozen=True)
class Provenance:
    """What has to stand beside a measured figure."""

    version: str
    commit: str
    device: str
    torch_version: str
    date: str

    @classmethod
    def here(cls, device: torch.device) -> "Provenance":
        """Of this process."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return cls(shadowkv.__version__, _commit(), name, torch.__version__, today)

    def line(self) -> str:
        """For people."""
        return f"{self.device}, torch {self.torch_version}, commit {self.commit}, {self.date}"

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def _commit() -> str:
    """The checkout's commit, marked when files differ from it; the version where there is no checkout."""
    root = Path(shadowkv.__file__).resolve().parent.parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return f"release {shadowkv.__version__}"
    return described.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"
