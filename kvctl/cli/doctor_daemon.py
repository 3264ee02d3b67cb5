"""The daemon as ``kvctl doctor`` sees it, if it runs: its state, and what of its settings waits."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvctl.admin.client import AdminClient, ClientError, DeniedError, RefusedError, UnreachableError
from kvctl.cli.common import SOCKET_VARIABLE, usual_socket
from kvctl.cli.doctor_findings import Finding, failed, passed, warned
from kvctl.cli.reload import PENDING
from kvctl.core.outcomes import SERVING
from kvctl.part_configs import engine_settings
from kvctl.settings.loading import load
from kvctl.settings.model import SPECS, Settings
from kvctl.settings.types import HIDDEN
from kvctl.settings.usual import CONFIG_VARIABLE, socket_of

_BACK = {"draining": "kvctl undrain", "bypass": "kvctl resume"}  # from a mode
_NOTHING = Path("/dev/null")  # a settings file that says nothing


def running(client: AdminClient, settings: Settings) -> list[Finding]:
    """The daemon's state, if it runs, and what of its settings waits."""
    try:
        status = client.get("/v1/status")
    except UnreachableError as error:
        remedy = "systemctl start kvctl, or kvctl serve"
        return [warned("daemon", f"does not run, or elsewhere ({error})", remedy)]
    except ClientError as error:
        return [_mute(error)]
    return [_running(status, settings), *_in_force(client)]


def _mute(error: ClientError) -> Finding:
    """It is there, and does not answer this user, or nobody."""
    denied = isinstance(error, DeniedError)
    remedy = "sudo, or join the group" if denied else "see its log; restart it if it hangs"
    return warned("daemon", str(error), remedy)


def whose_settings(
    socket: Path | None, config: Path | None, env: Mapping[str, str], timeout: float
) -> list[Finding]:
    """Where these settings are bad and a daemon runs all the same: with which ones it does."""
    path = socket or _socket_by(config, env)
    try:
        given = AdminClient(path, timeout).get("/v1/config")["settings"]["engine_url"]["text"]
    except UnreachableError:
        return []
    except ClientError as error:
        return [_mute(error)]
    except (KeyError, TypeError):
        given = "?"
    where = "" if path == usual_socket() else f" --socket {shlex.quote(str(path))}"
    remedy = f"kvctl doctor --live{where} goes by its settings, kvctl show-config --live{where} shows them"
    return [warned("daemon", f"one runs all the same, in front of {given}", remedy)]


def _socket_by(config: Path | None, env: Mapping[str, str]) -> Path:
    if given := env.get(SOCKET_VARIABLE):
        return Path(given)
    return socket_of(env if config is None else {**env, CONFIG_VARIABLE: str(config)})


def settings_of(document: Mapping[str, Any], env: Mapping[str, str]) -> tuple[Settings, Finding]:
    """The settings that a daemon tells, with what is known of them here. Raises SettingsError.

    Secrets are not told: they are taken from the environment, where they are in it.
    """
    every = document["settings"].items()
    told = {key: each for key, each in every if each["origin"] != "default" or each["where"]}
    secret = {key for key in told if key in SPECS and SPECS[key].secret}
    given = {SPECS[key].variable: env[SPECS[key].variable] for key in secret if env.get(SPECS[key].variable)}
    flags = {key: each["text"] for key, each in told.items() if key not in secret}
    if "engines" in flags:
        flags["engines"] = _without_secrets(flags["engines"])
    settings = load(_NOTHING, given, flags)
    named = ", ".join(one.engine_url for one in engine_settings(settings).values())
    unknown = sorted(key for key in secret if SPECS[key].variable not in given)
    if HIDDEN in str(told.get("engines", {}).get("text", "")):
        unknown.append("engines")
    if not unknown:
        return settings, passed("settings", f"of the running daemon, for {named}")
    variables = ", ".join(SPECS[key].variable for key in unknown)
    text = f"of the running daemon, for {named}; its secrets are not told: {', '.join(unknown)}"
    return settings, warned("settings", text, f"where the engine asks for a key, give {variables}")


def _without_secrets(text: str) -> str:
    entries = json.loads(text)
    kept = [{key: value for key, value in each.items() if value != HIDDEN} for each in entries]
    return json.dumps(kept)


def _in_force(client: AdminClient) -> Iterator[Finding]:
    """Whether what the daemon would read now is what it runs with."""
    try:
        pending = client.get(PENDING)
    except RefusedError as error:
        if error.code == "bad_settings":
            text = f"a reload, and a start, would be refused: {' '.join(str(error).split())}"
            yield warned("in_force", text, "mend it: until then the daemon goes on with its older settings")
        return  # a daemon of before this check
    except ClientError as error:
        yield warned("in_force", str(error), "see what kvctl status says, and doctor again")
        return
    now, later = ([each["key"] for each in pending[what]] for what in ("applied", "needs_restart"))
    if not now and not later:
        yield passed("in_force", "the daemon runs with the settings that it would read now")
        return
    waits = [f"for a reload: {', '.join(now)}"] if now else []
    waits += [f"for a restart: {', '.join(later)}"] if later else []
    remedies = ["kvctl reload"] if now else []
    remedies += ["systemctl restart kvctl"] if later else []
    shown = "kvctl reload --dry-run shows old and new"
    yield warned("in_force", f"changed, and waits {'; '.join(waits)}", f"{', '.join(remedies)}; {shown}")


def _running(status: Mapping[str, Any], settings: Settings) -> Finding:
    sentence = str(status.get("sentence", ""))
    gates, named = status.get("engines", {}), engine_settings(settings)
    if missing := [name for name in named if name not in gates]:
        return warned(
            "daemon",
            f"gates {', '.join(gates)}, not {', '.join(missing)}",
            "restart it: settings are read at its start",
        )
    serving = {str(each) for each in SERVING}
    down = [name for name in named if gates[name].get("state") not in serving]
    if down:
        found = failed if len(down) == len(named) else warned
        return found("daemon", sentence, "see what it says of its engine: kvctl status")
    if status["mode"] != "active":
        return warned("daemon", f"{status['mode']}: {sentence}", _BACK.get(status["mode"], "kvctl status"))
    counting = status.get("counting", {})
    if wrong := [f"{name}: {each['doubted']}" for name, each in counting.items() if each["doubted"]]:
        text = f"does not use its tokenizer: {'; '.join(wrong)}"
        return warned("daemon", text, "set tokenizer to the folder of the model that the engine serves")
    known = [each["known_ratio"] for each in counting.values() if each["known_ratio"] is not None]
    share = f"; {min(known):.0%} of the text of prompts was counted before" if known else ""
    return passed("daemon", f"{sentence}{share}")
