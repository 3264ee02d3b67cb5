"""A model's chat template: compiled once, rendered in a sandbox, as transformers does it.

The template comes with the model and is trusted as much as the model; the messages are the caller's. A
template that a request brings along is never rendered here.
"""

import copy
from collections.abc import Mapping
from typing import Any

import jinja2.meta

from kvctl.tokens.content_format import wants_parts
from kvctl.tokens.conversation import Message, as_system
from kvctl.tokens.sandbox import UNSTEADY, sandbox
from kvctl.tokens.source import Uncountable, Why

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# arguments of the renderer: what a request means that sets them as template options cannot be guessed
_RESERVED = frozenset(
    {
        *("conversation", "messages", "tools", "chat_template", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
_OPTIONS = frozenset(
    {
        *("chat_template_kwargs", "chat_template", "reasoning_effort", "add_generation_prompt"),
        *("continue_final_message", "documents"),
    }
)  # of a chat body; without any of them:
_USUAL: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False}


class ChatTemplate:
    """One compiled template. ``specials`` are the tokens by name that it may print (``bos_token`` ...).

    ``steady``: the same input always gives the same output.
    """

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateError for a template that does not compile."""
        environment = sandbox()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._variables = jinja2.meta.find_undeclared_variables(tree)
        self.source = source
        self._fixed = {**environment.globals, **specials}
        self.steady = not any(name in source for name in UNSTEADY)
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self.wants_parts = wants_parts(tree)

    def render(self, messages: list[Message], tools: list[Message] | None, options: Mapping[str, Any]) -> str:
        """The prompt's text. ``options`` as from ``template_options``. Raises Uncountable."""
        if not self._knows_developer:
            messages = as_system(messages)
        given = {**self._fixed, **{key: options[key] for key in options if key in self._variables}}
        given.pop("continue_final_message", None)  # the renderer does not pass this one on
        given["documents"] = options.get("documents")
        given["add_generation_prompt"] = options.get("add_generation_prompt")
        resume = options.get("continue_final_message")
        final = ""
        if resume:
            messages, final = self._tagged(messages)
        given["messages"], given["tools"] = messages, tools
        try:
            # as Template.render, which would merge the globals anew each time
            context = self._template.new_context(given, shared=True)
            text = "".join(self._template.root_render_func(context))
        except Exception as error:  # the sandbox, the template's own raise, a type error of its code
            raise Uncountable(Why.TEMPLATE, f"{type(error).__name__}: {error}") from error
        return _cut(text, final) if resume else text

    def _tagged(self, messages: list[Message]) -> tuple[list[Message], str]:
        """The messages with the last one's text marked, and that text."""
        messages = copy.deepcopy(messages)
        content = messages[-1]["content"]
        if "content" not in self.source:
            raise Uncountable(Why.TEMPLATE, "the template prints no content to continue")
        if isinstance(content, str):
            messages[-1]["content"] = content + _CONTINUE_TAG
            return messages, content
        if not content:
            raise Uncountable(Why.SHAPE, "no final message to continue")
        text = content[-1]["text"]
        content[-1]["text"] = text + _CONTINUE_TAG
        return messages, str(text)


def _cut(text: str, final: str) -> str:
    """The rendered text up to the end of the final message, as far as the template kept it."""
    place = text.rfind(_CONTINUE_TAG.strip())
    if place < 0 or final.strip() not in text:
        raise Uncountable(Why.TEMPLATE, "the template changed the final message")
    if text[place : place + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:place]  # spacing was kept
    return text[:place].rstrip()


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat body passes to the template besides messages and tools. Raises Uncountable."""
    if _OPTIONS.isdisjoint(body):
        return _USUAL.copy()
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping) or not _RESERVED.isdisjoint(options):
        raise Uncountable(Why.SHAPE, "template options of another form")
    if body.get("chat_template") is not None:
        raise Uncountable(Why.SHAPE, "the request brings its own template")
    effort = body.get("reasoning_effort")
    thinking = {} if effort is None or "enable_thinking" in options else {"enable_thinking": effort != "none"}
    own = {
        "add_generation_prompt": _flag(body, "add_generation_prompt", default=True),
        "continue_final_message": _flag(body, "continue_final_message", default=False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
        **thinking,
    }
    merged = {**options, **{key: value for key, value in own.items() if value not in (None, "auto")}}
    if merged["add_generation_prompt"] and merged["continue_final_message"]:
        raise Uncountable(Why.SHAPE, "continue_final_message beside add_generation_prompt")
    return merged


def _flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise Uncountable(Why.SHAPE, f"{name} is no boolean")
    return value
