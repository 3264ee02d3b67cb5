"""What a reload would do, asked before it is done."""

from pathlib import Path

import pytest

from kvctl.admin.client import RefusedError
from kvctl.admin.reloading import Reloader
from kvctl.settings.loading import load
from tests.admin.conftest import Office


async def test_what_a_reload_would_do(office: Office, tmp_path: Path) -> None:
    """Reading it changes nothing, and leaves no line in the audit log."""
    office.stand.config = tmp_path / "kvctl.toml"
    office.stand.config.write_text("margin = '8%'\nlisten = '127.0.0.1:9999'\n")
    pending = await office.call("get", "/v1/config/pending")
    assert pending == {
        "revision": 2,
        "applied": [{"key": "margin", "old": "5%", "new": "8%"}],
        "needs_restart": [{"key": "listen", "old": "127.0.0.1:8080", "new": "127.0.0.1:9999"}],
    }
    assert office.stand.given.margin == 0.05
    office.stand.config.write_text("margn = 1\n")
    with pytest.raises(RefusedError, match="margn is not a setting"):
        await office.call("get", "/v1/config/pending")
    assert (await office.call("get", "/v1/status"))["config"] == {"revision": 1, "problems": []}
    assert not (office.state_dir / "audit.jsonl").exists()


async def test_keys_that_changed_in_their_file_wait_for_a_restart(tmp_path: Path) -> None:
    """One that was taken out still opens the door: a reload must not say that nothing has changed."""
    keys, config = tmp_path / "keys", tmp_path / "kvctl.toml"
    keys.write_text(f"{'a' * 64} team\n")
    config.write_text(f"engine_url = 'http://h:1'\napi_keys_file = '{keys}'\n")
    reloader = Reloader(load(config, {}), lambda: load(config, {}), lambda _: None)
    assert (await reloader.pending()).needs_restart == ()
    keys.write_text("")
    for done in (await reloader.pending(), await reloader.reload()):
        assert [each.key for each in done.needs_restart] == ["api_keys_file"]
    keys.unlink()
    assert [each.key for each in (await reloader.pending()).needs_restart] == ["api_keys_file"]
