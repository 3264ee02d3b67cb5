"""Conversations that the engine keeps under the id of an answer, remembered to count what follows them.

``previous_response_id`` names a conversation that is not in the body. Where both its question and its answer
passed through here, its messages are known and a follow-up is counted like any other chat. Where they are not
kept (another form, too large, forgotten), its token count is: prompt and answer by the engine's usage, and
for the answer at least what its text counts, which may be more than it was generated with.

Law 4: a follow-up is counted exactly only if the count of the conversation's own prompt proved right;
otherwise it is bounded. A conversation that is not remembered at all is bounded by the context.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvctl.proxy.dialects import natural
from kvctl.proxy.told import LONGEST_ID

KEPT = 20_000
KEPT_BYTES = 64 * 1024 * 1024  # of messages, over all conversations
MOST_BYTES = 1024 * 1024  # of one conversation's messages
KEPT_S = 3600.0
MOST_ANSWER = 1024 * 1024  # bytes of an answer that is read
TOKENS_PER_ANSWER = 64
"""Turn markers around a generated message, which the usage of its own request did not tell."""

Messages = tuple[Mapping[str, Any], ...]

_DONE = b"data: [DONE]\n\n"
_BORDER = b"\n\n"
_KEPT_STATUS = ("completed", "incomplete")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A request whose answer the engine will keep.

    ``messages``: its conversation as the engine has it; None: not known. ``weight``: their size in bytes.
    """

    messages: Messages | None
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A kept conversation, its last answer included. ``tokens``: most that it adds to the prompt after it."""

    tokens: int
    messages: Messages | None
    weight: int
    at: float


class Conversations:
    """The last ``KEPT`` of them, for ``KEPT_S``. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_bytes: int = KEPT_BYTES) -> None:
        self._clock = clock
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Past] = OrderedDict()
        self._with_messages: OrderedDict[str, int] = OrderedDict()  # by age; bytes of each
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Size of all messages that are kept."""
        return self._bytes

    def of(self, response_id: object) -> Past | None:
        """The conversation that ends with that response; None: not remembered."""
        past = self._kept.get(response_id) if isinstance(response_id, str) else None
        return past if past is not None and self._clock() - past.at <= KEPT_S else None

    def keep(
        self, response_id: str, *, tokens: int, messages: Messages | None = None, weight: int = 0
    ) -> None:
        """Remember a conversation under ``response_id``, replacing what stood there."""
        self._drop(response_id)
        if weight > MOST_BYTES:
            messages = None
        if messages is None:
            weight = 0
        else:
            self._with_messages[response_id] = weight
            self._bytes += weight
        self._kept[response_id] = Past(tokens=tokens, messages=messages, weight=weight, at=self._clock())
        while len(self._kept) > KEPT or self._is_over(next(iter(self._kept.values()))):
            self._drop(next(iter(self._kept)))
        while self._bytes > self._most_bytes:
            self._forget_messages(next(iter(self._with_messages)))

    def _is_over(self, past: Past) -> bool:
        return self._clock() - past.at > KEPT_S

    def _drop(self, response_id: str) -> None:
        self._forget_messages(response_id)
        self._kept.pop(response_id, None)

    def _forget_messages(self, response_id: str) -> None:
        weight = self._with_messages.pop(response_id, None)
        if weight is not None:
            self._bytes -= weight
            self._kept[response_id] = replace(self._kept[response_id], messages=None, weight=0)


class AnswerTail:
    """Keeps a plain answer whole, or the last event of a stream; nothing larger than ``MOST_ANSWER``."""

    __slots__ = ("_lost", "_stream", "_tail")

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._tail = bytearray()
        self._lost = False

    def feed(self, data: bytes) -> None:
        """More of the answer."""
        self._tail += data
        if self._stream:
            border = self._tail.rfind(_BORDER, 0, len(self._tail) - len(_BORDER))
            begin = border + len(_BORDER)
            if border >= 0 and len(self._tail) - begin > len(_DONE):  # it is more than the mark of the end
                del self._tail[:begin]
                self._lost = False
        if len(self._tail) > MOST_ANSWER:
            self._tail.clear()
            self._lost = True

    def document(self) -> bytes:
        """What was kept, as JSON; b"": nothing."""
        if self._lost or not self._stream:
            return b"" if self._lost else bytes(self._tail)
        event = bytes(self._tail).removesuffix(_DONE)
        lines = event[event.rstrip().rfind(_BORDER) + 1 :].splitlines()
        return b"".join([line[5:] for line in lines if line.startswith(b"data:")])


@dataclass(frozen=True, slots=True)
class Finished:
    """What an answer tells: its id, its prompt's tokens, and the texts that the engine keeps of it."""

    response_id: str
    prompt_tokens: int
    output_tokens: int
    texts: tuple[str, ...]


def finished(document: Mapping[str, Any]) -> Finished | None:
    """Read the answer, or the event that holds it; None: the engine keeps nothing that can be known.

    vLLM continues from the texts of messages alone: it drops reasoning and function calls.
    """
    inner = document.get("response")
    answer = inner if isinstance(inner, Mapping) else document
    usage, output, name = answer.get("usage"), answer.get("output"), answer.get("id")
    if answer.get("status") not in _KEPT_STATUS or not isinstance(usage, Mapping):
        return None
    prompt, generated = natural(usage.get("input_tokens")), natural(usage.get("output_tokens"))
    if not (isinstance(name, str) and len(name) <= LONGEST_ID) or not isinstance(output, list):
        return None
    if prompt is None or generated is None:
        return None
    items = [item for item in output if isinstance(item, Mapping) and item.get("type") == "message"]
    contents = [item.get("content") or [] for item in items]
    if not all(isinstance(content, list) for content in contents):
        return None
    parts = [part for content in contents for part in content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        return None
    return Finished(name, prompt, generated, tuple([text for text in texts if isinstance(text, str)]))
