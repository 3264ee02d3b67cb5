"""What the events and answers of each API say: tokens so far, usage, how it ended.

OpenAI's chunks, Anthropic's and OpenAI's typed events, TGI's tokens, SGLang's cumulative answers, llama.cpp's
pieces. Each format is recognised by its own fields, so that one reader serves every route of every engine.
"""

from typing import Any

import msgspec


class Findings(msgspec.Struct, gc=False):
    """What an answer has told so far; None where it has not said."""

    tokens: int = 0  # output tokens over all choices, as counted
    output_tokens: int | None = None  # by the engine's own usage
    prompt_tokens: int | None = None
    finished: bool = False  # a finish reason was seen
    capped: bool = False  # a choice ended at its limit
    error: bool = False  # an error object inside the answer
    recognised: bool = False  # the format is one that is understood


class Usage(msgspec.Struct, gc=False):
    """Either API's usage object. Anthropic's ``input_tokens`` leaves out what the prefix cache gave."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Delta(msgspec.Struct, gc=False):  # trees, never cycles: nothing for the collector to find
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class Choice(msgspec.Struct, gc=False):
    """Of a chunk, or of a whole answer."""

    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct, gc=False):
    """OpenAI's chat and completion chunks; the last five fields give away the other formats."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    type: str | None = None
    token: Any = None
    meta_info: Any = None
    stop: Any = None
    content: Any = None


class Answer(msgspec.Struct, gc=False):
    """A plain answer of any of the APIs."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    stop_reason: str | None = None  # Anthropic
    status: str | None = None  # OpenAI responses
    details: Any = None  # TGI
    meta_info: Any = None  # SGLang
    tokens_predicted: Any = None  # llama.cpp
    tokens_evaluated: Any = None
    stop_type: Any = None


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding may raise: not JSON, unexpected types, not UTF-8, or nested beyond all bounds."""

_EVENT = msgspec.json.Decoder(_Event)
_ANSWERS = msgspec.json.Decoder(Answer | list[Answer])
MOST_TOKENS = 1_000_000_000
"""Of one answer or prompt. A larger figure is not a count (law 3), and would spoil sums for good."""
_CAPPED = frozenset({"length", "max_tokens", "incomplete", "max_output_tokens", "limit"})


