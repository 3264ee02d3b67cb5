from typing import Any

import jinja2
import pytest

from kvctl.tokens.conversation import conversation
from kvctl.tokens.source import Uncountable, Why
from kvctl.tokens.template import ChatTemplate, template_options
from tests.tokens.tiny import CHATML

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}


def render(source: str, body: Json | None = None, **specials: str) -> str:
    template = ChatTemplate(source, specials)
    body = {"messages": [USER]} | (body or {})
    messages = conversation(body["messages"], wrap=template.wants_parts)
    return template.render(messages, body.get("tools"), template_options(body))


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_without_generation_prompt() -> None:
    assert render(CHATML, {"add_generation_prompt": False}) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("body", "thinks"),
    [
        ({}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_switches(body: Json, thinks: bool) -> None:
    """A08: every way to switch thinking reaches the template."""
    assert ("</think>" in render(CHATML, body)) is not thinks


def test_tojson_escapes_no_html_and_keeps_order() -> None:
    assert render("{{ messages[0] | tojson }}", {"messages": [{"role": "user", "content": "<b>&'é"}]}) == (
        '{"role": "user", "content": "<b>&\'é"}'
    )
    assert (
        render("{{ [1, {'b': 2}] | tojson(indent=1, separators=(',', ':')) }}")
        == '[\n 1,\n {\n  "b":2\n }\n]'
    )


def test_blocks_are_trimmed_and_loops_can_break() -> None:
    source = (
        "  {% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m.role }}\n"
        "  {% endfor %}\n"
    )
    assert render(source, {"messages": [USER, USER]}) == "user\n"


def test_specials_and_options_reach_the_template() -> None:
    assert render(
        "{{ bos_token }}{{ x }}{{ documents }}", {"chat_template_kwargs": {"x": 7}}, bos_token="<s>"
    ) == ("<s>7None")
    assert render("{{ bos_token }}", {"chat_template_kwargs": {"bos_token": "z"}}, bos_token="<s>") == "z"
    assert (
        render("{{ add_generation_prompt }}", {"chat_template_kwargs": {"add_generation_prompt": False}})
        == "True"
    )
    assert render("{{ documents[0].text }}", {"documents": [{"text": "d"}]}) == "d"


def test_strftime_now_gives_a_date() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_generation_blocks_render_their_body() -> None:
    assert (
        render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
        == "hi"
    )


@pytest.mark.parametrize(
    ("content", "end"),
    [("Es ist", "Es ist"), ("Es ist  ", "Es ist  "), ([{"type": "text", "text": "Es"}], "Es")],
)
def test_the_final_message_is_continued(content: Any, end: str) -> None:
    """A08: continue_final_message with add_generation_prompt=false ends the prompt inside the last turn."""
    body = {
        "messages": [USER, {"role": "assistant", "content": content}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert render(CHATML, body).endswith("<|im_start|>assistant\n" + end)


def test_a_template_that_strips_is_continued_without_the_spaces() -> None:
    source = "{% for m in messages %}[{{ m.content.strip() }}]{% endfor %}"
    body = {
        "messages": [{"role": "assistant", "content": "a b  "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert render(source, body) == "[a b"


STRICT = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}ok"


@pytest.mark.parametrize(
    "source",
    [
        STRICT,
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ lipsum.__globals__.os }}",
    ],
)
def test_a_template_that_fails_is_no_count(source: str) -> None:
    """A27, A08: a template that raises or tries to leave the sandbox is a missing count, not an error."""
    with pytest.raises(Uncountable) as raised:
        render(source)
    assert raised.value.why is Why.TEMPLATE


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": [1]},
        {"continue_final_message": True},
        {"add_generation_prompt": "no"},
    ],
)
def test_options_that_are_not_certain_are_no_count(body: Json) -> None:
    """A08: a template that the request brings along is never run here."""
    with pytest.raises(Uncountable) as raised:
        render(CHATML, body)
    assert raised.value.why is Why.SHAPE


def test_a_template_with_a_syntax_error_is_told_at_once() -> None:
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate("{% if %}", {})


def test_messages_are_not_changed_by_rendering() -> None:
    messages = [USER, {"role": "assistant", "content": "x"}]
    template = ChatTemplate(CHATML, {})
    template.render(messages, None, {"continue_final_message": True, "add_generation_prompt": False})
    assert messages == [USER, {"role": "assistant", "content": "x"}]


LOOP = "{% for p in c %}{{ p }}{% endfor %}"
EACH = "{% for m in messages %}"
PARTS = [
    EACH + "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    EACH + "{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% for m in messages[1:] %}{% for p in m['content'] | reverse %}{{ p }}{% endfor %}{% endfor %}",
    "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
    EACH + "{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}",
    "{% macro f(c) %}" + LOOP + "{% endmacro %}" + EACH + "{{ f(m.content) }}{% endfor %}",
    "{% macro f(a, c) %}" + LOOP + "{% endmacro %}" + EACH + "{{ f(1, c=m.content) }}{% endfor %}",
]
STRINGS = [
    CHATML,
    "{{ messages[0].content }}",
    EACH + "{{ m.content }}{% endfor %}",
    EACH + "{% for t in m.tool_calls %}{{ t }}{% endfor %}{{ m.content | trim }}{% endfor %}",
    "{% macro f(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{{ f(tools) }}",
    "no jinja at all",
]


@pytest.mark.parametrize(("source", "parts"), [(s, True) for s in PARTS] + [(s, False) for s in STRINGS])
def test_content_format(source: str, parts: bool) -> None:
    assert ChatTemplate(source, {}).wants_parts is parts
