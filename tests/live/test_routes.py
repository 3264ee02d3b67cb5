"""The engine's own list of routes holds none that kvctl does not know.

A route that appears with an upgrade fails here rather than pass unmetered, or be refused unannounced.
"""

from kvctl.engines.vllm_routes import ROUTES
from tests.live.engine import Engine
from tests.live.wire import post

DOCUMENTS = {"/openapi.json", "/docs", "/redoc"}


def is_known(path: str) -> bool:
    plain = path.split("{", 1)[0]
    exact = {route.path for route in ROUTES}
    prefixes = tuple(route.path.removesuffix("*") for route in ROUTES if route.path.endswith("/*"))
    return path in exact or (plain + "x").startswith(prefixes)


def test_every_route_is_known(engine: Engine) -> None:
    paths = post(engine.base_url + "/openapi.json", None).json["paths"]
    assert len(paths) > 20
    assert {path for path in paths if not is_known(path)} <= DOCUMENTS
