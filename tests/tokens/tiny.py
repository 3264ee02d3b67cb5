"""A small real tokenizer with a ChatML template, trained on the spot: milliseconds, no downloads."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, IM_START, IM_END = "<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CORPUS = (
    "The quick brown fox jumps over the lazy dog while 1,234 servers wait for a token.",
    "Tous les êtres humains naissent libres et égaux; wo ist die Straße? Пусть всегда будет солнце.",
    "人人生而自由,在尊严和权利上一律平等。 すべての人間は、生まれながらにして自由である。",
    'def read(self, body: bytes) -> dict[str, "Any"]: return {"type": "function", "name": "weather"}',
    "system user assistant tool role content tool_calls arguments parameters description null true",
)

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

CONFIG: dict[str, Any] = {
    "bos_token": {"content": BOS, "lstrip": False},
    "eos_token": EOS,
    "additional_special_tokens": [IM_START, IM_END],
    "chat_template": CHATML,
}


def train(*, with_chat_tokens: bool = True) -> Tokenizer:
    """A byte-level BPE that puts a BOS before a completion's prompt, as Llama 3 does."""
    specials = [BOS, EOS, *((IM_START, IM_END) if with_chat_tokens else ())]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def write(folder: Path, config: dict[str, Any] | None = None, *, with_chat_tokens: bool = True) -> Path:
    """A model folder; ``config`` is added to tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train(with_chat_tokens=with_chat_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | (config or {})), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size() + 8}))
    return folder
