"""Device and dtype of a run: SHADOWKV_TEST_DEVICE (default cpu) and SHADOWKV_TEST_DTYPE (default float32)."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(os.environ.get("SHADOWKV_TEST_DEVICE", "cpu"))


@pytest.fixture(scope="session")
def dtype() -> torch.dtype:
    return getattr(torch, os.environ.get("SHADOWKV_TEST_DTYPE", "float32"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
