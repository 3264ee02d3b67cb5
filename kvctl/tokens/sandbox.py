"""Where chat templates run: jinja2's immutable sandbox, with the helpers that transformers gives them.

What templates do most (a key of a message, a method of a text, a place in a loop) takes a short way through
the sandbox. It gives the same results, and never skips a check that the sandbox has to make.
"""

import json
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

CLOCK = "strftime_now"
UNSTEADY = (CLOCK, "lipsum", "random")
"""Helpers with which a template may print a different text each time."""

_MISSING = object()
_OF_DICTS = frozenset(dir(dict))  # an attribute goes before a key of that name
_HARMLESS = {
    # the sandbox wraps formatting
    str: frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"},
    LoopContext: frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length", "depth"}),
}
_NONE: frozenset[str] = frozenset()


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """The body alone, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with the short way."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """``obj.attribute`` in a template."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            found = obj.get(attribute, _MISSING)
            return self.undefined(obj=obj, name=attribute) if found is _MISSING else found
        if attribute in _HARMLESS.get(kind, _NONE):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``obj(...)`` in a template."""
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str:
            kwargs.pop("_loop_vars", None)  # from the compiler, for callables that want the context
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which no tokenizer was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the template means the machine's own time


def sandbox() -> jinja2.Environment:
    """An environment for one template."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals[CLOCK] = _strftime_now
    return environment
