"""[[tenants]]: read from tables or text, refused with the place, shown as they might be written."""

import hashlib
import json

import pytest

from kvctl.settings.model import SPECS, Settings
from kvctl.settings.tenants import TenantEntry, clashes, read_tenants, show_tenants

KEY = hashlib.sha256(b"sk-1").hexdigest()
ENTRY = {
    "name": "team-a",
    "keys": [f"sha256:{KEY.upper()}"],
    "weight": 2,
    "priority": True,
    "requests_per_minute": 60,
}


def test_tables_and_text_read_alike_and_show_reads_back() -> None:
    read = read_tenants([ENTRY])
    assert isinstance(read, tuple)
    entry: TenantEntry = read[0]
    assert entry == TenantEntry(name="team-a", keys=(KEY,), weight=2.0, priority=True, requests_per_minute=60)
    assert read_tenants(json.dumps([ENTRY])) == (entry,)
    assert read_tenants(show_tenants((entry,))) == (entry,)
    assert (read_tenants(""), show_tenants(())) == ((), "")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "a b"}, "name must be"),
        ({"keys": ["sk-secret"]}, "SHA-256"),
        ({"keys": KEY}, "must be a list"),
        ({"weight": 0}, "weight must be"),
        ({"weight": True}, "weight must be"),
        ({"priority": "yes"}, "true or false"),
        ({"requests_per_minute": 0}, "at least 1"),
        ({"tokens_in_flight": 1.5}, "whole number"),
        ({"quota": 1}, "quota is not one of"),
    ],
)
def test_what_is_wrong_is_told_with_the_tenant(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        read_tenants([ENTRY | change])
    assert "tenant" in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_a_name_or_a_key_is_there_once() -> None:
    twice = (TenantEntry(name="a", keys=(KEY,)), TenantEntry(name="a"), TenantEntry(name="b", keys=(KEY,)))
    assert [problem.split()[0] for problem in clashes(twice)] == ["names", "gives"]


def test_the_settings_take_them() -> None:
    made = Settings(engine_url="http://127.0.0.1:8000", tenants=[ENTRY])  # type: ignore[arg-type]
    assert made.tenants[0].name == "team-a"
    assert read_tenants(SPECS["tenants"].show(made.tenants)) == made.tenants
