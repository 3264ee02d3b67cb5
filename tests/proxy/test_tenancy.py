"""Whose request it is: by key, by header, with keys checked or not."""

import hashlib

import pytest
from aiohttp.test_utils import make_mocked_request

from kvctl.core.events import Arrived, Command, Event
from kvctl.proxy.seams import ProxyConfig
from kvctl.proxy.tenancy import KeysError, Tenancy, read_keys
from tests.core.conversation import shape
from tests.proxy.harness import CHAT, PLAIN, answering, plain, rig


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


KEYS = {digest("sk-a"): "team-a", digest("sk-b"): "team-b"}
NAMES = ("team-a", "team-b")


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({"Authorization": "Bearer sk-a"}, "team-a"),
        ({"Authorization": "bearer  sk-b "}, "team-b"),
        ({"x-api-key": "sk-a"}, "team-a"),
        ({"Authorization": "Basic sk-a"}, "default"),
        ({"Authorization": "Bearer other"}, "default"),
        ({}, "default"),
    ],
)
def test_a_key_names_the_tenant(headers: dict[str, str], tenant: str) -> None:
    assert Tenancy(KEYS, known=NAMES).tenant(headers) == tenant


def test_a_header_of_the_gateway_names_it_where_one_is_set() -> None:
    told = Tenancy(KEYS, known=NAMES, header="x-team")
    assert told.tenant({"x-team": "team-b", "Authorization": "Bearer sk-a"}) == "team-b"
    assert told.tenant({"x-team": "made-up"}) == "default"
    assert told.tenant({"Authorization": "Bearer sk-a"}) == "team-a"


def test_where_nobody_is_told_apart_the_shape_stays_as_it_is() -> None:
    one = shape()
    assert Tenancy({}).attribute(one, {"Authorization": "Bearer sk-a"}) is one


def test_the_priority_header_wins_over_the_body() -> None:
    told = Tenancy(KEYS, known=NAMES)
    assert told.attribute(shape(), {"x-kvctl-priority": "High"}).priority == -1
    assert told.attribute(shape(), {"x-kvctl-priority": "low"}).priority == 1
    assert told.attribute(shape(), {"x-kvctl-priority": "nonsense"}).priority == 0


def test_keys_are_checked_where_that_is_wanted() -> None:
    told = Tenancy(KEYS, known=NAMES, check=True)
    known = make_mocked_request("POST", "/", headers={"Authorization": "Bearer sk-a"})
    assert told.judge(known) is None
    assert told.judge(make_mocked_request("OPTIONS", "/")) is None
    for headers in ({}, {"Authorization": "Bearer sk-x"}, {"Authorization": f"Bearer {digest('sk-a')}"}):
        refused = told.judge(make_mocked_request("POST", "/", headers=headers))
        assert refused is not None
        assert refused.status == 401
    assert Tenancy(KEYS).judge(make_mocked_request("POST", "/")) is None


def test_a_file_of_keys() -> None:
    text = f"# keys\n{digest('one')} team-a  # the first\n\nsha256:{digest('two').upper()}\n"
    assert read_keys(text) == {digest("one"): "team-a", digest("two"): "default"}
    for bad in ("sk-secret", f"{digest('x')} a b", digest("x")[:-1] + "g"):
        with pytest.raises(KeysError, match="line 1"):
            read_keys(bad)


async def test_on_the_wire() -> None:
    """An unknown key gets 401 in the API's shape, and nothing reaches the engine."""
    config = ProxyConfig(tenancy=Tenancy(KEYS, known=NAMES, check=True))
    async with rig(answering(plain(PLAIN)), config=config) as it:
        tenants: list[str] = []

        def record(event: Event, commands: list[Command], now: float) -> None:
            del commands, now
            if isinstance(event, Arrived):
                tenants.append(event.shape.tenant)

        it.keeper.record(record)
        refused = await it.post(CHAT, "/v1/chat/completions", b"Authorization: Bearer nobody")
        assert refused.startswith(b"HTTP/1.1 401 ")
        assert b'"code":"invalid_api_key"' in refused
        assert it.engine.accepted == 0
        served = await it.post(CHAT, "/v1/chat/completions", b"Authorization: Bearer sk-b")
        assert served.startswith(b"HTTP/1.1 200 ")
        it.keeper.settle()
        assert tenants == ["team-b"]
        assert (await it.talk(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 200 "
        )
