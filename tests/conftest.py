"""How the suite is run.

* The whole suite runs in two workers for each core, four at most, a file to a worker: tests mostly wait. Who
  names a file, a folder, ``-n``, ``-m``, ``-s`` or ``--pdb`` gets one process; so does the live suite.
* Tests marked ``slow`` (real Prometheus, HAProxy and Envoy over real time, long replays) are left out and
  counted in the summary, unless ``-m`` is given or their file is named. ``pytest -m slow`` runs them alone.
* kvctl as a process of its own is started without its imports, see tests/warm.py.
* Tests on an event loop have one whose clock stands still while the process does, see tests/steady.py.
* Property tests draw the same few examples each time; ``--hypothesis-profile=thorough`` draws many, and
  others each time.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import warm
from tests.steady import SteadyLoop

MOST_WORKERS = 4
LEFT_OUT = "kvctl_slow_left_out"
# first to last; a worker that draws one of these at the very end would keep the other waiting
LONG = (
    "test_churn.py",
    "test_demo.py",
    "test_real.py",
    "test_drills.py",
    "test_page.py",
    "test_several_engines.py",
    "test_breaking.py",
    "test_commands.py",
    "test_night_shift.py",
    "test_tls.py",
    "test_replay_queue.py",
    "test_doctor.py",
    "test_background.py",
    "test_serve.py",
    "test_reload.py",
    "test_prometheus.py",
    "test_restart.py",
    "test_drain_kept.py",
    "test_page_several.py",
    "test_garbage.py",
    "test_through_the_daemon.py",
)

settings.register_profile("quick", max_examples=30, derandomize=True, deadline=None, database=None)
settings.register_profile("thorough", max_examples=500, deadline=None)
settings.load_profile("quick")

# Some hundred daemons and commands are started: each would compile the whole package anew, and import it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
subprocess.Popen = warm.Popen  # type: ignore[misc]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Before xdist looks at its options."""
    option = config.option
    if hasattr(config, "workerinput"):
        return
    alone = option.usepdb or option.capture == "no" or option.collectonly or option.markexpr or _named(config)
    if not alone and getattr(option, "numprocesses", 0) is None:
        option.numprocesses = min(2 * len(os.sched_getaffinity(0)), MOST_WORKERS)
        option.dist, option.loadscopereorder = "loadfile", False


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], SteadyLoop]]:
    """What stands still is the machine, and no caller or engine of a test."""
    return {"steady": SteadyLoop}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long files first; the slow tests out."""
    rank = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONG)))
    if config.option.markexpr:
        return
    named = {path for path in _named(config) if path.is_file()}
    slow = [item for item in items if item.get_closest_marker("slow") and item.path not in named]
    if slow:
        items[:] = [item for item in items if item not in set(slow)]
        config.hook.pytest_deselected(items=slow)
    _note(config, len(slow))


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not look at it ever again."""
    gc.collect()
    gc.freeze()


def _named(config: pytest.Config) -> set[Path]:
    """The files and folders that the command line asks for, if it is not the whole suite."""
    paths = (config.invocation_params.dir / argument.split("::")[0] for argument in config.args)
    return {path.resolve() for path in paths} - {Path(__file__).parent}


def _note(config: pytest.Config, count: int) -> None:
    """For the summary, which the workers of xdist do not print."""
    outputs: dict[str, Any] = getattr(config, "workeroutput", {})
    outputs[LEFT_OUT] = count
    config.stash[_LEFT] = max(count, config.stash.get(_LEFT, 0))


_LEFT = pytest.StashKey[int]()


class _Workers:
    """What the workers of xdist tell when they end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        _note(self._config, getattr(node, "workeroutput", {}).get(LEFT_OUT, 0))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Workers(config))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line where something was left out."""
    if count := config.stash.get(_LEFT, 0):
        terminalreporter.write_line(f"{count} slow tests left out: pytest -m slow")
