"""The short way through the sandbox gives what jinja2's own sandbox gives, and opens nothing."""

from itertools import product
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvctl.tokens.sandbox import sandbox

VALUES: dict[str, Any] = {
    "text": " a {x} B ",
    "empty": "",
    "message": {"role": "user", "content": "c", "items": "a key named like a method", "__class__": "k"},
    "nothing": {},
    "many": [1, "b"],
    "number": 3,
    "flag": True,
    "none": None,
}
ATTRIBUTES = (
    *(
        "role",
        "content",
        "items",
        "keys",
        "get",
        "pop",
        "update",
        "clear",
        "append",
        "strip",
        "split",
        "upper",
    ),
    *("startswith", "format", "format_map", "encode", "real", "__class__", "__len__", "_private", "absent"),
    *("first", "last", "index", "index0", "length", "mro", "isoformat"),
)
CALLS = (
    "text.strip()",
    "text.strip().split('{')",
    "text.startswith(' a')",
    "text.startswith('a', 1)",
    "text.format(x=1)",
    "text.format(x=text.__class__)",
    "'{0.__class__}'.format(text)",
    "text.format_map({'x': 2})",
    "text.replace('a', 'b').upper()",
    "text.strip(1)",
    "text.startswith(wrong=1)",
    "text.join(many)",
    "text.absent()",
    "','.join(message)",
    "message.get('role')",
    "message.items() | list",
    "message.pop('role')",
    "message.update({'a': 1})",
    "message.setdefault('z', 1)",
    "many.append(4)",
    "none.strip()",
    "number.bit_length()",
    "text.__class__.__mro__",
    "message.role.upper()",
    "range(3) | list",
)
LOOPS = (
    "{% for m in many %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}",
    "{% for m in many %}{{ loop.revindex }}{{ loop.previtem }}{{ loop.depth }}{% endfor %}",
    "{% for m in many %}{{ loop.cycle('x', 'y') }}{{ loop.changed(m) }}{{ loop.absent }}{% endfor %}",
    "{% for m in many %}{{ text.strip() }}{{ loop._iterable }}{{ loop.__class__ }}{% endfor %}",
    "{% set ns = namespace(a=text) %}{% set ns.a = ns.a.strip() %}{{ ns.a }}{{ ns.__class__ }}",
    "{% block b %}{{ text.strip() }}{% endblock %}",
    "{% macro m(x) %}{{ x.role }}{% endmacro %}{{ m(message) }}{{ m(none) }}",
)


def stock() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)


def outcome(environment: Any, source: str) -> str:
    """What is printed, or how it fails; addresses of objects cut off."""
    try:
        made: str = environment.from_string(source).render(VALUES)
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        made = f"{type(error).__name__}: {error}"
    return made.partition(" at 0x")[0]


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_attributes_are_those_of_the_sandbox(attribute: str) -> None:
    for name, form in product(VALUES, ("{{ %s.%s }}", "{{ %s['%s'] }}", "{{ %s.%s is defined }}")):
        source = form % (name, attribute)
        assert outcome(sandbox(), source) == outcome(stock(), source), source


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_those_of_the_sandbox(call: str) -> None:
    for source in (f"{{{{ {call} }}}}", f"{{% for i in many %}}{{{{ {call} }}}}{{% endfor %}}"):
        assert outcome(sandbox(), source) == outcome(stock(), source), source


@pytest.mark.parametrize("source", LOOPS)
def test_loops_blocks_and_macros_are_those_of_the_sandbox(source: str) -> None:
    assert outcome(sandbox(), source) == outcome(stock(), source)


def test_a_template_reaches_nothing_behind_a_text() -> None:
    assert "SecurityError" in outcome(sandbox(), "{{ ''.__class__.__mro__ }}")
    assert outcome(sandbox(), "{{ '{0.__class__}'.format('') }}") == ""
