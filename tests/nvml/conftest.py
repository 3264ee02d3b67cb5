import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.nvml.drill import Drill
from tests.nvml.fake_library import FakeCard, FakeLibrary, installed

Install = Callable[..., FakeLibrary]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def install() -> Iterator[Install]:
    """Put a library with the given cards behind the binding."""
    with ExitStack() as stack:

        def put(*cards: FakeCard) -> FakeLibrary:
            library = FakeLibrary(*cards)
            stack.enter_context(installed(library))
            return library

        yield put


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The log lines so far."""
    caplog.set_level(logging.INFO, logger="kvctl.gpu")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "kvctl.gpu"]


@pytest.fixture
def drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drill:
    """A driver in C for the processes that this one starts."""
    made = Drill(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made
