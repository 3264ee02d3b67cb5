import json
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvctl.cli.plan import plan
from tests.plan.configs import GEMMA3, LLAMA3_8B

LABELS = (
    'block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="{engine}",num_gpu_blocks="{blocks}",'
    'kv_cache_size_tokens="{tokens}",gpu_memory_utilization="0.9"'
)


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B), encoding="utf-8")
    return str(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plan, arguments)


def test_the_published_example(config: str) -> None:
    answer = run("--config", config, "--gpu", "24GiB", "--weights-gib", "16", "--overhead-gib", "2")
    assert answer.exit_code == 0
    assert "128.0 KiB per token" in answer.stdout
    assert "49,152" in answer.stdout
    assert "█" in answer.stdout


def test_json_and_explanation(config: str) -> None:
    document = json.loads(run("--config", config, "--available-gib", "6", "-o", "json", "--explain").stdout)
    assert document["kv_tokens"] == 49152
    assert document["formulas"]
    assert [point["length"] for point in document["concurrency"]] == [1024, 2048, 4096, 8192]
    assert "v1/kv_cache_interface.py" in run("--config", config, "--available-gib", "6", "--explain").stdout


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (json.dumps(LLAMA3_8B | {"num_attention_heads": 0}), "num_attention_heads"),
        (
            json.dumps({key: value for key, value in LLAMA3_8B.items() if key != "num_hidden_layers"}),
            "num_hidden_layers",
        ),
        (json.dumps(LLAMA3_8B | {"num_key_value_heads": "8"}), "num_key_value_heads"),
        (json.dumps(LLAMA3_8B | {"num_key_value_heads": 5}), "divide"),
        (json.dumps({"text_config": {"text_config": {"a": 1}}}), "config"),
        ("x" * 10_000_000, "bytes"),
        ("", "JSON"),
    ],
)
def test_garbage_is_one_line_and_exit_2(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    answer = run("--config", str(tmp_path), "--available-gib", "6")
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert word in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--gpu", "abacus"), "--gpu"),
        ((), "--gpu"),
        (("--available-gib", "6", "--tp", "3"), "--tp"),
        (("--available-gib", "6", "--num-gpus", "3", "--pp", "2"), "--num-gpus"),
        (("--available-gib", "6", "--num-gpus", "2", "--tp", "4"), "--num-gpus"),
        (("--available-gib", "6", "--dcp", "2", "--tp", "1"), "--dcp"),
        (("--available-gib", "6", "--kv-dtype", "int3"), "int3"),
        (("--available-gib", "6", "--compare", "tp=x"), "--compare"),
        (("--available-gib", "6", "--compare", "what=1"), "--compare"),
        (("--available-gib", "nan"), "nan"),
        (("--like", "ftp://x"), "http"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_2(config: str, arguments: tuple[str, ...], word: str) -> None:
    answer = run("--config", config, *arguments)
    assert answer.exit_code == 2
    assert word in answer.stderr


def test_no_card_to_measure_is_said(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nonexistent")
    answer = run("--config", config, "--measure")
    if answer.exit_code:
        assert answer.exit_code == 1
        assert "--measure: no GPU" in answer.stderr


def test_gpus_in_all_decide_tp(config: str) -> None:
    document = json.loads(
        run("--config", config, "--available-gib", "6", "--num-gpus", "4", "-o", "json").stdout
    )
    assert document["bytes_per_token"] == 32768


def test_an_unknown_card_does_not_matter_where_the_memory_is_given(config: str) -> None:
    answer = run("--config", config, "--gpu", "NPU of 2031", "--available-gib", "6", "-o", "json")
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["kv_tokens"] == 49152


def test_columns_side_by_side(config: str) -> None:
    shared = (
        "--config",
        config,
        "--gpu",
        "H100",
        "--weights-gib",
        "15",
        "--compare",
        "H200",
        "--compare",
        "tp=2,kv-dtype=fp8",
    )
    answer = run(*shared)
    assert "1. H200" in answer.stdout
    assert "2. tp=2,kv-dtype=fp8" in answer.stdout
    documents = json.loads(run(*shared, "-o", "json").stdout)["compare"]
    assert [each["variant"] for each in documents] == ["H200", "tp=2,kv-dtype=fp8"]
    assert documents[1]["bytes_per_token"] == 32768


def test_recommended_settings_are_written_once(config: str, tmp_path: Path) -> None:
    target = tmp_path / "advice.toml"
    arguments = ("--config", config, "--available-gib", "6", "--recommend", str(target))
    assert run(*arguments).exit_code == 0
    assert "max_context = " in target.read_text(encoding="utf-8")
    again = run(*arguments)
    assert again.exit_code == 1
    assert "not written" in again.stderr


def test_recommended_settings_alone_go_to_standard_output(config: str) -> None:
    answer = run("--config", config, "--available-gib", "6", "--recommend", "-")
    assert answer.exit_code == 0
    settings = tomllib.loads(answer.stdout)
    assert settings.keys() >= {"engine_url", "margin", "max_context"}
    assert settings["plan_model"] == str(Path(config).resolve()), "the daemon can make the same plan"
    assert settings["plan_flags"] == "--available-gib 6.0"


def test_a_model_that_is_not_here() -> None:
    answer = run("--config", "meta-llama/Meta-Llama-3-8B", "--gpu", "24GiB")
    assert answer.exit_code == 2
    assert "nothing is downloaded" in answer.stderr


class Pages(HTTPServer):
    """An engine's three pages on loopback."""

    pages: dict[str, str]


class Handler(BaseHTTPRequestHandler):
    server: Pages

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)
        body = (page or "").encode()
        self.send_response(404 if page is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def engine() -> Iterator[Pages]:
    server = Pages(("127.0.0.1", 0), Handler)
    server.pages = {}
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def serve(engine: Pages, folder: str, *labels: str, version: str = "0.32.0") -> str:
    model = {"id": "tiny", "root": folder, "max_model_len": 4096}
    info = "".join(f"vllm:cache_config_info{{{each}}} 1.0\n" for each in labels)
    engine.pages = {
        "/v1/models": json.dumps({"data": [model]}),
        "/version": json.dumps({"version": version}),
        "/metrics": info or "up 1\n",
    }
    return f"http://127.0.0.1:{engine.server_port}"


def test_a_running_engine_is_the_plan_and_is_compared(engine: Pages, config: str) -> None:
    url = serve(engine, config, LABELS.format(engine=0, blocks=1000, tokens=16000))
    document = json.loads(run("--like", url, "-o", "json").stdout)
    assert (document["num_blocks"], document["kv_tokens"], document["max_model_len"]) == (1000, 16000, 4096)
    assert document["engine_reports"]["verdict"] == "agrees"
    assert "cross-check: the engine reports 16,000" in run("--like", url + "/v1").stdout


def test_blocks_of_data_parallel_engines_are_a_sum(engine: Pages, config: str) -> None:
    url = serve(engine, config, *(LABELS.format(engine=rank, blocks=2000, tokens=16000) for rank in (0, 1)))
    document = json.loads(run("--like", url, "-o", "json").stdout)
    assert document["num_blocks"] == 1000
    assert document["engine_reports"]["verdict"] == "agrees"


def test_a_pool_that_is_not_the_planned_one_is_told(engine: Pages, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3), encoding="utf-8")
    url = serve(engine, str(tmp_path), LABELS.format(engine=0, blocks=1000, tokens=500))
    document = json.loads(run("--like", url, "-o", "json").stdout)
    assert document["engine_reports"]["verdict"] == "smaller"


def test_what_is_no_vllm_is_said(engine: Pages, config: str) -> None:
    url = serve(engine, config)
    answer = run("--like", url)
    assert answer.exit_code == 2
    assert "cache_config_info" in answer.stderr
    engine.pages = {}
    assert "/metrics" in run("--like", url).stderr


def test_nobody_there_is_one_line(config: str) -> None:
    answer = run("--like", "http://127.0.0.1:1", "--config", config)
    assert answer.exit_code == 1
    assert answer.stderr == (
        "kvctl: --like: no answer from http://127.0.0.1:1/v1/models: Connection refused; "
        "is the engine running, and is that its address?\n"
    )


HOSTILE = "a\x1b[2J\x1b]0;owned\x07\x9b31m\u202eb|[/red]"


@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize("where", ["model", "folder", "version", "label", "no pool", "no page"])
def test_what_an_engine_says_of_itself_does_not_touch_the_terminal(
    engine: Pages, config: str, where: str, output: str
) -> None:
    """C28: a served model's name, and all else on an engine's pages, is somebody else's text."""
    url = serve(engine, config, LABELS.format(engine=0, blocks=1000, tokens=16000))
    models = json.dumps({"data": [{"id": HOSTILE, "root": config, "max_model_len": 4096}]})
    pages = {
        "model": {"/v1/models": models},
        "folder": {"/v1/models": models.replace(config, "/nowhere/\\u001b[2J")},
        "version": {"/version": json.dumps({"version": HOSTILE})},
        "label": {
            "/metrics": engine.pages["/metrics"].replace('cache_dtype="auto"', f'cache_dtype="{HOSTILE}"')
        },
        "no pool": {"/metrics": HOSTILE},
        "no page": {"/metrics": HOSTILE, "/v1/models": HOSTILE, "/version": HOSTILE},
    }
    engine.pages |= pages[where]
    for flags in ((), ("--explain",)):
        answer = run("--like", url, "-o", output, *flags)
        assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
        assert answer.output
        assert all(line.isprintable() for line in answer.output.split("\n")), answer.output
