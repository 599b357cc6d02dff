"""One streamed model and its reference for all tests; one engine at a time has the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from measured_once import measured_once
from serve_support import Alone, open_streaming
from tqdm import tqdm

# Its thread would start with the reference's progress bar and be left over.
tqdm.monitor_interval = 0


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> Iterator[None]:
    with measured_once():
        yield


@pytest.fixture(scope="session")
def alone() -> Alone:
    return Alone()


@pytest.fixture(scope="session")
def model() -> Iterator[Any]:
    opened = open_streaming()
    yield opened
    opened.offload.close()
