import os
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvctl.core.outcomes import Policy
from kvctl.settings import usual
from kvctl.settings.document import as_document
from kvctl.settings.errors import SettingsError
from kvctl.settings.loading import load
from kvctl.settings.model import SPECS, Layer, Settings
from kvctl.settings.reference import renewed
from kvctl.settings.surroundings import warnings
from kvctl.settings.units import Address
from kvctl.settings.usual import socket_of

URL = {"KVCTL_ENGINE_URL": "http://127.0.0.1:8000"}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "kvctl.toml"


def faults(config: Path | None = None, env: Mapping[str, str] = URL, **flags: object) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(config, env, flags)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def fault(config: Path | None = None, env: Mapping[str, str] = URL, **flags: object) -> str:
    (only,) = faults(config, env, **flags)
    return only


def test_one_variable_is_enough() -> None:
    settings = load(None, URL)
    assert settings.model_dump() == Settings(engine_url="http://127.0.0.1:8000").model_dump()
    assert settings.listen == Address("127.0.0.1", 8080)
    assert settings.origin("listen").layer is Layer.DEFAULT


def test_each_place_hides_the_one_before(config: Path, tmp_path: Path) -> None:
    secrets = tmp_path / "credentials"
    secrets.mkdir()
    places: list[tuple[Layer, float]] = []
    env = dict(URL)
    flags: dict[str, str] = {}

    def now() -> None:
        settings = load(config if config.exists() else None, env, flags)
        places.append((settings.origin("margin").layer, settings.margin))

    now()
    config.write_text("margin = 0.1")
    now()
    env["KVCTL_MARGIN"] = "20%"
    now()
    (secrets / "margin").write_text("30%\n")
    env["CREDENTIALS_DIRECTORY"] = str(secrets)
    now()
    flags["margin"] = "40%"
    now()
    assert places == [
        (Layer.DEFAULT, 0.05),
        (Layer.FILE, 0.1),
        (Layer.ENV, 0.2),
        (Layer.SECRET, 0.3),
        (Layer.FLAG, 0.4),
    ]


def test_every_key_by_file_environment_and_flag(config: Path) -> None:
    """What is shown can be written back everywhere, and is the same value."""
    expected = load(None, URL).model_dump()
    shown = {key: load(None, URL).shown(key) for key in SPECS}
    assert load(None, {SPECS[key].variable: text for key, text in shown.items()}).model_dump() == expected
    assert load(None, {}, shown).model_dump() == expected
    flat = [f'{key} = "{text}"' for key, text in shown.items() if "." not in key]
    config.write_text("\n".join([*flat, "[routes]", "pass = []", 'admin_pass = ""']))
    assert load(config, {}).model_dump() == expected


BOUNDS = [(key, *row) for key, spec in SPECS.items() for row in zip(spec.bounds, (-1, 1), strict=False)]


@pytest.mark.parametrize(("key", "bound", "side"), BOUNDS)
def test_every_bound_is_kept(key: str, bound: float, side: int) -> None:
    """A value at the bound may only be at odds with others."""
    step = max(1e-6, bound * 1e-6) if SPECS[key].form.name in ("duration", "ratio") else 1
    told = f"--{key.replace('_', '-')} = {bound + side * step!r} is "
    assert told in fault(None, URL, **{key: bound + side * step})
    try:
        load(None, URL, {key: bound})
    except SettingsError as error:
        assert "least allowed" not in str(error)  # noqa: PT017 - what is at odds is no matter here
        assert "most allowed" not in str(error)  # noqa: PT017


def test_native_toml_values(config: Path) -> None:
    config.write_text(
        """
        # comment
        engine_url = "http://127.0.0.1:8000/v1/"
        policy = 'static'
        "margin" = 0.08  # of one
        gpus = [0, "GPU-aa"]
        max_context = 8192
        access_log = true
        routes.pass = ["/v1/rerank"]
        routes.admin_pass = ["/sleep"]
        """
    )
    settings = load(config, {})
    assert settings.engine_url == "http://127.0.0.1:8000"
    assert settings.policy is Policy.STATIC
    assert (settings.margin, settings.gpus, settings.max_context) == (0.08, ("0", "GPU-aa"), 8192)
    assert settings.access_log
    assert (settings.routes_pass, settings.routes_admin_pass) == (("/v1/rerank",), ("/sleep",))
    assert settings.origin("margin").where == f"{config}:5"
    assert settings.origin("routes.pass").where == f"{config}:9"


