"""``kvctl plan`` against the real engine: blocks and tokens of tiny configs, to the token."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvctl.cli.plan import plan
from kvctl.cli.plan_live import read_live
from tests.live.engine import ENVIRONMENT, Engine
from tests.live.model import CONFIG, ensure_model
from tests.live.venv import cache_folder

_BASE = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
_SLIDING = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 6,
    "sliding_window": 512, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 10000.0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None, "head_dim": None,
    "num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": None, "moe_layer_freq": 1,
}  # fmt: skip
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}

SHAPES: dict[str, tuple[dict[str, Any], int]] = {
    "gqa": (_LLAMA, 32),
    "mha": (_LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 3}, 64),
    "mqa": (_LLAMA | {"num_key_value_heads": 1, "head_dim": 64}, 128),
    "sliding": (_SLIDING, 32),
    "latent": (_LATENT, 16),
}


@dataclass(slots=True)
class Shaped(Engine):
    """An engine that serves another config with the same tokenizer and sizes its pool itself."""

    folder: Path = field(default_factory=Path)

    @property
    def model(self) -> Path:
        return self.folder

    def _command(self) -> list[str]:
        command = super(Shaped, self)._command()
        at = command.index("--num-gpu-blocks-override")
        return command[:at] + command[at + 2 :]


def _folder(tmp_path: Path, changes: dict[str, Any]) -> Path:
    source = ensure_model(cache_folder())
    vocab = json.loads((source / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / name)
    config = {
        key: value for key, value in {**_BASE, "vocab_size": vocab, **changes}.items() if value is not None
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_is_the_engines_own_figure(shape: str, tmp_path: Path) -> None:
    changes, block = SHAPES[shape]
    folder = _folder(tmp_path, changes)
    flags = ("--max-num-batched-tokens", "2048", "--no-async-scheduling")
    with Shaped(block_size=block, folder=folder, flags=flags) as engine:
        memory = str(int(ENVIRONMENT["VLLM_CPU_KVCACHE_SPACE"]) << 30)
        told = ["--like", engine.base_url, "--kv-cache-memory-bytes", memory, *flags, "-o", "json"]
        answer = CliRunner().invoke(plan, told)
        labels = read_live(engine.base_url)
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert document["num_blocks"] == labels.number("num_gpu_blocks")
    assert document["kv_tokens_logged"] == labels.number("kv_cache_size_tokens")
    assert document["engine_reports"]["verdict"] == "agrees"
