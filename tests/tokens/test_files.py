import json
from pathlib import Path
from typing import Any

import pytest

from kvctl.tokens.files import TokenizerError, load_files
from kvctl.tokens.load import load_counter
from tests.tokens.tiny import CHATML, IM_END, IM_START, write


def rendered(folder: Path, name: str = "default") -> str:
    template = load_files(folder).templates[name]
    return template.render([{"role": "user", "content": "hi"}], None, {"add_generation_prompt": False})


def test_a_folder_and_its_tokenizer_json_are_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    by_file = load_files(folder / "tokenizer.json")
    assert by_file.tokenizer.to_str() == load_files(folder).tokenizer.to_str()
    assert by_file.templates.keys() == {"default"}


def test_the_jinja_file_wins(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("from the file")
    assert rendered(folder) == "from the file"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}, "junk"]
    folder = write(tmp_path / "model", {"chat_template": named})
    assert (rendered(folder), rendered(folder, "tool_use")) == ("plain", "tools")


def test_the_processors_template_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"chat_template": None})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert rendered(folder) == "of the processor"


def test_special_tokens_by_text_and_by_object(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}"})
    assert rendered(folder) == "<s>|<|endoftext|>|"


def test_special_tokens_of_the_config_are_whole_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", with_chat_tokens=False)
    tokenizer = load_files(folder).tokenizer
    assert len(tokenizer.encode(IM_START + IM_END, add_special_tokens=False)) == 2


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert len(load_files(folder).tokenizer.encode("the quick brown fox jumps over")) > 4


def test_vocabulary_is_the_models_where_its_config_tells(tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    own = load_files(folder).tokenizer.get_vocab_size()
    assert load_files(folder).vocab_size == own + 8
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 5000}}))
    assert load_files(folder).vocab_size == 5000
    (folder / "config.json").unlink()
    assert load_files(folder).vocab_size is None


def break_nothing(folder: Path) -> Path:
    return folder / "nowhere"


def break_folder(folder: Path) -> Path:
    (folder / "tokenizer.json").unlink()
    return folder


def break_json(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text("{")
    return folder


def break_model(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}')
    return folder


def break_config(folder: Path) -> Path:
    (folder / "tokenizer_config.json").write_bytes(b"\xff\xfe\xfd")
    return folder


def break_template(folder: Path) -> Path:
    (folder / "chat_template.jinja").write_text("{% if %}")
    return folder


def break_by_folder(folder: Path) -> Path:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    return folder


@pytest.mark.parametrize(
    "broken",
    [break_nothing, break_folder, break_json, break_model, break_config, break_template, break_by_folder],
)
def test_what_cannot_be_used_is_one_sentence_of_advice(tmp_path: Path, broken: Any) -> None:
    path = broken(write(tmp_path / "model"))
    with pytest.raises(TokenizerError) as raised:
        load_counter(str(path))
    message = str(raised.value)
    assert str(tmp_path) in message
    assert "cannot be used" in message
    assert '"engine"' in message
    assert "\n" not in message.strip()


def test_template_is_compiled_once_at_load(tmp_path: Path) -> None:
    files = load_files(write(tmp_path / "model", {"chat_template": CHATML}))
    assert files.templates["default"] is files.templates["default"]