def test_unknown_names_name_the_nearest(config: Path) -> None:
    config.write_text("\nmargn = 1\n[route]\npass = []\n[routes]\npas = []\n")
    env = URL | {"KVCTL_TICK_INTERVL": "1", "KVCTL_XYZZY": "1", "OTHER": "1"}
    assert faults(config, env, lisen="a") == [
        f"{config}:2: margn is not a setting; did you mean margin?",
        f"{config}:3: route is not a setting; did you mean routes.pass?",
        f"{config}:6: routes.pas is not a setting; did you mean routes.pass?",
        "environment: KVCTL_TICK_INTERVL is not a setting; did you mean KVCTL_TICK_INTERVAL?",
        f"environment: KVCTL_XYZZY is not a setting; see {usual.MANUAL} for the names",
        "command line: --lisen is not a setting; did you mean --listen?",
    ]


def test_dashes_and_capitals_are_named_too(config: Path) -> None:
    config.write_text("Engine-URL = 'http://h:1'\n")
    assert fault(config) == f"{config}:1: Engine-URL is not a setting; did you mean engine_url?"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "a = 1\nlisten = 127.0.0.1:80 # x",
            ':2: is not TOML: .*; text needs quotes: listen = "127.0.0.1:80"',
        ),
        ("margin = 5%", ':1: is not TOML: .*; text needs quotes: margin = "5%"'),
        ("[routes", ":1: is not TOML: "),
        ("margin = 1\nmargin = 2", ":2: .*is not TOML: Cannot overwrite"),
        ("margin = '''", ":1: .*is not TOML: "),
        ("margin = 1" + "0" * 9000, ":1: is not TOML: "),
        ("gpus = " + "[" * 9000, ":1: .*is not TOML: "),
    ],
)
def test_bad_toml_says_where_and_how(config: Path, content: str, expected: str) -> None:
    config.write_text(content)
    text = fault(config)
    assert text.startswith(str(config))
    with pytest.raises((ValueError, RecursionError)):
        tomllib.loads(content)
    assert re.search(expected, text), text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("margin = 'lots'", "margin = 'lots' is not a number; write a share such as 8% or 0.08"),
        ("margin = 1979-05-27", "is not a finite number; write a share"),
        ("margin = [1]", "margin = [1] is not a finite number"),
        ("tick_interval = 1" + "0" * 400, "is not a finite number"),
        ("max_context = 1" + "0" * 400, "is above the most allowed"),
        ("margin = 12", "margin = 12 is more than the whole: for 12 percent write 12%"),
        (
            "tick_interval = '1ms'",
            "tick_interval = '1ms' is below the least allowed, 10ms; write a time such as 200ms",
        ),
        ("policy = 'fast'", "policy = 'fast' does not fit; write forecast, static or none"),
        ("overload_status = 500", "overload_status = 500 does not fit; write 429, 503 or 529"),
        ("max_context = 0", "max_context = 0 is below the least allowed, 1"),
        ("access_log = 'maybe'", "access_log = 'maybe' does not fit; write true or false"),
        ("listen = '::1:80'", "is not host:port; write host:port, [::1]:port or :port"),
        ("[margin]\nx = 1", "is not a finite number"),
    ],
)
def test_bad_values_say_what_to_write(config: Path, content: str, expected: str) -> None:
    config.write_text(content)
    text = fault(config)
    assert text.startswith(f"{config}:1: ")
    assert expected in text


@pytest.mark.parametrize("given", ["30   # note", "$HOME/x", "${HOME}", "", '""'])
def test_what_env_files_get_wrong(given: str) -> None:
    """F08: inline comments, $HOME and empty values are named with variable and text."""
    text = fault(env=URL | {"KVCTL_TOKENIZER": given})
    assert text.startswith(f"environment: KVCTL_TOKENIZER = {given.strip(chr(34))!r} ")


@pytest.mark.parametrize("given", ['"0.15"', "'15%'", " 0.15 ", '" 15% "'])
def test_quotes_that_docker_leaves_in(given: str) -> None:
    """F09: quotes that docker leaves around a value are taken off."""
    assert load(None, URL | {"KVCTL_MARGIN": given}).margin == pytest.approx(0.15)


@pytest.mark.parametrize("given", ['"0.15', "0.15'", "0,15"])
def test_halves_of_quotes_are_refused(given: str) -> None:
    """F09: half a pair of quotes is refused, not guessed."""
    assert fault(env=URL | {"KVCTL_MARGIN": given}).startswith(f"environment: KVCTL_MARGIN = {given!r} ")


