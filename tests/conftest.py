"""Device and dtype of a run: SHADOWKV_TEST_DEVICE (default cpu) and SHADOWKV_TEST_DTYPE (default float32)."""

import os

import pytest
import torch

DEVICE = os.environ.get("SHADOWKV_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # has to be said before anyone imports Triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    return getattr(torch, os.environ.get("SHADOWKV_TEST_DTYPE", "float32"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
