"""Reading bodies in tests: routes by form, and what a body comes to."""

import json
from typing import Any

from kvctl.core.claim import Shape
from kvctl.engines.base import Api, Engine, Form, Route, Treatment
from kvctl.proxy.bodies import Parsed, Reader
from kvctl.proxy.errors import bad_request
from kvctl.proxy.limits import BadRequest

Json = dict[str, Any]
JSON = {"Content-Type": "application/json"}


def route_of(engine: Engine, path: str) -> Route:
    """The metered route of an engine's own table."""
    return next(r for r in engine.routes if r.path == path and r.treatment is Treatment.GENERATE)


def route(form: Form, path: str = "/any", api: Api = Api.OPENAI) -> Route:
    """A route of that form."""
    return Route(method="POST", path=path, name=form.value, treatment=Treatment.GENERATE, form=form, api=api)


CHAT = route(Form.CHAT, "/v1/chat/completions")
TEXT = route(Form.COMPLETION, "/v1/completions")
BATCH = route(Form.CHAT_BATCH, "/v1/chat/completions/batch")
OTHER = route(Form.OTHER, "/v1/messages")


async def parsed(reader: Reader, target: Route, body: Json | bytes, sent: str = "application/json") -> Parsed:
    """All that the body says."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    read = await reader.read(target, {"Content-Type": sent}, raw)
    assert isinstance(read, Parsed), read
    return read


async def shape(reader: Reader, target: Route, body: Json | bytes, sent: str = "application/json") -> Shape:
    """What the body asks for."""
    return (await parsed(reader, target, body, sent)).shape


async def refusal(reader: Reader, target: Route, body: Json | bytes) -> Json:
    """The whole answer to a body that is refused."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    read = await reader.read(target, JSON, raw)
    assert isinstance(read, BadRequest), read
    answer: Json = json.loads(bad_request(target.api, read).body)
    return answer


async def refused(reader: Reader, target: Route, body: Json | bytes) -> Json:
    """The error of a route of OpenAI's for a body that is refused."""
    error: Json = (await refusal(reader, target, body))["error"]
    return error
