"""What is wrong with settings is told without the secrets in them: it is logged, and shown by status."""

import pytest

from kvctl.settings.errors import SettingsError
from kvctl.settings.loading import load


@pytest.mark.parametrize(
    ("env", "kept"),
    [
        ({"KVCTL_ENGINE_URL": "http://user:sekret@127.0.0.1:1"}, "'http://***@127.0.0.1:1'"),
        ({"KVCTL_ENGINE_URL": "http://127.0.0.1:1/?api_key=sekret&x=1"}, "/?api_key=***&x=1'"),
        ({"KVCTL_ENGINE_URL": "http://127.0.0.1:1/?Token=sekret"}, "?Token=***'"),
        (
            {"KVCTL_ENGINE_URL": "http://h", "KVCTL_ENGINE_API_KEY": "sekret\n2"},
            "KVCTL_ENGINE_API_KEY = ********",
        ),
        (
            {"KVCTL_ENGINE_URL": "http://h", "KVCTL_TENANTS": '[{"name": "a", "keys": ["sekret"]}]'},
            '"keys": ***',
        ),
        (
            {"KVCTL_ENGINES": '[{"name": "a", "url": "ftp://u:sekret@h", "api_key": "sekret"}]'},
            "'ftp://***@h'",
        ),
    ],
)
def test_no_secret_is_in_what_is_said(env: dict[str, str], kept: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(None, env)
    assert "sekret" not in str(caught.value)
    assert kept in str(caught.value)


def test_what_is_no_secret_stays() -> None:
    said = "engine 'a': url = 'http://h:1/p?x=2' and tokenizer = 'key', keys must be digests"
    assert SettingsError([said]).problems == (said,)
