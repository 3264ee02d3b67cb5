"""Settings read again while kvctl runs: everything is judged first, and a bad file changes nothing.

Law 6: nothing slow on the loop: files are read in a thread.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from kvctl import logs
from kvctl.admin.port import LastReload, Moved, Reloaded
from kvctl.settings.checks import disagreements
from kvctl.settings.errors import SettingsError
from kvctl.settings.model import SPECS, Settings, Spec

log = logs.get("settings")

Read = Callable[[], Settings]


class Reloader:
    """The owner of the settings in force."""

    def __init__(self, settings: Settings, read: Read | None, apply: Callable[[Settings], None]) -> None:
        """``read`` loads them as the start did (None: they came from no place that can be read again)."""
        self.settings = settings
        self.last = LastReload()
        self._read = read
        self._apply = apply
        self._keys = _digest(settings.api_keys_file)
        self._one = asyncio.Lock()

    async def reload(self) -> Reloaded:
        """Read, judge, put in force. Raises SettingsError, with the old settings kept."""
        async with self._one:
            try:
                self.settings, done = await asyncio.to_thread(self._judged)
                self._apply(self.settings)
            except SettingsError as error:
                self.last = LastReload(revision=self.last.revision, problems=error.problems)
                sentence = f"the settings were not reloaded, the old ones stay: {'; '.join(error.problems)}"
                logs.event(log, logging.ERROR, "reload_failed", sentence, problems=len(error.problems))
                raise
            self.last = LastReload(revision=done.revision)
            logs.event(log, logging.INFO, "reloaded", sentence_of(done), revision=done.revision)
            return done

    async def pending(self) -> Reloaded:
        """What a reload would do now. Changes nothing. Raises SettingsError."""
        async with self._one:
            return (await asyncio.to_thread(self._judged))[1]

    def _judged(self) -> tuple[Settings, Reloaded]:
        """The settings as a reload would leave them, and what is new in them. Reads files."""
        if self._read is None:
            raise SettingsError(["this daemon was not started from settings that can be read again"])
        old, fresh = self.settings, self._read()
        changed = [s for s in SPECS.values() if getattr(old, s.attribute) != getattr(fresh, s.attribute)]
        live = [spec for spec in changed if spec.live]
        merged = old.adopt(fresh, [spec.key for spec in live])
        if problems := [f"settings: {key} {text}" for key, text in disagreements(merged)]:
            told = (each.format_map(merged.model_dump(mode="json")) for each in problems)
            raise SettingsError(f"{each} (until a restart)" for each in told)
        waiting = [_moved(spec, old, fresh) for spec in changed if not spec.live]
        if fresh.api_keys_file == old.api_keys_file and _digest(old.api_keys_file) != self._keys:
            waiting.append(Moved(key="api_keys_file", old="as it was at the start", new="as it is now"))
        return merged, Reloaded(
            revision=self.last.revision + bool(live),
            applied=tuple(_moved(spec, old, fresh) for spec in live),
            needs_restart=tuple(waiting),
        )


def _digest(path: Path | None) -> bytes | None:
    """Of the file's content; None: there is none that can be read."""
    try:
        return None if path is None else hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None


def _moved(spec: Spec, old: Settings, new: Settings) -> Moved:
    return Moved(key=spec.key, old=old.shown(spec.key), new=new.shown(spec.key))


def sentence_of(done: Reloaded) -> str:
    """What a reload did, in words."""
    applied = ", ".join(f"{each.key} {each.old} -> {each.new}" for each in done.applied)
    waiting = ", ".join(each.key for each in done.needs_restart)
    parts = [f"in force now: {applied}" if applied else "nothing that a reload can change has changed"]
    if waiting:
        parts.append(f"waits for a restart: {waiting}")
    return "settings reloaded; " + "; ".join(parts)
