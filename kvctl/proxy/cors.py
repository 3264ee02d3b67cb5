"""Cross-origin headers of kvctl's own answers: those that the engine was seen to send.

A browser shows a refusal to its page only where the answer allows the page's origin. kvctl has no rules of
its own: what the engine allowed an origin (its preflight comes first, and is relayed) holds for kvctl's
answers.
"""

from aiohttp import web

from kvctl.proxy.response import Headers

_MOST_ORIGINS = 256
_LONGEST_ORIGIN = 512  # characters
_EXPOSED = (
    "Retry-After, retry-after-ms, x-should-retry, X-Request-Id, "
    "x-kvctl-reason, x-kvctl-needed-tokens, x-kvctl-headroom-tokens"
)


class Origins:
    """Which origins the engine was seen to allow."""

    def __init__(self) -> None:
        self._allowed: dict[str, str] = {}

    def learn(self, request: web.BaseRequest, answered: Headers) -> None:
        """Note what the engine's answer says of the request's origin."""
        origin = request.headers.get("Origin")
        if origin is None or len(origin) > _LONGEST_ORIGIN:
            return
        for name, value in answered:
            if name.lower() == b"access-control-allow-origin" and value in (
                b"*",
                origin.encode("utf-8", "replace"),
            ):
                self._allowed.pop(origin, None)
                self._allowed[origin] = value.decode("ascii", "replace")
        if len(self._allowed) > _MOST_ORIGINS:  # the one that was seen longest ago: strangers can name any
            del self._allowed[next(iter(self._allowed))]

    def headers_for(self, request: web.BaseRequest) -> tuple[tuple[str, str], ...]:
        """Headers to add to kvctl's own answer to ``request``; none where the engine allowed nothing."""
        origin = request.headers.get("Origin")
        allowed = self._allowed.get(origin) if origin is not None else None
        if allowed is None:
            return ()
        return (
            ("Access-Control-Allow-Origin", allowed),
            ("Vary", "Origin"),
            ("Access-Control-Expose-Headers", _EXPOSED),
        )
