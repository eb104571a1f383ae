"""What every test shares: one thread, a fresh Dynamo, and CUDA tests skipped where there is no CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Forget compiled code after each test, so that none runs into Dynamo's limits because of others."""
    yield
    torch._dynamo.reset()
