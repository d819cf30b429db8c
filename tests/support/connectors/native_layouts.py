"""Runs tests of layouts with native code, and again without it."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from kvparams_connectors.transfer import layout_copy

__all__ = ["copying_code"]


@pytest.fixture(params=["native", "python"], scope="module", autouse=True)
def copying_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """Native code, where there is any, and then the Python code that it stands for."""
    native = layout_copy.NATIVE if request.param == "native" else None
    with patch.object(layout_copy, "NATIVE", native):
        yield
