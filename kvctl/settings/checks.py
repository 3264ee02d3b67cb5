"""What must hold between settings."""

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvctl.settings.engines import clashes
from kvctl.settings.tenants import clashes as tenant_clashes
from kvctl.settings.units import Address

if TYPE_CHECKING:
    from kvctl.settings.model import Settings


def disagreements(s: "Settings") -> Iterator[tuple[str, str]]:  # noqa: C901 - a list, not a maze
    """(key, what is wrong with it and what to do); braces stand for a setting as people write it."""
    if s.margin_min > s.margin_max:
        yield "margin_min", "is {margin_min}, above margin_max; margin_max is {margin_max}"
    elif not s.margin_min <= s.margin <= s.margin_max:
        yield "margin", "is {margin}; margin_min and margin_max allow {margin_min} to {margin_max}"
    if s.stale_after < 2 * s.scrape_interval:
        yield "stale_after", "is {stale_after}; it must be at least twice scrape_interval ({scrape_interval})"
    if s.stall_timeout < 2 * s.scrape_interval:
        yield (
            "stall_timeout",
            "is {stall_timeout}; it must be at least twice scrape_interval ({scrape_interval})",
        )
    if s.tick_interval > s.stale_after:
        yield "tick_interval", "is {tick_interval}, longer than stale_after; tick several times in it"
    if s.max_body_bytes > s.max_body_bytes_total:
        yield (
            "max_body_bytes",
            "is {max_body_bytes}; it must fit max_body_bytes_total ({max_body_bytes_total})",
        )
    if s.capacity_force and s.capacity_tokens is None:
        yield "capacity_force", "is true; set capacity_tokens too, the KV tokens of one rank"
    if s.listen.port and _meet(s.listen, s.admin_listen):
        yield "admin_listen", "is {admin_listen}, where callers connect already; choose another port"
    for key, own in (("listen", s.listen), ("admin_listen", s.admin_listen)):
        for url in [each.url for each in s.engines] or [s.engine_url]:
            if _reaches(url, own):
                where = "engines" if s.engines else "engine_url"
                yield where, f"is kvctl's own {key} address ({own}); name the engine's address"
    yield from _tls_disagreements(s)
    yield from (("engines", _literal(each)) for each in clashes(s.engines, s.engine_url))
    yield from (("tenants", each) for each in tenant_clashes(s.tenants))
    yield from _own_disagreements(s)


def _own_disagreements(s: "Settings") -> Iterator[tuple[str, str]]:
    """What an engine's own settings and those that it inherits say against one another."""
    for entry in s.engines:
        margin = entry.own.get("margin", s.margin)
        if not s.margin_min <= margin <= s.margin_max and "margin" in entry.own:
            yield "engines", f"has a margin for {entry.name} that margin_min and margin_max do not allow"
        capacity = entry.own.get("capacity_tokens", s.capacity_tokens)
        if entry.own.get("capacity_force") and capacity is None:
            yield "engines", f"has capacity_force for {entry.name}; set capacity_tokens too"


def _tls_disagreements(s: "Settings") -> Iterator[tuple[str, str]]:
    for key in ("tls_key", "tls_client_ca"):
        if getattr(s, key) is not None and s.tls_certificate is None:
            yield key, "is set without tls_certificate; callers would speak plain HTTP"
    if s.engine_client_key is not None and s.engine_client_certificate is None:
        yield "engine_client_key", "is set without engine_client_certificate"
    urls = [each.url for each in s.engines] or [s.engine_url]
    for key in ("engine_ca", "engine_client_certificate", "engine_server_name"):
        if getattr(s, key) and not any(url.startswith("https:") for url in urls):
            yield key, "is set, but the engine is not reached over TLS; write https:// in its URL"


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _meet(one: Address, other: Address) -> bool:
    """Whether two addresses are the same socket; any address covers each."""
    every = {"", "0.0.0.0", "::"}  # noqa: S104 - compared with, not listened on
    names = [{"localhost": "127.0.0.1"}.get(each.host, each.host) for each in (one, other)]
    return one.port == other.port and (bool(every.intersection(names)) or names[0] == names[1])


def _reaches(url: str, own: Address) -> bool:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return False
    host = parts.hostname or ""
    try:
        is_local = ipaddress.ip_address(host).is_loopback or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_local = host == "localhost"
    return is_local and _meet(Address(host, parts.port or {"http": 80, "https": 443}[parts.scheme]), own)
