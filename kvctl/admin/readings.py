"""The GET side of the admin API: nothing here changes anything."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from kvctl.admin import documents
from kvctl.admin.answers import ApiError, OfNow, SharedPage, number, switch
from kvctl.admin.desk import Desk
from kvctl.admin.levels import LogLevels
from kvctl.admin.pace import Pace
from kvctl.admin.port import AdminPort, DaemonStatus
from kvctl.admin.stream import stream
from kvctl.admin.turns import ASKED_AT
from kvctl.control import decision_documents
from kvctl.control.journal import Journal
from kvctl.core.claim import Shape
from kvctl.core.hindsight import remedies
from kvctl.settings.document import as_document

USUAL_DECISIONS, MOST_DECISIONS = 100, 10_000
_SLICE = 20
MOST_TOKENS = 10**9


class Readings:
    """Handlers that answer with documents of the current state."""

    def __init__(self, port: AdminPort, desk: Desk, journal: Journal, levels: LogLevels, pace: Pace) -> None:
        self._port = port
        self._desk = desk
        self._journal = journal
        self._levels = levels
        self._pace = pace
        self._state = OfNow(port.status)
        self._page = SharedPage(port.metrics)

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            web.get("/v1/status", self._status),
            web.get("/v1/budget", self._budget),
            web.get("/v1/queue", self._queue),
            web.get("/v1/engines", self._engines),
            web.get("/v1/gpus", self._gpus),
            web.get("/v1/config", self._config),
            web.get("/v1/config/pending", self._pending),
            web.get("/v1/overrides", self._overrides),
            web.get("/v1/decisions", self._decisions),
            web.get("/v1/decisions/{id}", self._decision),
            web.get("/v1/outlook", self._outlook),
            web.get("/v1/events", self._events),
            web.get("/v1/loglevel", self._level),
            web.get("/v1/metrics", self._metrics),
        ]

    async def _of_now(
        self, request: web.Request, make: Callable[[DaemonStatus], documents.Document]
    ) -> web.Response:
        """A document of the current state; all who wait for the same document get the same one."""
        body = await self._state.body(
            request.path, lambda status: decision_documents.encoded(make(status)), request[ASKED_AT]
        )
        return web.Response(body=body, content_type="application/json")

    async def _status(self, request: web.Request) -> web.Response:
        return await self._of_now(request, self._everything)

    def _everything(self, status: DaemonStatus) -> documents.Document:
        shown = documents.status(status, self._desk.document())
        return shown | {"config": documents.plain(self._port.last_reload())}

    async def _budget(self, request: web.Request) -> web.Response:
        return await self._of_now(request, documents.budget)

    async def _queue(self, request: web.Request) -> web.Response:
        return await self._of_now(request, documents.queue)

    async def _engines(self, request: web.Request) -> web.Response:
        return await self._of_now(request, documents.engines)

    async def _gpus(self, request: web.Request) -> web.Response:
        return await self._of_now(request, documents.gpus)

    async def _config(self, _: web.Request) -> web.Response:
        return _json(as_document(self._port.settings()))

    async def _pending(self, _: web.Request) -> web.Response:
        return _json(documents.plain(await self._port.reload(dry_run=True)))

    async def _overrides(self, _: web.Request) -> web.Response:
        return with_revision(self._desk.document())

    async def _decisions(self, request: web.Request) -> web.Response:
        most = number(request, "limit", USUAL_DECISIONS, MOST_DECISIONS)
        stories = await self._journal.select(most, refused=switch(request, "refused"))
        shown: list[bytes] = []
        for at in range(0, len(stories), _SLICE):
            some = [self._journal.document(each) for each in stories[at : at + _SLICE]]
            shown.append(decision_documents.encoded(some)[1:-1])
            await asyncio.sleep(0)  # the rest in another turn
        around = {"remembered": len(self._journal.ring), "file": self._journal.file_document()}
        body = b'{"decisions":[%b],%b' % (b",".join(shown), decision_documents.encoded(around)[1:])
        return web.Response(body=body, content_type="application/json")

    async def _decision(self, request: web.Request) -> web.Response:
        asked = request.match_info["id"]
        found = self._journal.find(asked)
        if found is None:
            found = await self._journal.find_written(asked, self._pace.in_thread)
        if found is None:
            raise ApiError(404, "unknown_request", self._journal.missing(asked))
        return _json(found)

    async def _outlook(self, request: web.Request) -> web.Response:
        shape, now = _shape(request), self._journal.wall_time()
        found = self._port.outlook(shape)
        if not found:
            raise ApiError(404, "unknown_model", f"no engine serves {shape.model!r:.80}")
        shown = {
            name: decision_documents.decision(record, now) | {"remedies": remedies(record)}
            for name, record in found.items()
        }
        return _json({"engines": shown})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await stream(request, self._journal.hub)

    async def _level(self, _: web.Request) -> web.Response:
        return _json(self._levels.document())

    async def _metrics(self, request: web.Request) -> web.Response:
        page, content_type = await self._page.get(request[ASKED_AT])
        return web.Response(body=page, headers={"Content-Type": content_type})


def _shape(request: web.Request) -> Shape:
    """The hypothetical request of the query. Raises ApiError."""
    query = request.query
    if "prompt_tokens" not in query:
        raise ApiError(400, "bad_request", "prompt_tokens is needed: how long the prompt is")
    asked = number(request, "max_tokens", 0, MOST_TOKENS) if "max_tokens" in query else None
    n = number(request, "n", 1, 1024)
    if n < 1:
        raise ApiError(400, "bad_request", "n is 0; write 1 or more")
    return Shape(
        route=query.get("route", ""),
        model=query.get("model", ""),
        prompts=(number(request, "prompt_tokens", 0, MOST_TOKENS),),
        n=n,
        asked_output=asked,
        stream=switch(request, "stream"),
        tenant=query.get("tenant", ""),
    )


def _json(document: documents.Document) -> web.Response:
    return web.Response(body=decision_documents.encoded(document), content_type="application/json")


def with_revision(document: documents.Document) -> web.Response:
    """A document with its ``revision`` as ETag too."""
    return web.json_response(document, headers={"ETag": f'"{document["revision"]}"'})
