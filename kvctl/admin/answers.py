"""How the admin listeners answer: errors as one JSON object, bodies and headers read with suspicion."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from aiohttp import web

from kvctl.admin.peers import Actor, credentials, user_name
from kvctl.control.hub import TooManyError
from kvctl.core.overrides import OverrideError, Refusal
from kvctl.settings.errors import SettingsError

BODY_MAX = 64 * 2**10
NAME_DEADLINE_S = 2.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {Refusal.UNKNOWN_KNOB: 404, Refusal.NOT_SET: 404, Refusal.STALE_REVISION: 412}
_WORD = {404: "not_found", 413: "too_large"}  # of aiohttp's own answers


class ApiError(Exception):
    """An answer that is no success: status, a word of a closed set, and a sentence."""

    def __init__(self, status: int, word: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.word = word


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as the same JSON object."""
    try:
        return await handler(request)
    except OverrideError as error:
        return _error(_STATUS.get(error.refusal, 422), error.refusal.value, str(error))
    except SettingsError as error:
        return _error(422, "bad_settings", str(error))
    except TooManyError as error:
        return _error(503, "too_many", str(error))
    except ApiError as error:
        return _error(error.status, error.word, str(error))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _error(405, "method_not_allowed", f"{request.path} knows {allowed}", {"Allow": allowed})
    except web.HTTPException as error:
        word = _WORD.get(error.status, "bad_request")
        return _error(error.status, word, f"{request.path}: {error.reason}")


def _error(status: int, word: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"code": word, "message": message}}, status=status, headers=headers)


class Turns:
    """One request at a time, and a pause of ``gap_s`` between two.

    However many callers there are, the admin API takes a small share of the loop, and the data plane never
    waits for more than one of its answers.
    """

    def __init__(self, gap_s: float = 0.01) -> None:
        self._gap_s = gap_s
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait for a turn."""
        async with self._turn:
            await asyncio.sleep(self._gap_s)

    def middleware(self, but: AbstractSet[str] = frozenset()) -> Any:
        """For an application: every request waits for its turn before its handler, ``but`` on these paths."""

        @web.middleware
        async def in_turn(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path not in but:
                await self.take()
            return await handler(request)

        return in_turn


class SharedPage:
    """What costs the loop more than a turn may: made once for all who asked before it was begun.

    It is made in parts, and every ``SLICE_S`` the loop does what else there is. After it the data plane has
    ``REST`` times as long before it is made again, but nobody waits longer than ``MOST_REST_S`` for that.
    Nobody gets what was made before they asked.
    """

    REST, MOST_REST_S = 200.0, 0.3
    SLICE_S = 0.0003

    def __init__(self, make: Callable[[], tuple[Iterable[bytes], str]]) -> None:
        """``make`` gives the parts of a page and its content type."""
        self._make = make
        self._one = asyncio.Lock()
        self._made: tuple[float, tuple[bytes, str]] | None = None
        self._not_before = 0.0

    async def get(self) -> tuple[bytes, str]:
        """Made after this was called."""
        asked = time.perf_counter()
        async with self._one:
            if self._made is not None and self._made[0] > asked:
                return self._made[1]
            await asyncio.sleep(max(self._not_before - time.perf_counter(), 0.0))
            began = time.perf_counter()
            page, cost = await self._in_slices()
            self._made = began, page
            self._not_before = time.perf_counter() + min(cost * self.REST, self.MOST_REST_S)
            return page

    async def _in_slices(self) -> tuple[tuple[bytes, str], float]:
        """The page, and the seconds of CPU that it took: a machine that stands still costs nothing."""
        parts, content_type = self._make()
        made, cost, since = [], 0.0, time.thread_time()
        for part in parts:
            made.append(part)
            if (taken := time.thread_time() - since) > self.SLICE_S:
                cost += taken
                await asyncio.sleep(0)
                since = time.thread_time()
        cost += time.thread_time() - since
        return (b"".join(made), content_type), cost


class Callers:
    """Who asks, by the kernel's word."""

    def __init__(self) -> None:
        self._names = ThreadPoolExecutor(1, "kvctl-names")

    def close(self) -> None:
        """Let the thread go."""
        self._names.shutdown(wait=False)

    async def of(self, request: web.Request) -> Actor:
        """The name may come from a directory service, which is not waited for for long."""
        if request.transport is None:
            raise ApiError(400, "gone", "the caller is gone")
        pid, uid, gid = credentials(request.transport)
        looking = asyncio.get_running_loop().run_in_executor(self._names, user_name, uid)
        done, _ = await asyncio.wait([looking], timeout=NAME_DEADLINE_S)
        return Actor(uid=uid, gid=gid, pid=pid, user=looking.result() if done else str(uid))


def if_match(request: web.Request) -> int | None:
    """The revision that If-Match names; None: any will do. Raises ApiError."""
    given = request.headers.get("If-Match", "*").strip()
    if given == "*":
        return None
    try:
        return int(given.removeprefix('"').removesuffix('"'))
    except ValueError:
        raise ApiError(400, "bad_request", f"If-Match is {given!r}, not a revision") from None


async def body_of(request: web.Request, known: tuple[str, ...], *, needed: str = "") -> Mapping[str, Any]:
    """The JSON object of the body, empty where there is none and ``needed`` names no key. Raises ApiError."""
    raw = await _read(request)
    if not raw and not needed:
        return {}
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except ValueError as error:  # UnicodeDecodeError and RecursionError's kin included
        raise ApiError(400, "bad_request", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "bad_request", "the body is nested too deeply") from None
    names = ", ".join(known)
    if not isinstance(body, dict) or (needed and needed not in body):
        raise ApiError(422, "bad_request", f"the body is an object with {names}")
    if unknown := sorted(body.keys() - set(known)):
        raise ApiError(422, "bad_request", f"the body has {unknown[0]!r}; it knows {names}")
    return body


async def _read(request: web.Request) -> bytes:
    """The whole body; a caller who breaks off in its middle is no defect of ours."""
    try:
        return await request.read()
    except (OSError, web.RequestPayloadError) as error:
        raise ApiError(400, "bad_request", f"the body broke off: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def number(request: web.Request, name: str, default: int, most: int) -> int:
    """A whole number of the query, 0 to ``most``. Raises ApiError."""
    given = request.query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal()) or len(given) > 12 or int(given) > most:
        raise ApiError(400, "bad_request", f"{name} is {given!r:.50}; write a whole number up to {most}")
    return int(given)


def switch(request: web.Request, name: str) -> bool:
    """Whether a flag of the query is set: ``?name``, ``?name=1``, ``?name=true``. Raises ApiError."""
    given = request.query.get(name, "0").lower()
    if given in ("", "1", "true"):
        return True
    if given in ("0", "false"):
        return False
    raise ApiError(400, "bad_request", f"{name} is {given!r:.50}; write 0 or 1")
