import pytest

from kvctl.engines.detect import engine_of, engine_of_page


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("vllm:num_requests_running 1\n", "vllm"),
        ("# HELP python_info x\npython_info 1\nvllm_num_requests_running 1\n", "vllm"),
        ("sglang:token_usage 0.2\n", "sglang"),
        ("tgi_queue_size 0\n", "tgi"),
        ("llamacpp:requests_processing 0\n", "llama.cpp"),
        ("python_info 1\n", None),
        ("", None),
        ('x{name="vllm:y"} 1\n', None),
    ],
)
def test_page(page: str, name: str | None) -> None:
    """C22: SGLang's and TGI's pages are told from vLLM's by their families."""
    assert engine_of_page(page) == name


def test_auto_is_vllm_and_an_unknown_name_has_no_adapter() -> None:
    assert engine_of("auto").name == "vllm"
    assert engine_of("vllm").name == "vllm"
    with pytest.raises(KeyError):
        engine_of("word2vec")
