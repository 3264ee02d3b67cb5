"""What was matched is what is forwarded, in every spelling."""

from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.engines.base import Route, Treatment
from kvctl.engines.vllm_routes import ROUTES
from kvctl.proxy.routes import Action, Router, normalise

ROUTER = Router(ROUTES)

SPELLINGS = [
    "/v1/chat/completions",
    "/v1/chat/completions/",
    "//v1///chat/completions//",
    "/v1/./chat/../chat/completions",
    "/x/../v1/chat/completions",
    "/../v1/chat/completions",
    "/v1/chat%2Fcompletions",
    "/%76%31/chat/completions",
    "/v1/%2e%2e/v1/chat/completions",
    "http://host:1/v1/chat/completions",
    "/v1/chat/completions#fragment",
]


@pytest.mark.parametrize("target", SPELLINGS)
def test_spellings_of_a_metered_route_are_metered(target: str) -> None:
    match = ROUTER.match("POST", target)
    assert match.action is Action.GENERATE
    assert match.target == b"/v1/chat/completions"
    assert match.name == "chat"


@pytest.mark.parametrize(
    "target",
    [
        "/V1/chat/completions",  # the engine's own router tells cases apart
        "/v1/chat%252Fcompletions",
        "/v1/chat/completions;x=1",
        "/v1/chat/completions%00",
        "/v1/chat/completions\udcff",
        "/v1/chat/completions%0d%0aX:%20y",
        "/v1/chat",
        "*",
        "host:443",
        "",
    ],
)
def test_other_spellings_are_nothing(target: str) -> None:
    assert ROUTER.match("POST", target).action is Action.NOT_FOUND


def test_the_query_travels_as_sent() -> None:
    match = ROUTER.match("GET", "//v1/models/?a=%2F&b=//..#x")
    assert (match.action, match.target) == (Action.PASS, b"/v1/models?a=%2F&b=//..")


def test_wildcards_and_their_methods() -> None:
    assert ROUTER.match("GET", "/v1/models/some%20model").target == b"/v1/models/some%20model"
    assert ROUTER.match("HEAD", "/v1/models/x").action is Action.PASS
    assert ROUTER.match("POST", "/v1/models/x").action is Action.NOT_ALLOWED


@pytest.mark.parametrize(
    ("method", "target", "action"),
    [
        ("GET", "/healthz", Action.OWN),
        ("HEAD", "/readyz/", Action.OWN),
        ("POST", "/healthz", Action.NOT_ALLOWED),
        ("OPTIONS", "/v1/chat/completions", Action.PASS),
        ("OPTIONS", "/nope", Action.NOT_FOUND),
        ("OPTIONS", "/sleep", Action.NOT_FOUND),
        ("POST", "/sleep", Action.NOT_FOUND),
        ("GET", "/metrics", Action.PASS),
    ],
)
def test_actions(method: str, target: str, action: Action) -> None:
    assert ROUTER.match(method, target).action is action


def test_base_path() -> None:
    router = Router(ROUTES, base_path="/llm/")
    assert router.match("POST", "/llm//v1/chat/completions").target == b"/v1/chat/completions"
    assert router.match("GET", "/llm/healthz").action is Action.OWN
    for outside in (
        "/v1/chat/completions",
        "/llmx/v1/chat/completions",
        "/llm/../v1/chat/completions",
        "/llm",
    ):
        assert router.match("POST", outside).action is Action.NOT_FOUND


def test_operators_lists_open_what_they_may() -> None:
    router = Router(
        ROUTES, opened=("POST /new", "/more/*", "/sleep", "/v1/chat/completions"), admin_opened=("/wake_up",)
    )
    assert router.match("POST", "/new").action is Action.PASS
    assert router.match("GET", "/new").action is Action.NOT_ALLOWED
    assert router.match("PUT", "/more/of/it").action is Action.PASS
    assert router.match("POST", "/sleep").action is Action.NOT_FOUND  # administration needs the other list
    assert router.match("POST", "/wake_up").action is Action.PASS
    assert router.match("POST", "/v1/chat/completions").action is Action.GENERATE


def test_refusals_carry_the_routes_hint() -> None:
    route = Route(method="*", path="/x", name="x", treatment=Treatment.REFUSE, hint="use /y")
    assert Router([route]).match("POST", "/x").hint == "use /y"
    assert ROUTER.match("POST", "/nope").hint


@given(st.text(alphabet="/.%2eEfF1vchat ?#\\é\u0000", max_size=30))
def test_normal_form_is_stable_and_inside(text: str) -> None:
    """The normal form is its own normal form, and the engine's view of it is the same path."""
    found = normalise("/" + text)
    if found is None:
        return
    path, _ = found
    assert path.startswith("/")
    assert not {"", ".", ".."} & set(path.split("/")[1:-1])
    forwarded = quote(path, safe="/:@!$&'()*+,;=-._~")
    assert unquote(forwarded) == path
    again = normalise(forwarded)
    assert again is not None
    assert again[0] == path
