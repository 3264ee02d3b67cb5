"""Which route a request is for, whatever the spelling of its path.

A path is brought to one normal form (percent-encoding undone once, ``.``, ``..``, doubled and trailing
slashes gone, the base path taken off), that form is looked up, and that form is what the engine gets: a
spelling is never matched in one way and forwarded in another. Case counts, as it does in the engines.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from urllib.parse import quote, unquote_to_bytes

from kvctl.engines.base import Api, Engine, Route, Treatment

HEALTHZ = Route(method="GET", path="/healthz", name="healthz", treatment=Treatment.PASS)
READYZ = Route(method="GET", path="/readyz", name="readyz", treatment=Treatment.PASS)

_SAFE_IN_PATH = "/:@!$&'()*+,;=-._~"
_UNKNOWN_HINT = (
    "kvctl relays only routes whose use of the KV cache it can meter; a harmless route of the engine can be "
    "listed by the operator in routes.pass"
)


class Action(Enum):
    """What is to be done with a request."""

    GENERATE = "generate"
    PASS = "pass"  # noqa: S105 - relayed, not metered
    OWN = "own"  # answered by kvctl
    NOT_FOUND = "not_found"
    NOT_ALLOWED = "not_allowed"  # the path is known, but not with this method


@dataclass(frozen=True, slots=True)
class Match:
    """What a request line means. ``target`` is what goes to the engine: normal path and query as sent."""

    action: Action
    path: str
    target: bytes
    route: Route | None = None
    hint: str = ""
    allow: str = ""
    api: Api = field(init=False)  # whose error format to answer in
    name: str = field(init=False)  # metric label of the route; never the caller's own words

    def __post_init__(self) -> None:
        route = self.route
        object.__setattr__(self, "api", Api.OPENAI if route is None else route.api)
        object.__setattr__(self, "name", "unknown" if route is None else route.name)


def normalise(target: str, base_path: str = "") -> tuple[str, str] | None:
    """Normal path and query (with its ``?``, as sent) of a request target; None: it cannot name a route."""
    path, mark, query = target.partition("#")[0].partition("?")
    if "://" in path and not path.startswith("/"):  # absolute form, as sent to forward proxies
        path = "/" + path.partition("://")[2].partition("/")[2]
    if not path.startswith("/"):
        return None
    try:
        decoded = unquote_to_bytes(path.encode("utf-8", "surrogateescape")).decode("utf-8")
    except UnicodeDecodeError:
        return None
    if not decoded.isprintable():
        return None
    normal = _resolve(decoded)
    if base_path:
        if normal != base_path and not normal.startswith(base_path + "/"):
            return None
        normal = normal[len(base_path) :] or "/"
    return normal, mark + query


def _resolve(path: str) -> str:
    """Without empty, ``.`` and ``..`` segments."""
    segments: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    return "/" + "/".join(segments)


def _methods(route: Route) -> tuple[str, ...]:
    return ("GET", "HEAD") if route.method == "GET" else (route.method,)


class Router:
    """Matches requests against an engine's routes and the operator's own lists.

    ``opened`` and ``admin_opened`` are paths, each with an optional method before it ("POST /x"), exact or
    with one trailing ``/*``. A route of engine administration is opened by ``admin_opened`` only.
    """

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        opened: Iterable[str] = (),
        admin_opened: Iterable[str] = (),
        base_path: str = "",
    ) -> None:
        self._base_path = base_path.rstrip("/")
        self._exact: dict[tuple[str, str], Route] = {}
        self._prefixes: list[tuple[str, dict[str, Route]]] = []
        self._cache: dict[tuple[str, str], Match] = {}
        for route in (HEALTHZ, READYZ, *routes):
            self._add(route)
        self._open(opened, admin=False)
        self._open(admin_opened, admin=True)
        self._prefixes.sort(key=lambda entry: len(entry[0]), reverse=True)

    def match(self, method: str, target: str) -> Match:
        """What ``method target`` (as on the request line) means."""
        key = (method, target)
        found = self._cache.get(key)
        if found is None:
            found = self._match(method, target)
            if found.route is not None and len(target) <= 64 and len(self._cache) < 1024:
                self._cache[key] = found  # few spellings make up nearly all traffic
        return found

    def _match(self, method: str, target: str) -> Match:
        normal = normalise(target, self._base_path)
        if normal is None:
            return Match(Action.NOT_FOUND, target, b"", hint=_UNKNOWN_HINT)
        path, query = normal
        forwarded = (quote(path, safe=_SAFE_IN_PATH) + query).encode("utf-8", "surrogateescape")
        route = self._find(method, path)
        if route is None:
            return self._without_route(method, path, forwarded)
        if route is HEALTHZ or route is READYZ:
            return Match(Action.OWN, path, forwarded, route)
        if route.treatment is Treatment.REFUSE:
            return Match(Action.NOT_FOUND, path, forwarded, route, hint=route.hint or _UNKNOWN_HINT)
        action = Action.GENERATE if route.treatment is Treatment.GENERATE else Action.PASS
        return Match(action, path, forwarded, route)

    def _without_route(self, method: str, path: str, forwarded: bytes) -> Match:
        """The path has no such method; a preflight passes where any other method is served."""
        allowed = sorted(
            other
            for other in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
            if (route := self._find(other, path)) is not None and route.treatment is not Treatment.REFUSE
        )
        if not allowed:
            return Match(Action.NOT_FOUND, path, forwarded, hint=_UNKNOWN_HINT)
        route = self._find(allowed[0], path)
        if method == "OPTIONS" and route not in (HEALTHZ, READYZ):
            return Match(Action.PASS, path, forwarded, route)
        allow = ", ".join(allowed)
        return Match(Action.NOT_ALLOWED, path, forwarded, route, hint=f"use {allow}", allow=allow)

    def _find(self, method: str, path: str) -> Route | None:
        exact = self._exact.get((method, path)) or self._exact.get(("*", path))
        if exact is not None:
            return exact
        for prefix, by_method in self._prefixes:
            if path.startswith(prefix) and len(path) > len(prefix):
                route = by_method.get(method) or by_method.get("*")
                if route is not None:
                    return route
        return None

    def _add(self, route: Route) -> None:
        for method in _methods(route):
            if not route.path.endswith("/*"):
                self._exact[(method, route.path)] = route
                continue
            prefix = route.path[:-1]
            table = next((table for known, table in self._prefixes if known == prefix), None)
            if table is None:
                table = {}
                self._prefixes.append((prefix, table))
            table[method] = route

    def _open(self, entries: Iterable[str], *, admin: bool) -> None:
        """Let the listed paths pass. What is metered stays metered."""
        for entry in entries:
            method, _, path = entry.strip().rpartition(" ")
            method = method.strip().upper() or "*"
            known = [r for r in self._routes() if r.path == path and method in (r.method, "*")]
            if not known and not admin:
                self._add(Route(method=method, path=path, name="opened", treatment=Treatment.PASS))
            for route in known:
                if route.treatment is Treatment.REFUSE and route.admin is admin:
                    self._add(replace(route, method=method, treatment=Treatment.PASS))

    def _routes(self) -> list[Route]:
        tables = [table for _, table in self._prefixes]
        return [*self._exact.values(), *(route for table in tables for route in table.values())]


class LiveRouter:
    """A router for an engine whose kind is detected, or changes, while kvctl runs."""

    def __init__(
        self,
        engine: Engine,
        *,
        opened: Iterable[str] = (),
        admin_opened: Iterable[str] = (),
        base_path: str = "",
    ) -> None:
        self._engine = engine
        self._opened, self._admin_opened, self._base_path = tuple(opened), tuple(admin_opened), base_path
        self._table = engine.routes
        self._router = self._build()

    def match(self, method: str, target: str) -> Match:
        """What ``method target`` (as on the request line) means to the engine that is there now."""
        table = self._engine.routes
        if table is not self._table:
            self._table = table
            self._router = self._build()
        return self._router.match(method, target)

    def _build(self) -> Router:
        return Router(
            self._table,
            opened=self._opened,
            admin_opened=self._admin_opened,
            base_path=self._base_path,
        )
