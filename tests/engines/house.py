"""A whole daemon in front of an engine's URL, in this process, and a tokenizer that counts words."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, models, pre_tokenizers

from kvctl.core.outcomes import EngineState
from kvctl.core.status import GateStatus
from kvctl.daemon import Daemon
from kvctl.part_configs import engine_settings
from kvctl.settings.loading import load
from kvctl.tokens.foreign import Interpreter, http_post
from kvctl.tokens.load import load_counter
from tests.ports import free_port

PATIENCE_S = 120.0
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def words_tokenizer(folder: Path) -> Path:
    """Tokenizer files in which each word is a token, as the stand-ins count."""
    where = folder / "words"
    where.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "w": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return where


@dataclass
class Answered:
    """One whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class House:
    """A daemon that serves, and a client of it."""

    def __init__(self, daemon: Daemon, url: str, session: aiohttp.ClientSession) -> None:
        self.daemon, self.url, self._session = daemon, url, session

    @property
    def unit(self) -> Any:
        return next(iter(self.daemon.units.values()))

    @property
    def gate(self) -> GateStatus:
        status: GateStatus = self.unit.status()
        return status

    async def post(self, path: str, body: Any) -> Answered:
        async with self._session.post(self.url + path, json=body) as answer:
            return Answered(answer.status, answer.headers, await answer.read())

    async def get(self, path: str) -> Answered:
        async with self._session.get(self.url + path) as answer:
            return Answered(answer.status, answer.headers, await answer.read())

    async def until(self, condition: Callable[[GateStatus], bool]) -> GateStatus:
        """The first status for which the condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(status := self.gate):  # noqa: ASYNC110 - a status has no event
                await asyncio.sleep(0.01)
        return status

    async def settled(self) -> GateStatus:
        """Until the engine is up and described."""
        return await self.until(lambda s: s.state is EngineState.UP and bool(s.models) and s.capacity_known)

    async def empty(self) -> None:
        """Until nothing runs: then the ledger must be exactly zero."""
        status = await self.until(lambda status: status.leases == 0)
        assert (status.held_tokens, status.claimed_tokens) == (0, 0)


@contextlib.asynccontextmanager
async def house(folder: Path, engine_url: str, **given: str) -> AsyncIterator[House]:
    """Started and answering. ``given`` are settings without their prefix."""
    settings = load(
        None,
        {
            "KVCTL_ENGINE_URL": engine_url,
            "KVCTL_LISTEN": f"127.0.0.1:{free_port()}",
            "KVCTL_ADMIN_LISTEN": f"127.0.0.1:{free_port()}",
            "KVCTL_ADMIN_SOCKET": str(folder / "kvctl.sock"),
            "KVCTL_STATE_DIR": str(folder),
            "KVCTL_SCRAPE_INTERVAL": "50ms",
            "KVCTL_TICK_INTERVAL": "50ms",
            "KVCTL_DRAIN_TIMEOUT": "5s",
            "KVCTL_TTFT_TARGET": "none",
            "KVCTL_ITL_TARGET": "none",
            "KVCTL_GPUS": "none",
            **{f"KVCTL_{key}": value for key, value in given.items()},
        },
    )
    tokenizer = given.get("TOKENIZER") or str(await asyncio.to_thread(words_tokenizer, folder))
    async with aiohttp.ClientSession() as session:
        ask = Interpreter(http_post(session, engine_url)) if tokenizer == "engine" else None
        counter = await asyncio.to_thread(load_counter, tokenizer, ask=ask)
        daemon = Daemon(settings, {}, dict.fromkeys(engine_settings(settings), counter))
        try:
            async with daemon.running():
                yield House(daemon, f"http://{settings.listen}", session)
        finally:
            await counter.close()
