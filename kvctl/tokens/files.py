"""A model folder -> tokenizer, chat template, vocabulary size.

Reads what transformers reads: ``tokenizer.json``; ``tokenizer_config.json`` (special tokens, added tokens,
template as text or as a named list); ``chat_template.jinja``, which wins; ``config.json`` for the vocabulary.

Llama's SentencePiece tokenizers can be loaded in two ways, which differ by a token where a text begins with a
space or contains a special token: transformers 5 takes the vocabulary from the file and rebuilds the rest
from the config, older versions take the file as it is. The newer way is used; ``load_again`` has the other.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from kvctl.tokens.template import ChatTemplate

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A tokenizer that cannot be used: one sentence that says what, where, and what to do."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What counting needs of a model. Templates by name; empty when the model has none."""

    tokenizer: Tokenizer
    templates: Mapping[str, ChatTemplate]
    vocab_size: int | None  # ids from here on are outside; None: not known
    longest_token: int  # characters
    load_again: Callable[[bool], Tokenizer] | None = None
    """Loads it as transformers 5 does, or (False) as older versions do; None: both do the same."""


_MADE_ANEW = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})
# Models that name such a class and mean another: transformers 5 knows them, and takes their file as it is.
_TAKEN_AS_IS = ("deepseek", "internlm2", "minicpm", "phi3", "phimoe", "qwen", "llava", "molmo", "nemotron")


def load_files(path: Path) -> ModelFiles:
    """``path`` is a model folder or its tokenizer.json. Raises TokenizerError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise TokenizerError(_advice(path, "there is no such file or folder"))
    if not file.exists():
        only = " (tekken.json is read by the engine alone)" if (path / "tekken.json").exists() else ""
        raise TokenizerError(_advice(file, f"the folder has no tokenizer.json{only}"))
    config = _read_json(file.parent / "tokenizer_config.json")
    anew = _made_anew(file.parent, config)
    tokenizer = _load(file, config, anew)
    specials = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
    templates = _templates(file.parent, config, specials)
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    again = partial(_load, file, config) if anew else None
    return ModelFiles(tokenizer, templates, _vocab_size(tokenizer, file.parent), longest, again)


def _load(file: Path, config: Mapping[str, Any], anew: bool) -> Tokenizer:
    tokenizer = _read_tokenizer(file)
    if anew:
        spaced = config.get("add_prefix_space") is not False
        scheme = ("always" if config.get("legacy") else "first") if spaced else "never"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme=scheme, split=False)
    _add_configured(tokenizer, config)
    return tokenizer


def _made_anew(folder: Path, config: Mapping[str, Any]) -> bool:
    kind = _read_json(folder / "config.json").get("model_type")
    as_is = isinstance(kind, str) and kind.startswith(_TAKEN_AS_IS)
    return config.get("tokenizer_class") in _MADE_ANEW and not as_is


def _advice(path: Path, what: str) -> str:
    return (
        f"tokenizer {str(path)!r} cannot be used: {what}. Set tokenizer to the folder that holds the served "
        'model\'s tokenizer.json, or to "engine" to let the engine count.'
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file. Raises TokenizerError."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(_advice(path, f"it cannot be read ({error})")) from error
    if not isinstance(data, dict):
        raise TokenizerError(_advice(path, "it holds no JSON object"))
    return data


def _read_tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
    except OSError as error:
        raise TokenizerError(_advice(file, f"it cannot be read ({error.strerror})")) from error
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise TokenizerError(_advice(file, f"it is no tokenizer ({error})")) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_text(value: Any) -> str:
    """A special token's text, written as a string or as an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _add_configured(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add special tokens that are only in the config: they are whole tokens to the engine all the same."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    more = list(listed.values()) if isinstance(listed, Mapping) else listed
    wanted = [_token_text(config.get(name)) for name in _SPECIAL_NAMES]
    wanted += [_token_text(token) for token in (more if isinstance(more, list) else [])]
    missing = [text for text in dict.fromkeys(wanted) if text and text not in known]
    if missing:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _templates(
    folder: Path, config: Mapping[str, Any], specials: Mapping[str, str]
) -> dict[str, ChatTemplate]:
    sources = _template_sources(folder, config)
    compiled = {}
    for name, source in sources.items():
        try:
            compiled[name] = ChatTemplate(source, specials)
        except jinja2.TemplateError as error:
            raise TokenizerError(_advice(folder, f"its chat template does not compile ({error})")) from error
    return compiled


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise TokenizerError(
            _advice(folder / "chat_template.jinja", f"it cannot be read ({error})")
        ) from error
    found = config.get("chat_template")
    if found is None:
        found = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    named = [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in named
        if isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


def _vocab_size(tokenizer: Tokenizer, folder: Path) -> int | None:
    """The model's embedding rows where config.json tells them; the tokenizer alone may have fewer."""
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config")
    nested = text_config.get("vocab_size") if isinstance(text_config, Mapping) else None
    sizes = [size for size in (config.get("vocab_size"), nested) if isinstance(size, int)]
    return max(*sizes, tokenizer.get_vocab_size(with_added_tokens=True)) if sizes else None
