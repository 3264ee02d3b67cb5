"""A tiny model that the real engine serves: random weights, a real tokenizer and a real template."""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

NAME = "tiny"
"""The name under which the engine serves the model."""

VOCAB = 4096
MAX_POSITIONS = 65536
BOS, EOS, IM_START, IM_END = "<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BOS_ID, EOS_ID = 0, 1

CORPUS = Path(__file__).with_name("corpus.txt")

TEMPLATE = """\
{{- bos_token -}}
{%- if tools is defined and tools -%}
{{- '<|im_start|>system\\nTools:\\n' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- endif -%}
{%- if message['tool_calls'] is defined and message['tool_calls'] -%}
{%- for call in message['tool_calls'] -%}
{{- '<tool_call>' -}}{{- call['function'] | tojson -}}{{- '</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{%- if not (continue_final_message is defined and continue_final_message and loop.last) -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}

TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": EOS,
    "additional_special_tokens": [IM_START, IM_END],
    "clean_up_tokenization_spaces": False,
    "model_max_length": MAX_POSITIONS,
    "chat_template": TEMPLATE,
}


def corpus_lines() -> list[str]:
    """One sample a line, in some fifty languages, notations and styles."""
    return CORPUS.read_text(encoding="utf-8").splitlines()


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE that starts every completion prompt with a BOS, as Llama 3 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in (BOS, EOS, IM_START, IM_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus_lines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, BOS_ID)],
    )
    return tokenizer


def write_model(folder: Path) -> None:
    """config.json, tokenizer.json and tokenizer_config.json into a folder that exists."""
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size()}
    for name, content in (("config.json", config), ("tokenizer_config.json", TOKENIZER_CONFIG)):
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def fingerprint() -> str:
    """Changes with everything that the model folder is made of."""
    digest = hashlib.sha256(CORPUS.read_bytes())
    digest.update(json.dumps([CONFIG, TOKENIZER_CONFIG, 2]).encode())
    return digest.hexdigest()[:12]


def ensure_model(cache: Path) -> Path:
    """The model folder, written on the first call; it appears whole or not at all."""
    folder = cache / f"model-{fingerprint()}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="model-", dir=cache))
    try:
        write_model(scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        if not folder.exists():
            raise
    return folder
