"""From the short lists that an engine's routes are written in to the table that the proxy matches against."""

from collections.abc import Iterable

from kvctl.engines.base import Api, Form, Route, Treatment

UNMETERED = "kvctl does not meter this route; the operator may list it in routes.pass"
_ADMIN_HINT = "engine administration; the operator may list it in routes.admin_pass"


def generating(routes: Iterable[tuple[str, str, Form]], *, api: Api = Api.OPENAI) -> tuple[Route, ...]:
    """Metered routes, (path, name, form of body). Messages are Anthropic's whatever the others speak."""
    return tuple(
        Route(
            method="POST",
            path=path,
            name=name,
            treatment=Treatment.GENERATE,
            api=Api.ANTHROPIC if form is Form.MESSAGES else api,
            form=form,
        )
        for path, name, form in routes
    )


def passed(routes: Iterable[tuple[str, str, str]], *, api: Api = Api.OPENAI) -> tuple[Route, ...]:
    """Routes that hold no KV, (method, path, name): relayed as they are."""
    return tuple(
        Route(method=method, path=path, name=name, treatment=Treatment.PASS, api=api)
        for method, path, name in routes
    )


def refused(
    routes: Iterable[tuple[str, str, str]], hint: str = UNMETERED, *, api: Api = Api.OPENAI
) -> tuple[Route, ...]:
    """Routes that may hold KV and cannot be counted, (method, path, name); callers are told ``hint``."""
    return tuple(
        Route(method=method, path=path, name=name, treatment=Treatment.REFUSE, api=api, hint=hint)
        for method, path, name in routes
    )


def administration(paths: Iterable[str]) -> tuple[Route, ...]:
    """Routes that change the engine or show what callers sent."""
    return tuple(
        Route(method="*", path=path, name="admin", treatment=Treatment.REFUSE, admin=True, hint=_ADMIN_HINT)
        for path in paths
    )
