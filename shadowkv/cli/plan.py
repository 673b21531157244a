"""``shadowkv plan``: the bytes and the largest batch of a model and a context, before anything is loaded."""

import json as jsonlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from shadowkv.cli.loading import MODEL_HELP
from shadowkv.cli.options import settings_as_flags
from shadowkv.cli.terminal import show
from shadowkv.config import CacheConfig
from shadowkv.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from shadowkv.engine.plan import MethodPlan, Plan
    from shadowkv.models.spec import ModelSpec

GB = 1e9
USUAL_CONTEXT_TOKENS = 131072
USUAL_OUTPUT_TOKENS = 1024


@dataclass(frozen=True)
class PlanSettings:
    """What the plan is for."""

    context_tokens: int | None = field(default=None, metadata={"option": "--context"})
    """Length of the prompt; by default 128K with the answer, or what the model takes."""
    output_tokens: int | None = None
    """Length of the answer, for which memory is kept as well; by default 1K, or what the context leaves of it."""
    gpu_memory_bytes: int = 80 * 1024**3
    """Memory of the GPU."""
    host_memory_bytes: int = 512 * 1024**3
    """Memory of the host."""
    gpu_bandwidth: float = 2_000_000_000_000
    """Memory bandwidth of the GPU."""
    pcie_bandwidth: float = 31_500_000_000
    """Bandwidth from the host to the GPU."""
    hit_rate: float = 0.6
    """Share of the selected chunks that are on the device already."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: the model's own."""
    adapter: str | None = None
    """Directory of a LoRA adapter in peft's format, which may change how long a context the model takes."""

    def __post_init__(self) -> None:
        if not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"--hit-rate is {self.hit_rate:g}; it must be from 0 to 1")
        for option, value in (("--gpu-bandwidth", self.gpu_bandwidth), ("--pcie-bandwidth", self.pcie_bandwidth)):
            if value <= 0:
                raise ConfigError(f"{option} is {value:g}; it must be more than 0")


@settings_as_flags
def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP + " Only its config (or GGUF header) is read.")],
    *,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of text.")] = False,
    cache: CacheConfig,
    settings: PlanSettings,
) -> None:
    """Print bytes by kind, the largest batch, its limit and savings.

    Nothing is loaded and nothing is allocated.
    """
    from shadowkv.engine.memory import Memory
    from shadowkv.engine.plan import make_plan
    from shadowkv.models.load import load_spec
    from shadowkv.models.locate import locate

    spec = load_spec(locate(model, settings.adapter))
    context, output = _lengths(settings, spec)
    made = make_plan(
        spec,
        cache,
        dtype=_dtype(settings.dtype, spec),
        context_tokens=context,
        output_tokens=output,
        memory=Memory(settings.gpu_memory_bytes, settings.host_memory_bytes),
        gpu_gb_s=settings.gpu_bandwidth / GB,
        pcie_gb_s=settings.pcie_bandwidth / GB,
        hit_rate=settings.hit_rate,
    )
    if json:
        typer.echo(jsonlib.dumps(made.to_dict(), indent=1))
        return
    gpu, host = settings.gpu_memory_bytes / GB, settings.host_memory_bytes / GB
    show(
        f"{made.model} in {made.dtype}: {made.context_tokens:,} tokens of context, {made.output_tokens:,} of output, "
        f"{gpu:.2f} GB of GPU memory, {host:.2f} GB of host memory"
    )
    show(_table(made))
    for line in _figures(made):
        show(line)


def _lengths(settings: PlanSettings, spec: "ModelSpec") -> tuple[int, int]:
    """Tokens of context and of output. Raises ConfigError where an output leaves no context."""
    context, output = settings.context_tokens, settings.output_tokens
    longest = spec.context_tokens
    if output is None:
        left = longest // 8 if context is None else longest - context
        output = USUAL_OUTPUT_TOKENS if left < 0 else min(USUAL_OUTPUT_TOKENS, left)
    if context is None:
        if output >= longest:
            raise ConfigError(f"--output-tokens is {output:,}; {spec.architecture} takes {longest:,} tokens in all")
        context = min(longest, max(USUAL_CONTEXT_TOKENS, output + 1)) - output
    return context, output


def _dtype(name: str, spec: "ModelSpec") -> "torch.dtype":
    import torch

    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": spec.dtype}
    if name not in named:
        raise ConfigError(f"--dtype is {name!r}; allowed: {', '.join(named)}")
    return named[name]


def _table(made: "Plan") -> "Table":
    """Bytes by kind: of the model once, and of one sequence."""
    from rich.table import Table

    methods = [made.chosen] if made.chosen.method == made.full.method else [made.chosen, made.full]
    table = Table("GB")
    for method in methods:
        for place in ("device", "host"):
            table.add_column(f"{method.method}, {place}", justify="right")
    for kind, count in (("weights", made.weight_bytes), ("activations", made.activation_bytes)):
        table.add_row(kind, *(cell for _ in methods for cell in (_gb(count), "")))
    table.add_row("decoding", *(cell for method in methods for cell in (_gb(method.step_bytes), "")))
    table.add_section()
    kinds = dict.fromkeys(kind for method in methods for kind in (*method.device_bytes, *method.host_bytes))
    for kind in kinds:
        table.add_row(kind, *(cell for method in methods for cell in _cells(method, kind)))
    table.add_section()
    totals = ((method.sequence_device_bytes, method.sequence_host_bytes) for method in methods)
    table.add_row("one sequence", *(_gb(count) for pair in totals for count in pair))
    table.add_section()
    table.add_row("largest batch", *(cell for method in methods for cell in (f"{method.largest_batch:,}", "")))
    table.add_row("limited by", *(cell for method in methods for cell in (method.limit, "")))
    return table


def _cells(method: "MethodPlan", kind: str) -> tuple[str, str]:
    return _gb(method.device_bytes.get(kind)), _gb(method.host_bytes.get(kind))


def _gb(count: int | None) -> str:
    return "" if not count else f"{count / GB:.4f}"


def _figures(made: "Plan") -> list[str]:
    lines = []
    if made.savings is not None:
        lines.append(
            f"savings of keys and values on the device: {made.savings.paper_formula:.2f} by the paper's formula, "
            f"{made.savings.true_bytes:.2f} in true bytes, {made.savings.all_bytes:.2f} with all that is reserved"
        )
    if made.equivalent_bandwidth_gb_s is not None:
        lines.append(f"equivalent bandwidth: {made.equivalent_bandwidth_gb_s / 1000:.2f} TB/s {made.assumptions}")
    return [*lines, made.note] if made.note else lines