def test_lists_may_be_empty_in_the_environment() -> None:
    assert load(None, URL | {"KVCTL_ROUTES_PASS": "", "KVCTL_BASE_PATH": ""}).routes_pass == ()


def test_files_that_cannot_be_read(config: Path, tmp_path: Path) -> None:
    assert fault(config) == f"{config}: cannot be read: No such file or directory"
    assert "Is a directory" in fault(tmp_path)
    config.write_bytes(b"margin = '\xff'")
    assert "can't decode byte 0xff in position 10" in fault(config)
    assert "No such file" in fault(env=URL | {"KVCTL_CONFIG": "/nowhere/kvctl.toml"})


def test_a_file_may_be_a_pipe(config: Path) -> None:
    os.mkfifo(config)
    writer = threading.Thread(target=config.write_text, args=("margin = '7%'",))
    writer.start()
    assert load(config, URL).margin == pytest.approx(0.07)
    writer.join()


AS_SOMEBODY = """
import os, pathlib, sys
from kvctl.settings.errors import SettingsError
from kvctl.settings.loading import load
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    load(pathlib.Path(sys.argv[1]), {})
except SettingsError as error:
    print(error)
"""


def test_a_file_that_is_not_for_us() -> None:
    """F10: a configuration that only root may read is one error, with the remedy."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        config = Path(folder) / "kvctl.toml"
        config.touch(0o000)
        arguments = [sys.executable, "-c", AS_SOMEBODY, str(config)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    remedy = "kvctl's user must be able to read it: chgrp kvctl, chmod 640, say"
    assert done.stdout == f"{config}: cannot be read: Permission denied; {remedy}\n"


def test_the_variable_names_the_file(config: Path) -> None:
    config.write_text("margin = '7%'")
    assert load(None, URL | {"KVCTL_CONFIG": str(config)}).margin == pytest.approx(0.07)


def test_credentials(tmp_path: Path) -> None:
    env = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    (tmp_path / "engine_url").write_text("http://10.0.0.7:8000\n")
    (tmp_path / "tls.pem").write_text("somebody else's")
    settings = load(None, env)
    assert settings.engine_url == "http://10.0.0.7:8000"
    assert settings.origin("engine_url").layer is Layer.SECRET
    (tmp_path / "engin_url").write_text("x")
    (tmp_path / "listen").mkdir()
    assert faults(env=env) == [
        f'credential: attempted to load secret file "{tmp_path}/listen" but found a directory instead.',
        "credential: engin_url is not a setting; did you mean engine_url?",
    ]


def test_the_engine_must_be_named() -> None:
    assert fault(env={}) == (
        "settings: engine_url is not set; "
        "set KVCTL_ENGINE_URL=http://127.0.0.1:8000, say, or engine_url in the file"
    )


@pytest.mark.parametrize(
    ("env", "key", "text"),
    [
        ({"MARGIN": "60%"}, "margin", "margin_min and margin_max allow 0% to 50%"),
        ({"MARGIN_MIN": "30%", "MARGIN_MAX": "20%"}, "margin_min", "above margin_max"),
        ({"STALE_AFTER": "300ms"}, "stale_after", "at least twice scrape_interval (200ms)"),
        ({"STALL_TIMEOUT": "300ms"}, "stall_timeout", "at least twice scrape_interval"),
        ({"TICK_INTERVAL": "10s", "STALE_AFTER": "5s"}, "tick_interval", "longer than stale_after"),
        ({"MAX_BODY_BYTES": "2GiB"}, "max_body_bytes", "max_body_bytes_total (512MiB)"),
        ({"CAPACITY_FORCE": "yes"}, "capacity_force", "set capacity_tokens too"),
        ({"LISTEN": ":9109"}, "admin_listen", "choose another port"),
        ({"ENGINE_URL": "http://localhost:8080/v1"}, "engine_url", "kvctl's own listen address"),
        ({"ENGINE_URL": "http://127.0.0.1:9109"}, "engine_url", "kvctl's own admin_listen address"),
        (
            {"ENGINE_URL": "http://127.0.0.1", "LISTEN": "0.0.0.0:80"},
            "engine_url",
            "kvctl's own listen address",
        ),
    ],
)
def test_what_must_hold_between_settings(env: dict[str, str], key: str, text: str) -> None:
    shown = fault(env=URL | {f"KVCTL_{name}": value for name, value in env.items()})
    assert f": {key} is " in shown
    assert text in shown


def test_neighbours_that_are_fine() -> None:
    load(None, {"KVCTL_ENGINE_URL": "http://gpu-7:8080"})
    load(None, URL | {"KVCTL_LISTEN": "127.0.0.2:9109"})
    load(None, URL | {"KVCTL_LISTEN": ":0", "KVCTL_ADMIN_LISTEN": ":0"})
    load(None, URL | {"KVCTL_MARGIN": "80%", "KVCTL_MARGIN_MAX": "90%"})


def test_every_fault_is_told_at_once(config: Path) -> None:
    config.write_text("margin = 'x'\npolicy = 'y'\n")
    assert len(faults(config, {"KVCTL_LISTEN": "z", "KVCTL_GPUS": "first"})) == 4


def test_a_hidden_bad_value_is_bad_all_the_same(config: Path) -> None:
    config.write_text("margin = 'x'\n")
    assert str(config) in fault(config, margin="8%")


def test_commands_find_the_socket(config: Path) -> None:
    env = {"KVCTL_CONFIG": str(config)}
    usual = Path("/run/kvctl/kvctl.sock")
    assert socket_of(env) == usual
    config.write_text("admin_socket = '/run/other.sock'")
    assert socket_of(env) == Path("/run/other.sock")
    for bad in ("admin_socket = ''", "admin_socket = [", "\0"):
        config.write_text(bad)
        assert socket_of(env) == usual


def test_warnings_of_this_machine(tmp_path: Path) -> None:
    given = {"state_dir": str(tmp_path / "state"), "admin_socket": str(tmp_path / "s" / "kvctl.sock")}
    assert list(warnings(load(None, URL, given))) == []
    (tmp_path / "file").touch()
    bad = {
        "state_dir": str(tmp_path / "file"),
        "admin_socket": str(tmp_path / "file" / "s"),
    }
    assert [text.split()[0] for text in warnings(load(None, URL, bad))] == [
        "state_dir",
        "admin_socket",
    ]


def test_the_document_says_where_from() -> None:
    shown = as_document(load(None, URL, {"max_context": "8192"}))["settings"]
    assert set(shown) == set(SPECS)
    assert shown["engine_url"]["origin"] == "env"
    assert shown["max_context"] == {
        "value": 8192,
        "text": "8192",
        "origin": "flag",
        "where": "--max-context",
        "live": True,
    }
    gpus = {"value": ["all"], "text": "all", "origin": "default", "where": "", "live": False}
    assert shown["gpus"] == gpus


def test_the_documentation_is_of_this_version() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert renewed(page) == page
    assert all(f"| `{key}` |" in page for key in SPECS)


def test_the_contract_of_names() -> None:
    assert {spec.variable for spec in SPECS.values()} >= {
        "KVCTL_ENGINE_URL",
        "KVCTL_LISTEN",
        "KVCTL_ADMIN_LISTEN",
        "KVCTL_ADMIN_SOCKET",
        "KVCTL_STATE_DIR",
        "KVCTL_MARGIN",
        "KVCTL_POLICY",
        "KVCTL_TOKENIZER",
        "KVCTL_ROUTES_PASS",
        "KVCTL_ROUTES_ADMIN_PASS",
    }
    assert len({spec.flag for spec in SPECS.values()}) == len(SPECS)


def test_an_ordinary_user_needs_no_folder_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file is a folder that nobody can write to, root included.
    (tmp_path / "file").touch()
    service = tmp_path / "file" / "kvctl.sock"
    monkeypatch.setattr(usual, "ADMIN_SOCKET", service)
    monkeypatch.setattr(usual, "STATE_DIR", tmp_path / "file" / "state")
    env = {**URL, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "XDG_STATE_HOME": str(tmp_path / "state")}
    settings = load(None, env)
    assert settings.admin_socket == tmp_path / "run" / "kvctl" / "kvctl.sock"
    assert settings.state_dir == tmp_path / "state" / "kvctl"
    assert settings.origin("admin_socket").layer is Layer.DEFAULT
    assert socket_of(env) == service
    settings.admin_socket.parent.mkdir(parents=True)
    settings.admin_socket.touch()
    assert socket_of(env) == settings.admin_socket
    assert load(None, {**env, "KVCTL_ADMIN_SOCKET": "/x/y.sock"}).admin_socket == Path("/x/y.sock")
