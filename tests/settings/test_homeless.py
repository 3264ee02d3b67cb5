"""Settings of a user who has no home."""

from pathlib import Path

import pytest

from kvctl.control.planning import plan_source
from kvctl.plan import PlanError
from kvctl.settings import usual
from kvctl.settings.loading import load
from kvctl.tokens.files import TokenizerError
from kvctl.tokens.load import load_counter


def homeless(*_: object) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as one that no file names: its state has no place of its own, and that is told."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(usual, "ADMIN_SOCKET", tmp_path / "file" / "kvctl.sock")
    monkeypatch.setattr(usual, "STATE_DIR", tmp_path / "file" / "state")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert "state_dir" not in usual.homely({})
    assert usual.homely({"XDG_STATE_HOME": "/x"})["state_dir"] == "/x/kvctl"
    url = {"KVCTL_ENGINE_URL": "http://127.0.0.1:8000"}
    assert load(None, url).admin_socket == usual.own_socket({})
    with pytest.raises(TokenizerError, match="this user has no home"):
        load_counter("~/model")
    with pytest.raises(PlanError, match="this user has no home"):
        plan_source(None, "~/model", "")


def test_a_home_that_is_no_whole_path_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(usual, "STATE_DIR", tmp_path / "file" / "state")
    monkeypatch.setenv("HOME", "somewhere")
    assert "state_dir" not in usual.homely({})
