"""Adding an engine takes one module: here one serves through the real daemon."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvctl import unit
from tests.engines import toy
from tests.engines.house import house
from tests.engines.standins.core import Standin, read

MOST_LINES = 150


class ToyStandin(Standin):
    """Its server."""

    name = "toy"

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/complete", self._complete)
        app.router.add_get("/stats", self._stats)
        app.router.add_get("/about", self._about)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await read(request, self.bodies)
        run = await self.whole(body["prompt_tokens"], body["max_new_tokens"])
        return web.json_response({"made": run.made})

    async def _stats(self, _request: web.Request) -> web.Response:
        rows: dict[str, Any] = {
            "pool_tokens": self.capacity,
            "pool_used_ratio": self.used / self.capacity,
            "active": len(self.running),
            "queued": len(self.waiting),
            "tokens_out_total": self.output_total,
        }
        return web.Response(text="".join(f"toy_{name} {value}\n" for name, value in rows.items()))

    async def _about(self, _request: web.Request) -> web.Response:
        return web.json_response({"model": "toy-1", "longest": self.context})


def test_it_is_one_short_module() -> None:
    assert len(inspect.getsource(toy).splitlines()) < MOST_LINES


async def test_it_serves_through_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "engine_of", lambda _setting: toy.Toy())
    engine = ToyStandin(capacity=10_000, context=4_000)
    async with engine.serving() as url, house(tmp_path, url, TOKENIZER="bound") as it:
        status = await it.settled()
        assert (status.capacity_tokens, status.context_tokens, status.models) == (10_000, 4_000, ("toy-1",))
        answer = await it.post("/complete", {"prompt_tokens": 100, "max_new_tokens": 20})
        assert (answer.status, answer.json) == (200, {"made": 20})
        never = await it.post("/complete", {"prompt_tokens": 4_000, "max_new_tokens": 20})
        assert never.status == 400
        assert (await it.get("/stats")).status == 200
        assert (await it.post("/v1/completions", {"prompt": "x"})).status == 404
        await it.empty()
