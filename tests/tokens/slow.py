"""A prompt that takes as long as a test wants."""

import threading
from collections.abc import Iterator


class Slow(list[str]):
    """Texts that nobody but the main thread gets to read before ``go`` is set."""

    def __init__(self, *texts: str) -> None:
        super().__init__(texts)
        self.go = threading.Event()

    def __iter__(self) -> Iterator[str]:
        if threading.current_thread() is not threading.main_thread():
            self.go.wait()
        return super().__iter__()