def natural(value: object) -> int | None:
    """``value`` if it is a count, else None."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def take_usage(found: Findings, usage: Usage) -> None:
    """Let the engine's own figures replace what was counted."""
    prompt, output = natural(usage.prompt_tokens), natural(usage.completion_tokens)
    if prompt is None and (prompt := natural(usage.input_tokens)) is not None:
        cached = (usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
        prompt += sum(natural(tokens) or 0 for tokens in cached)
    output = natural(usage.output_tokens) if output is None else output
    found.prompt_tokens = found.prompt_tokens if prompt is None else prompt
    found.output_tokens = found.output_tokens if output is None else output


def take_finish(found: Findings, reason: object) -> None:
    """Note a finish reason; None while the choice goes on."""
    if isinstance(reason, str):
        found.finished = True
        found.capped = found.capped or reason in _CAPPED


class Events:
    """Reads the payloads of one event stream into ``found``."""

    __slots__ = ("_by_ids", "_per_choice", "found")

    def __init__(self) -> None:
        self.found = Findings()
        self._per_choice: dict[object, int] = {}
        self._by_ids = 0  # tokens that were told by their ids

    def read(self, payload: bytes) -> bool:
        """Read one event; whether it was an OpenAI chunk with one more token and nothing else.

        What is not a JSON object is ignored.
        """
        if payload == b"[DONE]":
            return False
        try:
            event = _EVENT.decode(payload)
            if event.choices is not None:
                return self._openai(event)
            self._read_other(event, payload)  # which decodes what was skipped so far
        except UNREADABLE:
            pass
        return False

    def _read_other(self, event: _Event, payload: bytes) -> None:
        if event.error is not None:
            self.found.error = True
        elif event.meta_info is not None:
            self._cumulative(event.meta_info, payload)
        elif event.type is not None or event.token is not None:
            self._other(payload)
        elif event.content is not None and event.stop is not None:
            _read_piece(self.found, msgspec.json.decode(payload))
        elif event.usage is not None:
            take_usage(self.found, event.usage)

    def piece(self, index: int, tokens: int = 1) -> None:
        """More tokens of the choice ``index``."""
        self._per_choice[index] = self._per_choice.get(index, 0) + tokens
        self.found.tokens += tokens

    def _openai(self, event: _Event) -> bool:
        found, choices = self.found, event.choices or []
        found.recognised = True
        if not self._by_ids and (index := _piece_of(event)) is not None:
            self.piece(index)
            return True
        for choice in choices:
            if choice.finish_reason is not None:
                take_finish(found, choice.finish_reason)
            new = _tokens_in(choice)
            if event.usage is not None and (told := natural(event.usage.completion_tokens)) is not None:
                # this usage counts one choice alone
                new = told - self._per_choice.get(choice.index, 0)
            self._more(choice.index, new)
            if choice.token_ids is not None and event.usage is None:
                self._by_ids += new
        if self._by_ids:  # ids are exact; events may bring several tokens
            found.output_tokens = found.tokens if self._by_ids == found.tokens else None
        if event.usage is not None and not choices:
            take_usage(found, event.usage)
        if event.error is not None:
            found.error = True
        return False

    def _cumulative(self, meta: Any, payload: bytes) -> None:
        """SGLang: every event gives the total of its choice so far."""
        if not isinstance(meta, dict):
            return
        found = self.found
        found.recognised = True
        index = msgspec.json.decode(payload).get("index", 0)
        index = index if isinstance(index, int) else 0
        total = natural(meta.get("completion_tokens"))
        if total is not None:
            self._more(index, total - self._per_choice.get(index, 0))
            found.output_tokens = found.tokens
        _take_meta(found, meta)

    def _more(self, choice: object, new: int) -> None:
        if new > 0:
            self._per_choice[choice] = self._per_choice.get(choice, 0) + new
            self.found.tokens += new

    def _other(self, payload: bytes) -> None:
        event = msgspec.json.decode(payload)
        if "token" in event:
            _read_tgi(self.found, event)
        elif not _read_typed(self.found, str(event.get("type"))):
            _read_typed_usage(self.found, event)


def piece_in(payload: bytes) -> int | None:
    """The index of the choice for which an event brings one more token and nothing else; else None."""
    try:
        return _piece_of(_EVENT.decode(payload))
    except UNREADABLE:
        return None


def _piece_of(event: _Event) -> int | None:
    choices = event.choices
    if choices is None or len(choices) != 1 or event.usage is not None or event.error is not None:
        return None
    choice = choices[0]
    if choice.finish_reason is not None or choice.token_ids is not None:
        return None
    return choice.index if choice.delta is None or choice.delta.role is None else None


def _tokens_in(choice: Choice) -> int:
    """Tokens that a chunk brings for a choice: none where it only names the role."""
    if choice.token_ids is not None:
        return len(choice.token_ids)
    delta = choice.delta
    if delta is None or delta.role is None or choice.finish_reason is not None:
        return 1
    return 1 if delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls else 0


def _read_tgi(found: Findings, event: dict[str, Any]) -> None:
    found.recognised = True
    if event["token"] is not None:
        found.tokens += 1
    details = event.get("details")
    if isinstance(details, dict):
        take_finish(found, details.get("finish_reason"))
        found.output_tokens = _add(found.output_tokens, details.get("generated_tokens"))
        found.prompt_tokens = _either(details.get("input_length"), found.prompt_tokens)
        if isinstance(details.get("prefill"), list) and details["prefill"]:
            found.prompt_tokens = len(details["prefill"])
    elif event.get("generated_text") is not None:
        found.finished = True


def _add(so_far: int | None, more: object) -> int | None:
    number = natural(more)
    return so_far if number is None else (so_far or 0) + number


def _either(value: object, other: int | None) -> int | None:
    number = natural(value)
    return other if number is None else number


def _take_meta(found: Findings, meta: dict[str, Any]) -> None:
    found.prompt_tokens = _either(meta.get("prompt_tokens"), found.prompt_tokens)
    reason = meta.get("finish_reason")
    take_finish(found, reason.get("type") if isinstance(reason, dict) else reason)


def _read_piece(found: Findings, event: dict[str, Any]) -> None:
    """llama.cpp: each event has a piece of text, the last one the totals too."""
    found.recognised = True
    pieces = event.get("tokens")
    last = event["stop"] is True
    if isinstance(pieces, list) and pieces:
        found.tokens += len(pieces)
    elif not last and event["content"] != "":
        found.tokens += 1
    if last:
        _read_totals(found, event)


def _read_totals(found: Findings, event: dict[str, Any]) -> None:
    found.finished = True
    found.output_tokens = _add(found.output_tokens, event.get("tokens_predicted"))
    found.prompt_tokens = _either(event.get("tokens_evaluated"), found.prompt_tokens)
    take_finish(found, event.get("stop_type"))


def _read_typed(found: Findings, kind: str) -> bool:
    """Events of Anthropic's and OpenAI's typed streams that are understood by their type alone."""
    if kind == "content_block_delta" or (kind.startswith("response.") and kind.endswith(".delta")):
        found.recognised = True
        found.tokens += 1
        return True
    if kind == "message_stop":
        found.finished = True
        return True
    if kind in ("error", "response.failed"):
        found.error = True
        return True
    return False


def _read_typed_usage(found: Findings, event: dict[str, Any]) -> None:
    """message_start, message_delta (Anthropic), response.completed, response.incomplete (OpenAI)."""
    inner = next((event[key] for key in ("message", "response") if isinstance(event.get(key), dict)), event)
    if isinstance(event.get("delta"), dict):
        take_finish(found, event["delta"].get("stop_reason"))
    if inner is not event and inner.get("status") in ("completed", "incomplete"):
        take_finish(found, inner["status"])
    try:
        usage = msgspec.convert(inner.get("usage") or {}, Usage)
    except msgspec.ValidationError:
        return
    if event.get("type") == "message_start":
        usage.output_tokens = None  # a figure given before the first token is not the total
    take_usage(found, usage)


def read_answer(found: Findings, body: bytes) -> None:
    """Read a whole plain answer; what is not JSON of a known form is ignored."""
    try:
        decoded = _ANSWERS.decode(body)
    except UNREADABLE:
        return
    if isinstance(decoded, Answer):
        _read_one(found, decoded)
        return
    for answer in decoded:
        _read_one(found, answer)


def _read_one(found: Findings, answer: Answer) -> None:
    found.error = found.error or answer.error is not None
    for choice in answer.choices or ():
        take_finish(found, choice.finish_reason)
    if answer.stop_reason is not None:
        take_finish(found, answer.stop_reason)
    if answer.status is not None:
        take_finish(found, answer.status)
    if isinstance(answer.details, dict):
        _read_tgi(found, {"token": None, "details": answer.details})
    if isinstance(answer.meta_info, dict):
        found.recognised = True
        found.output_tokens = _add(found.output_tokens, answer.meta_info.get("completion_tokens"))
        _take_meta(found, answer.meta_info)
    if answer.tokens_predicted is not None:
        found.recognised = True
        _read_totals(found, msgspec.to_builtins(answer))
    if answer.usage is not None:
        take_usage(found, answer.usage)
    found.recognised = found.recognised or answer.usage is not None or answer.choices is not None
