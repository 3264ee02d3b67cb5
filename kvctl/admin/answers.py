"""How the admin listeners answer: errors as one JSON object, bodies and headers strictly validated."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NoReturn, TypeVar

from aiohttp import web

from kvctl.admin.peers import Actor, credentials, user_name
from kvctl.control.hub import TooManyError
from kvctl.core.overrides import OverrideError, Refusal
from kvctl.settings.errors import SettingsError

S = TypeVar("S")

BODY_MAX = 64 * 2**10
NAME_DEADLINE_S = 2.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {Refusal.UNKNOWN_KNOB: 404, Refusal.NOT_SET: 404, Refusal.STALE_REVISION: 412}
_WORD = {404: "not_found", 413: "too_large"}  # of aiohttp's own answers


class ApiError(Exception):
    """An answer other than a success: status, a word of a closed set, and a sentence."""

    def __init__(self, status: int, word: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.word = word


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: every error becomes the same kind of JSON object."""
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


class OfNow(Generic[S]):
    """Documents of the current state, each made once for all callers who asked before the state was read.

    Nobody gets a state from before they asked.
    """

    def __init__(self, read: Callable[[], S]) -> None:
        """``read`` gives the state."""
        self._read = read
        self._read_at = float("-inf")
        self._state: S | None = None
        self._bodies: dict[str, bytes] = {}

    async def body(self, name: str, make: Callable[[S], bytes], asked_at: float) -> bytes:
        """What ``make`` returns for a state read after ``asked_at`` (by ``time.perf_counter``)."""
        state = self._state
        if state is None or self._read_at <= asked_at:
            self._read_at, self._state = time.perf_counter(), (state := self._read())
            self._bodies = {}
            await asyncio.sleep(0)  # the rest in another turn
        bodies = self._bodies if state is self._state else {}
        if name not in bodies:
            bodies[name] = make(state)
        return bodies[name]


class SharedPage:
    """A page that costs more than one turn may: made once for all callers who asked before it was begun.

    It is made in parts, with a wait for the next turn every ``SLICE_S``. Nobody gets a page begun before they
    asked.
    """

    SLICE_S = 0.0003

    def __init__(self, make: Callable[[], tuple[Iterable[bytes], str]]) -> None:
        """``make`` gives the parts of a page and its content type."""
        self._make = make
        self._one = asyncio.Lock()
        self._made: tuple[float, tuple[bytes, str]] | None = None

    async def get(self, asked_at: float) -> tuple[bytes, str]:
        """The page, begun after ``asked_at`` (by ``time.perf_counter``), and its content type."""
        async with self._one:
            if self._made is None or self._made[0] <= asked_at:
                self._made = time.perf_counter(), await self._in_slices()
            return self._made[1]

    async def _in_slices(self) -> tuple[bytes, str]:
        parts, content_type = self._make()
        made, since = [], time.thread_time()
        for part in parts:
            made.append(part)
            if time.thread_time() - since > self.SLICE_S:
                await asyncio.sleep(0)
                since = time.thread_time()
        return b"".join(made), content_type


class Callers:
    """Who asks, as the kernel says."""

    def __init__(self) -> None:
        self._names = ThreadPoolExecutor(1, "kvctl-names")

    def close(self) -> None:
        """Let the thread go."""
        self._names.shutdown(wait=False)

    async def of(self, request: web.Request) -> Actor:
        """The caller. The wait for its name, which may come from a directory service, is bounded."""
        if request.transport is None:
            raise ApiError(400, "gone", "the caller is gone")
        pid, uid, gid = credentials(request.transport)
        looking = asyncio.get_running_loop().run_in_executor(self._names, user_name, uid)
        done, _ = await asyncio.wait([looking], timeout=NAME_DEADLINE_S)
        return Actor(uid=uid, gid=gid, pid=pid, user=looking.result() if done else str(uid))


def if_match(request: web.Request) -> int | None:
    """The revision that If-Match names; None: no condition. Raises ApiError."""
    given = request.headers.get("If-Match", "*").strip()
    if given == "*":
        return None
    try:
        return int(given.removeprefix('"').removesuffix('"'))
    except ValueError:
        raise ApiError(400, "bad_request", f"If-Match is {given!r}, not a revision") from None


async def body_of(request: web.Request, known: tuple[str, ...], *, needed: str = "") -> Mapping[str, Any]:
    """The body's JSON object; empty where there is no body and no key is ``needed``. Raises ApiError."""
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
    """The whole body; a caller who breaks off in the middle of it gets an ordinary error."""
    try:
        return await request.read()
    except (OSError, web.RequestPayloadError) as error:
        raise ApiError(400, "bad_request", f"the body broke off: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def number(request: web.Request, name: str, default: int, most: int) -> int:
    """A whole number from the query, 0 to ``most``. Raises ApiError."""
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
