"""One reader for each form of body: what such a body asks of the engine."""

from collections.abc import Awaitable, Callable

from kvctl.engines.base import Form, Route
from kvctl.proxy.readers import anthropic, native, openai, pooling, responses, vllm
from kvctl.proxy.readers.base import Body, Counted, Facts, read_any

Read = Callable[[Facts, Route, Body, int], Awaitable[Counted]]

READERS: dict[Form, Read] = {
    Form.CHAT: openai.read_chat,
    Form.CHAT_BATCH: openai.read_chat_batch,
    Form.COMPLETION: openai.read_completion,
    Form.RESPONSES: responses.read_responses,
    Form.MESSAGES: anthropic.read_messages,
    Form.VLLM_GENERATE: vllm.read_generate,
    Form.INVOCATIONS: vllm.read_invocations,
    Form.TGI_GENERATE: native.read_tgi,
    Form.SGLANG_GENERATE: native.read_sglang,
    Form.PLAIN_GENERATE: native.read_plain,
    Form.LLAMACPP_COMPLETION: native.read_llamacpp,
    Form.EMBED: pooling.read_embed,
    Form.SCORE: pooling.read_score,
    Form.RERANK: pooling.read_rerank,
    Form.OTHER: read_any,
}
"""Readers of JSON bodies; ``Form.AUDIO`` is not JSON and is read by ``readers.audio``."""
