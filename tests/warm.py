"""kvctl as a process of its own, started without its imports.

They cost half a second of CPU each time, and the tests start some three hundred daemons and commands. Here
one process for each process of pytest has them behind it; where a test starts kvctl or its simulated engine
in a usual way, a fork of that one goes on with the arguments, environment, folder and standard streams that
the test gave. It is a child of the test's process like any other: the fork is made by a process that dies at
once, and the kernel gives the orphan to the nearest ancestor that wants it. What is started in another way is
started as ever: kvctl's own children, a ``preexec_fn``, more descriptors, an environment that a program
looks at when it starts and never again.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

MAIN = "from kvctl.cli.main import main; main()"  # what the console script does
MODULES = ("kvctl", "kvctl.sim", "kvctl.cli.demo_daemon")  # that are run with -m
_ROOT = Path(__file__).parents[1]
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_SIZE = struct.Struct("<Q")
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "GLIBC_", "SSL_", "OPENSSL_")
_WAYS = frozenset({("-c", MAIN), *(("-m", name) for name in MODULES)})
_PLAIN = {"preexec_fn": None, "pass_fds": (), "shell": False, "start_new_session": False, "executable": None}


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen``, quicker where it is asked for kvctl."""

    def _execute_child(self, *given: Any) -> None:
        asked = _EXECUTE.bind(self, *given).arguments
        env = os.environ if asked["env"] is None else asked["env"]
        if not _usual(asked, env):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        wanted = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if each == -1 else each for own, each in enumerate(wanted)]
        words = [os.fspath(each) for each in asked["args"]]
        folder = os.fspath(asked["cwd"]) if asked["cwd"] is not None else os.getcwd()  # noqa: PTH109
        self.pid = _nursery.start(words[1:], dict(env), folder, streams)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]


def _usual(asked: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    words = asked["args"]
    if not isinstance(words, list | tuple) or list(words[:1]) != [sys.executable]:
        return False
    if any(asked.get(name, usual) != usual for name, usual in _PLAIN.items()):
        return False
    return tuple(words[1:3]) in _WAYS and _at_start(env) == _nursery.env


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    """What the interpreter and its libraries look at when they start, and never again."""
    return {key: text for key, text in env.items() if key.startswith(_AT_START)}


class _Nursery:
    """The process that has everything imported, from the first time that it is wanted."""

    def __init__(self) -> None:
        self._wire: socket.socket | None = None
        self._one_at_a_time = threading.Lock()

    @cached_property
    def env(self) -> dict[str, str]:
        """What it looked at when it started."""
        return _at_start(os.environ)

    def start(self, words: list[str], env: dict[str, str], folder: str, streams: list[int]) -> int:
        """The number of a new process, a child of this one."""
        with self._one_at_a_time:
            wire = self._wire = self._wire or self._opened()
            content = pickle.dumps((words, env, folder))
            socket.send_fds(wire, [_SIZE.pack(len(content))], streams)
            _adopt(yes=True)
            try:
                wire.sendall(content)
                (pid,) = _SIZE.unpack(_exactly(wire, _SIZE.size))
            finally:
                _adopt(yes=False)
        return int(pid)

    @staticmethod
    def _opened() -> socket.socket:
        ours, theirs = socket.socketpair()
        atexit.register(ours.close)
        with theirs:
            number = str(theirs.fileno())
            command = [sys.executable, "-m", "tests.warm", number]
            env = {key: text for key, text in os.environ.items() if not key.startswith("KVCTL_")}
            subprocess.Popen(
                command,
                cwd=_ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            ).returncode = 0  # it ends when this process does
        return ours


def _adopt(*, yes: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _exactly(wire: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = wire.recv(size - len(found))
        if not more:
            raise EOFError
        found += more
    return found


# --- the process that forks ---------------------------------------------------------------------------


def _import_all() -> None:
    from kvctl.cli.main import VERBS  # noqa: PLC0415

    for module in {"kvctl.daemon", "kvctl.sim.server", *(module for module, _, _ in VERBS.values())}:
        importlib.import_module(module)


def _serve(wire: socket.socket) -> list[str]:
    """Fork whenever the test's process asks; returns in the new process, with its arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: it is meant for pytest
    while True:
        size, streams, _, _ = socket.recv_fds(wire, _SIZE.size, 3)
        if not size:
            raise SystemExit
        words, env, folder = pickle.loads(_exactly(wire, *_SIZE.unpack(size)))  # noqa: S301 - of the parent
        pid = _forked_and_left()
        if not pid:
            wire.close()
            _become(env, folder, streams)
            return list(words)
        for each in streams:
            os.close(each)
        wire.sendall(_SIZE.pack(pid))


def _forked_and_left() -> int:
    """0 in a new process, which is left to who adopts it; its number here."""
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        os.close(reading)
        if pid := os.fork():
            os.write(writing, _SIZE.pack(pid))
            os._exit(0)
        os.close(writing)
        return 0
    os.close(writing)
    with open(reading, "rb") as told:  # noqa: PTH123 - a descriptor
        (pid,) = _SIZE.unpack(told.read())
    os.waitpid(between, 0)
    return int(pid)


def _become(env: dict[str, str], folder: str, streams: list[int]) -> None:
    """What exec would have made of this process."""
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        made = open(  # noqa: SIM115 - a descriptor, for as long as the process lives
            number,
            old.mode,
            encoding=old.encoding,
            errors=old.errors,
            buffering=1 if number == 2 or os.isatty(number) else -1,
            closefd=False,
        )
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


def _run(words: list[str]) -> None:
    """As ``python -c MAIN ...`` or ``python -m MODULE ...``."""
    sys.path[0] = "" if words[0] == "-c" else os.getcwd()  # noqa: PTH109
    sys.argv = [words[0], *words[2:]]
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})  # noqa: S102 - it is MAIN
    else:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)


_nursery = _Nursery()

if __name__ == "__main__":
    _import_all()
    gc.freeze()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
