"""Who answers, by what the URL says; an adapter that follows."""

import pytest

from kvctl.engines.detect import ENGINES, PROBED, AutoEngine, Seen, engine_of, engine_of_page, find, routes_of
from tests.conformance.case import page

NOT_FOUND = Seen(404, '{"detail":"Not Found"}')


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("vllm:num_requests_running 1\n", "vllm"),
        ("# HELP python_info x\npython_info 1\nvllm_num_requests_running 1\n", "vllm"),
        ("sglang:token_usage 0.2\n", "sglang"),
        ("tgi_queue_size 0\n", "tgi"),
        ("llamacpp:requests_processing 0\n", "llamacpp"),
        ("sim:slipped_seconds_total 0\nvllm:num_requests_running 1\n", "sim"),
        ("te_queue_size 0\n", "tei"),
        ("python_info 1\n", None),
        ("", None),
        ('x{name="vllm:y"} 1\n', None),
    ],
)
def test_page(text: str, name: str | None) -> None:
    """C22: SGLang's and TGI's pages are told from vLLM's by their families."""
    assert engine_of_page(text) == name


@pytest.mark.parametrize(
    ("answers", "name"),
    [
        ({"/metrics": page("vllm-0.32-idle.prom")}, "vllm"),
        ({"/metrics": page("tgi-3.3-idle.prom")}, "tgi"),
        ({"/metrics": "", "/info": page("tgi-2.0-info.json")}, "tgi"),  # before its first request
        ({"/get_server_info": page("sglang-0.5-server-info.json")}, "sglang"),  # no --enable-metrics
        ({"/v1/models": page("sglang-0.5-models.json")}, "sglang"),
        ({"/props": page("llamacpp-2026-props.json")}, "llamacpp"),  # no --metrics
        ({"/v1/models": '{"data":[{"id":"m","owned_by":"vllm"}]}'}, "vllm"),  # --disable-log-stats
        ({"/v1/models": '{"data":[{"id":"m","owned_by":"kvctl-sim"}]}'}, "sim"),
        ({"/version": '{"version":"0.32.0"}'}, "vllm"),
        ({"/version": '{"version":"sim-1.0"}'}, "sim"),
    ],
)
def test_found_by_what_it_answers(answers: dict[str, str], name: str) -> None:
    seen = {path: Seen(200, answers[path]) if path in answers else NOT_FOUND for path in PROBED}
    finding = find(seen)
    assert (finding.engine, finding.answered, finding.supported) == (name, True, True)


@pytest.mark.parametrize(
    ("answers", "name", "shown"),
    [
        ({"/metrics": "nv_inference_count 3\n"}, "triton", "Triton"),
        ({"/info": '{"model_id":"bge","max_batch_tokens":16384}'}, "tei", "text-embeddings-inference"),
        ({"/api/tags": '{"models":[]}'}, "ollama", "Ollama"),
    ],
)
def test_an_engine_without_adapter_has_a_name_and_a_sentence(
    answers: dict[str, str], name: str, shown: str
) -> None:
    finding = find({path: Seen(200, body) for path, body in answers.items()})
    assert (finding.engine, finding.answered, finding.supported) == (name, True, False)
    assert shown in finding.sentence
    assert "no adapter" in finding.sentence


def test_a_stranger_is_told_with_what_it_answered() -> None:
    finding = find({"/metrics": Seen(403), "/version": NOT_FOUND})
    assert (finding.engine, finding.answered) == (None, True)
    assert "/metrics 403" in finding.sentence


def test_nobody_and_somebody_who_still_loads_are_asked_again_soon() -> None:
    assert not find({"/metrics": Seen(None)}).answered
    loading = find({"/metrics": Seen(503), "/props": Seen(503)})
    assert not loading.answered
    assert "loading" in loading.sentence


@pytest.mark.parametrize("body", ["", "[]", "null", "{", "[" * 100_000, '{"data":{"a":1}}', '{"data":[1]}'])
def test_odd_answers_are_nobody(body: str) -> None:
    assert find({path: Seen(200, body) for path in PROBED}).engine is None


def test_auto_is_vllm_until_somebody_is_found() -> None:
    auto = engine_of("auto")
    assert isinstance(auto, AutoEngine)
    assert auto.name == "vllm"
    assert auto.adopt("tgi")
    assert (auto.name, auto.info_path, auto.clamps_output) == ("tgi", "/info", False)
    assert auto.routes is ENGINES["tgi"].routes
    assert not auto.adopt("tgi")
    assert auto.adopt("triton")
    assert auto.name == "vllm"


def test_each_auto_follows_its_own_engine() -> None:
    one, other = AutoEngine(), AutoEngine()
    one.adopt("sglang")
    assert other.name == "vllm"


def test_a_named_engine_is_that_and_an_unknown_name_has_no_adapter() -> None:
    assert engine_of("llamacpp") is ENGINES["llamacpp"]
    with pytest.raises(KeyError):
        engine_of("word2vec")


def test_routes_that_may_come_are_known_from_the_start() -> None:
    assert routes_of("tgi") is ENGINES["tgi"].routes
    names = {route.name for route in routes_of("auto")}
    assert {"generate_stream", "infill", "chat"} <= names
