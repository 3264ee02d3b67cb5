"""What README and docs tell people to type is what the programs understand."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from grafana import generate
from kvctl.cli.main import VERBS, cli
from kvctl.settings.loading import load

ROOT = Path(generate.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?ms)^ *```(\w*)\n(.*?)^ *```$")
_INLINE = re.compile(r"`(kvctl [a-z][^`]*)`")


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, (language, text) in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8"))):
            if language == kind:
                yield f"{page.relative_to(ROOT)}:{number}", text


def commands() -> Iterator[tuple[str, str]]:
    """Every kvctl command line, in blocks and within sentences."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, block in _BLOCK.findall(text):
            joined = block.replace("\\\n", " ")
            if language == "sh":
                for line in joined.splitlines():
                    if found := re.search(r"^(?:[A-Z_]+=\S+ )*(?:\S*/)?(kvctl [a-z].*?)(?: \||$| +#)", line):
                        yield str(page.relative_to(ROOT)), found.group(1)
        for line in _INLINE.findall(_BLOCK.sub("", text)):
            yield str(page.relative_to(ROOT)), line


TOML, SHELL, TYPED = list(blocks("toml")), list(blocks("sh")), sorted(set(commands()))


def test_there_is_something_to_look_at() -> None:
    assert TOML
    assert SHELL
    assert len(TYPED) > 20


@pytest.mark.parametrize(("place", "text"), TOML, ids=[place for place, _ in TOML])
def test_settings_load(place: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "kvctl.toml"
    whole = text if re.search(r"(?m)^(engine_url|\[+engines)", text) else f'engine_url = "http://e:1"\n{text}'
    file.write_text(whole)
    assert load(file, {}).engine_url, place


@pytest.mark.parametrize(("place", "text"), SHELL, ids=[place for place, _ in SHELL])
def test_shell_parses(place: str, text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), place


@pytest.mark.parametrize(("page", "line"), TYPED)
def test_commands_are_understood(page: str, line: str) -> None:
    """Verb, options and arguments, as click reads them; nothing is run."""
    verb, *rest = shlex.split(line.removeprefix("kvctl ").split(" && ")[0])
    if verb not in VERBS:
        pytest.fail(f"{page}: kvctl has no verb {verb}")
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    if "..." in line or not rest:
        return
    with click.Context(command, info_name=verb, resilient_parsing=True) as context:
        command.parse_args(context, rest)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_yaml_of_the_docs_is_read_by_promtool(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    text = next(text for _, text in blocks("yaml") if "scrape_configs:" in text)
    share = ROOT / "grafana" / "prometheus"
    (tmp_path / "prometheus.yml").write_text(text.replace("/usr/share/kvctl/prometheus", str(share)))
    done = subprocess.run(
        ["promtool", "check", "config", tmp_path / "prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
