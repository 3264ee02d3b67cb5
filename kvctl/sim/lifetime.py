"""When a process of ours is to end: at a signal, or with whoever started it."""

import asyncio
import signal
import sys


def stop_event(*, with_stdin: bool) -> asyncio.Event:
    """Set at TERM or INT; ``with_stdin``: also when standard input ends, as it does when its writer dies.

    Call it on the running loop, with a pipe as standard input.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    if with_stdin:
        source = sys.stdin.fileno()

        def ended() -> None:
            loop.remove_reader(source)
            stop.set()

        loop.add_reader(source, ended)
    return stop
