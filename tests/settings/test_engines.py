"""[[engines]]: read, refused with a word for each mistake, inherited, shown."""

from pathlib import Path

import pytest

from kvctl.part_configs import engine_settings
from kvctl.settings.document import as_document
from kvctl.settings.errors import SettingsError
from kvctl.settings.loading import load
from kvctl.settings.model import Settings

TWO = """
tokenizer = "bound"
margin = "10%"

[[engines]]
name = "a"
url = "http://127.0.0.1:8001/v1"
models = ["llama"]
aliases = { gpt-4o = "llama" }
gpus = [0]
margin = 0.2

[[engines]]
name = "b"
url = "http://127.0.0.1:8002"
capacity_tokens = 48000
"""


def read(folder: Path, text: str) -> Settings:
    file = folder / "kvctl.toml"
    file.write_text(text)
    return load(file, {})


def complaint(folder: Path, text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read(folder, text)
    return str(caught.value)


def test_what_an_engine_does_not_say_is_the_top_levels(tmp_path: Path) -> None:
    settings = read(tmp_path, TWO)
    a, b = engine_settings(settings).values()
    assert (a.engine_url, a.margin, a.gpus, a.tokenizer) == ("http://127.0.0.1:8001", 0.2, ("0",), "bound")
    assert (b.engine_url, b.margin, b.gpus, b.capacity_tokens) == (
        "http://127.0.0.1:8002",
        0.1,
        ("all",),
        48000,
    )
    assert list(engine_settings(settings)) == ["a", "b"]
    assert dict(settings.engines[0].aliases) == {"gpt-4o": "llama"}


def test_who_asks_for_one_engine_gets_the_first(tmp_path: Path) -> None:
    assert read(tmp_path, TWO).engine_url == "http://127.0.0.1:8001"


def test_one_engine_needs_no_table() -> None:
    settings = load(None, {"KVCTL_ENGINE_URL": "http://127.0.0.1:8000"})
    assert engine_settings(settings) == {"http://127.0.0.1:8000": settings}


def test_what_is_shown_reads_back(tmp_path: Path) -> None:
    settings = read(tmp_path, TWO)
    again = load(None, {"KVCTL_ENGINES": settings.shown("engines")})
    assert again.engines == settings.engines
    shown = as_document(settings)["settings"]["engines"]["value"]
    assert shown[0] == {
        "name": "a",
        "url": "http://127.0.0.1:8001",
        "models": ["llama"],
        "aliases": {"gpt-4o": "llama"},
        "gpus": "0",
        "margin": "20%",
    }


def test_inline_tables_from_the_environment() -> None:
    settings = load(None, {"KVCTL_ENGINES": '[{name = "a", url = "http://127.0.0.1:1"}]'})
    assert settings.engines[0].url == "http://127.0.0.1:1"


A, B = 'name = "a"\nurl = "http://h:1"', 'name = "b"\nurl = "http://h:2"'


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (A, A.replace("h:1", "h:2"), ["name 'a' 2 times"]),
        (A, B.replace("h:2", "h:1"), ["http://h:1", "a and b", "one gate"]),
        (A, "url = 'http://h:2'", ["entry 2", "name"]),
        (A, 'name = "b"', ["engine 'b'", "url is missing"]),
        (A, B + "\nlisten = ':1'", ["engine 'b'", "listen cannot be set for one engine", "capacity_tokens"]),
        (A, B + "\nmargin = 2", ["engine 'b'", "margin = 2", "more than the whole"]),
        (A, B + "\nmargin = 0.7", ["margin for b", "margin_max"]),
        (A, B + "\ncapacity_tokens = 0", ["engine 'b'", "capacity_tokens = 0", "least allowed"]),
        (A, B + "\ncapacity_force = true", ["capacity_force for b", "capacity_tokens"]),
        (A, B.replace("http:", "ftp:"), ["engine 'b'", "url", "scheme"]),
        (A, B + "\nmodels = 3", ["engine 'b'", "models = 3"]),
        (A, B + '\naliases = ["x"]', ["engine 'b'", "aliases"]),
        (A + '\nmodels = ["m"]', B + '\naliases = { m = "n" }', ["alias 'm' of b", "a serves"]),
        (A, B + '\nmodels = ["m"]\naliases = { x = "n" }', ["alias 'x' of b", "not among its models"]),
        (A, B + '\naliases = { m = "m" }', ["alias 'm' of b", "itself"]),
        (A, B.replace("http://h:2", "http://127.0.0.1:8080"), ["kvctl's own listen address"]),
    ],
)
def test_a_mistake_has_its_sentence(tmp_path: Path, first: str, second: str, words: list[str]) -> None:
    told = complaint(tmp_path, f"[[engines]]\n{first}\n[[engines]]\n{second}\n")
    assert "kvctl.toml:1: engines" in told
    for word in words:
        assert word in told


def test_an_engines_key_is_shown_nowhere(tmp_path: Path) -> None:
    settings = read(tmp_path, f'[[engines]]\n{A}\nengine_api_key = "s3cret"\n[[engines]]\n{B}\n')
    first, second = engine_settings(settings).values()
    assert first.engine_api_key is not None
    assert first.engine_api_key.get_secret_value() == "s3cret"
    assert second.engine_api_key is None
    assert "s3cret" not in settings.shown("engines") + repr(settings) + str(as_document(settings))
    told = complaint(tmp_path, f'[[engines]]\n{A}\nengine_api_key = "s3 cret"\n')
    assert "engine 'a'" in told
    assert "cret" not in told.replace("a secret", "")


def test_an_address_beside_the_tables(tmp_path: Path) -> None:
    told = complaint(tmp_path, f'engine_url = "http://h:9"\n[[engines]]\n{A}\n')
    assert "leave engine_url out" in told


def test_neither_address_nor_tables(tmp_path: Path) -> None:
    assert "engine_url is not set" in complaint(tmp_path, "")
