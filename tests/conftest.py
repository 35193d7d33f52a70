"""Fixtures of every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("linattn", derandomize=True, deadline=None, database=None)
settings.load_profile("linattn")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Freshly allocated memory holds NaN, and operations that may differ from run to run are refused."""
    torch.use_deterministic_algorithms(True)  # which fills what torch.empty and its kin return
    assert torch.empty(8).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
