"""The wiring that no other test would miss."""

from pathlib import Path

from kvctl.daemon import Daemon
from kvctl.settings.loading import load
from kvctl.tokens.load import load_counter

ENGINE = "http://127.0.0.1:1"


async def test_a_request_that_is_sent_again_is_counted(tmp_path: Path) -> None:
    env = {"KVCTL_ENGINE_URL": ENGINE, "KVCTL_STATE_DIR": str(tmp_path)}
    daemon = Daemon(load(None, env), {}, {ENGINE: load_counter("bound")})
    daemon.units[ENGINE].upstream._on_retry()
    page, _ = daemon.metrics()
    assert 'kvctl_proxy_faults_total{fault="upstream_retried"} 1.0' in b"".join(page).decode()


async def test_the_sentence_is_of_now(tmp_path: Path) -> None:
    """Who drains and looks at once is told so, between two ticks too."""
    env = {"KVCTL_ENGINE_URL": ENGINE, "KVCTL_STATE_DIR": str(tmp_path)}
    daemon = Daemon(load(None, env), {}, {ENGINE: load_counter("bound")})
    assert "draining" not in daemon.status().sentence
    daemon.drain(draining=True)
    assert "draining" in daemon.status().sentence
