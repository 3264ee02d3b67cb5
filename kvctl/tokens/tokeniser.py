"""Counts texts and chats with the model's own tokenizer and template, synchronously.

A text with more characters than the context's tokens times the longest token of the vocabulary is refused by
the engine before it tokenises (its ``max_chars_per_token`` rule). Such a text is not tokenised here either:
the least number of tokens that it can have is proof enough (law 4).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.tokens.begin import BORDER, Tokens, prefix_of
from kvctl.tokens.conversation import conversation, tool_list
from kvctl.tokens.files import ModelFiles
from kvctl.tokens.repeated import Repeated, chat_key
from kvctl.tokens.segments import Part, Segments
from kvctl.tokens.source import Tally, Uncountable, View, Why
from kvctl.tokens.template import ChatTemplate, template_options


class Tokeniser:
    """Counts with a model's files. Thread-safe."""

    def __init__(self, files: ModelFiles, *, max_chars: int = 16 * 1024 * 1024) -> None:
        self._templates = files.templates
        self._longest_token = files.longest_token
        self._max_chars = max_chars
        self._load_again = files.load_again
        self._newer = True
        self._words = tuple(_words(files))
        self._segments = Segments(files.tokenizer, self._words)
        self._repeated = Repeated()

    @property
    def tally(self) -> Tally:
        """The work of the segment cache so far."""
        return self._segments.tally

    @property
    def keeps(self) -> bool:
        """Whether counts of segments are cached; False: with this tokenizer they do not add up."""
        return self._segments.works

    def texts(self, prompts: Sequence[str], add_special_tokens: bool, view: View) -> tuple[int, ...]:
        """Tokens of each prompt. Raises Uncountable."""
        longest, context = max(map(len, prompts), default=0), view.context
        if context is not None and longest > context * self._longest_token:
            return tuple(-(-len(text) // self._longest_token) for text in prompts)
        if sum(map(len, prompts)) > self._max_chars:
            raise Uncountable(Why.TOO_LARGE)
        count = self._segments.count
        try:
            parts = [
                count(text, add_special_tokens=add_special_tokens, with_ids=view.begins) for text in prompts
            ]
        except Exception as error:  # lone surrogates (TypeError), or any failure of the native code
            raise Uncountable(Why.TEXT, str(error)) from error
        return tuple([_begun(part) if view.begins else part.tokens for part in parts])

    def chat(self, body: Mapping[str, Any], view: View) -> tuple[int, ...]:
        """Prompt tokens of a chat body, as the one number of a tuple. Raises Uncountable."""
        template, repeated = self._template(body), self._repeated
        key = chat_key(body, view) if template.steady else None
        if key is not None and (known := repeated.find(key)) is not None:
            count, characters = known
            self._segments.spare(characters)
            return (count,)
        messages = conversation(body.get("messages"), wrap=template.wants_parts)
        text = template.render(messages, tool_list(body.get("tools")), template_options(body))
        specials = body.get("add_special_tokens", False)
        if not isinstance(specials, bool):
            raise Uncountable(Why.SHAPE, "add_special_tokens is no boolean")
        counts = self.texts((text,), specials, view)
        if key is not None:
            repeated.keep(key, counts[0], len(text))
        return counts

    def other_way(self) -> bool:
        """Load the tokenizer as other versions of the engine's libraries do; False: no difference.

        Calling it again goes back. It takes as long as loading does.
        """
        if self._load_again is None:
            return False
        self._newer = not self._newer
        self._segments = Segments(self._load_again(self._newer), self._words)
        self._repeated = Repeated()  # after that: who has the new one counts the new way
        return True

    def _template(self, body: Mapping[str, Any]) -> ChatTemplate:
        named = "tool_use" if body.get("tools") else "default"
        template = self._templates.get(named) or self._templates.get("default")
        if template is None:
            raise Uncountable(Why.TEMPLATE, "the model has no chat template")
        return template


def _words(files: ModelFiles) -> list[str]:
    """Added tokens that the model's templates print."""
    added = [token.content for token in files.tokenizer.get_added_tokens_decoder().values()]
    return [word for word in added if any(word in template.source for template in files.templates.values())]


def _begun(part: Part) -> Tokens:
    return Tokens(part.tokens, prefix_of(part.ids) if part.ids and part.tokens > BORDER else ())
