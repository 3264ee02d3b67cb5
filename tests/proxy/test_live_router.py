"""A router that follows engines whose kind changes while it runs."""

from kvctl.engines.detect import AutoEngine
from kvctl.proxy.routes import Action, LiveRouter


def test_routes_follow_the_engine_that_is_found() -> None:
    engine = AutoEngine()
    router = LiveRouter(engine, opened=["POST /extra"])
    assert router.match("POST", "/generate_stream").action is Action.NOT_FOUND
    engine.adopt("tgi")
    assert router.match("POST", "/generate_stream").action is Action.GENERATE
    assert router.match("POST", "/extra").action is Action.PASS
    engine.adopt("vllm")
    assert router.match("POST", "/generate_stream").action is Action.NOT_FOUND
