"""Where settings come from: pydantic-settings' sources, and how people are told of each."""

import difflib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_settings import (
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
)
from pydantic_settings import SettingsError as SourceError

from kvctl.settings import toml
from kvctl.settings.model import ENV_PREFIX, SPECS, Layer, Origin, Settings
from kvctl.settings.usual import CONFIG_VARIABLE, homely

_QUOTED = re.compile(r"""(["'])(.*)\1""", re.DOTALL)
_SHELL = re.compile(r"\s#|\$\w|\$\{\w")
_NEAR = 0.8  # likeness from which a credential's name is a misspelt key and not another file


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A source, and what people call its keys; ``problems`` are those that the model does not see."""

    layer: Layer
    source: PydanticBaseSettingsSource
    name: Callable[[str], str] = str  # what a key is called there
    where: Callable[[str], str]  # what a problem with a key begins with
    strangers: Mapping[str, str] = field(default_factory=dict)  # what the library's source passes over
    problems: Iterable[str] = ()

    def state(self) -> dict[str, Any]:
        """The raw values by key, those of unknown keys too."""
        return {**self.source(), **self.strangers}

    def origin(self, key: str) -> Origin:
        """Where a value came from."""
        return Origin(self.layer, self.where(key) if self.layer is Layer.FILE else self.name(key))


def nearest(word: str, likeness: float = 0.6) -> str | None:
    """The key that looks most like ``word``."""
    near = difflib.get_close_matches(word.lower().replace("-", "_"), SPECS, n=1, cutoff=likeness)
    return near[0] if near else None


def from_home(env: Mapping[str, str]) -> Place:
    """Where an ordinary user's daemon keeps what the service keeps in places of its own."""
    return Place(
        layer=Layer.DEFAULT,
        source=InitSettingsSource(Settings, homely(env)),
        name=lambda _: "not run as the service",
        where=lambda _: "default",
    )


def from_file(path: Path, *, must_exist: bool) -> Place:
    """The TOML file at ``path``; one that is absent and need not exist holds nothing.

    Not the library's TOML source: that one passes over a file that is missing or may not be read.
    """
    document, text, problems = toml.read(path, must_exist=must_exist)
    return Place(
        layer=Layer.FILE,
        source=InitSettingsSource(Settings, document),
        where=lambda key: f"{path}:{toml.line_of(text, key)}",
        problems=problems,
    )


def from_environment(env: Mapping[str, str]) -> Place:
    """Every KVCTL_* variable."""
    known = {spec.variable: key for key, spec in SPECS.items()}
    given = {
        name: _unquoted(value)
        for name, value in env.items()
        if name.startswith(ENV_PREFIX) and name != CONFIG_VARIABLE
    }
    source = EnvSettingsSource(Settings, env_prefix="")
    source.env_vars = {known[name]: value for name, value in given.items() if name in known}
    return Place(
        layer=Layer.ENV,
        source=source,
        name=lambda key: ENV_PREFIX + key.upper().replace(".", "_"),
        where=lambda _: "environment",
        strangers={n.removeprefix(ENV_PREFIX).lower(): value for n, value in given.items() if n not in known},
        problems=[
            f"environment: {name} = {value!r} holds a comment or a variable: nothing expands it here"
            for name, value in given.items()
            if _SHELL.search(value) and not (name in known and SPECS[known[name]].secret)
        ],
    )


def _unquoted(given: str) -> str:
    """Without the quotes that ``docker --env-file`` leaves in and systemd and shells take away."""
    clean = given.strip()
    match = _QUOTED.fullmatch(clean)
    return match[2].strip() if match else clean


def from_credentials(folder: str | None) -> Place:
    """The files of systemd's folder that are named as a key; others belong to somebody else."""
    there = Path(folder) if folder and os.path.isdir(folder) else None  # noqa: PTH112 - raises nothing
    others = [each.name for each in there.iterdir() if each.name not in SPECS] if there else []
    state, problems = {}, []
    try:
        with warnings.catch_warnings(action="error"):
            state = SecretsSettingsSource(Settings, there, env_prefix="")()
    except SourceError as error:
        problems = [f"credential: {error.__cause__ or error}"]
    return Place(
        layer=Layer.SECRET,
        source=InitSettingsSource(Settings, state),
        where=lambda _: "credential",
        strangers={name: "" for name in sorted(others) if nearest(name, _NEAR)},
        problems=problems,
    )


def from_flags(flags: Mapping[str, object]) -> Place:
    """Flags by key; those that are None were not given."""
    return Place(
        layer=Layer.FLAG,
        source=InitSettingsSource(Settings, {key: raw for key, raw in flags.items() if raw is not None}),
        name=lambda key: "--" + key.replace("_", "-").replace(".", "-"),
        where=lambda _: "command line",
    )
