"""Limits of a request, read exactly as the engine reads them.

The engine validates with pydantic in lax mode: ``"7"``, ``true``, ``" 7 "``, ``"1_000"`` and ``7.0`` are
numbers; ``"1e2"``, ``7.5`` and ``"null"`` are refused. pydantic itself reads them here, so the two cannot
drift apart. Law 4: nothing malformed may ever shrink a claim.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

LARGEST = 2**53
"""Larger limits are cut to this: it is beyond every context, and doubles are still exact up to here."""

_INT = TypeAdapter(int).validator
_BOOL = TypeAdapter(bool).validator


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRequest:
    """A body that cannot be served, with the answer in the engine's own words."""

    message: str
    status: int = 400
    type: str = "BadRequestError"
    param: str | None = None
    code: str | int = 400


@dataclass(frozen=True, slots=True)
class Wrong:
    """One value that the engine's validation refuses."""

    kind: str  # pydantic's word
    loc: str  # "body.max_tokens"
    message: str
    shown: str  # the value, shortened
    context: Mapping[str, Any] | None = None  # the violated rule, for some kinds

    def line(self) -> str:
        """The engine's rendering of it: a Python dictionary."""
        told = {"type": self.kind, "loc": self.loc, "msg": self.message, "input": self.shown}
        return f"  {told if self.context is None else told | {'ctx': self.context}}"


def malformed(
    kind: str, loc: str, message: str, shown: str, context: Mapping[str, Any] | None = None
) -> BadRequest:
    """One validation error, in the engine's format."""
    return validation_errors([Wrong(kind, loc, message, shown, context)])


def validation_errors(wrongs: Iterable[Wrong]) -> BadRequest:
    """All validation errors of a body, in the engine's format; ``wrongs`` must not be empty."""
    found = list(wrongs)
    label = "validation error" if len(found) == 1 else "validation errors"
    lines = "\n".join(wrong.line() for wrong in found)
    return BadRequest(message=f"{len(found)} {label}:\n{lines}", type="Bad Request", param=found[0].loc)


def _show(value: object) -> str:
    """A value as the engine shows it: containers described, the rest cut at 200 characters."""
    if isinstance(value, (list, dict)):
        return f"<{type(value).__name__} of {len(value)} items>"
    try:
        text = str(value)
    except ValueError:  # an int of more digits than Python prints
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else text[:200] + "...[truncated]"


class Fields:
    """Reads fields of a JSON object; collects what the engine would refuse in ``wrongs``.

    ``place``: where the object stands in the body, as the engine names it.
    """

    __slots__ = ("_data", "_place", "wrongs")

    def __init__(self, data: Mapping[str, Any], place: str = "body") -> None:
        self._data = data
        self._place = place
        self.wrongs: list[Wrong] = []

    def integer(self, name: str, *, nullable: bool = True, least: int | None = None) -> int | None:
        """The number in ``name``; None when unset, null, or refused. ``least`` is the engine's own bound."""
        value = self._data.get(name)
        if value is None and (nullable or name not in self._data):
            return None
        if type(value) is not int:
            try:
                value = int(_INT.validate_python(value))
            except ValidationError as error:
                self._refuse(name, error, value)
                return None
        if least is not None and value < least:
            message = f"Input should be greater than or equal to {least}"
            self.wrongs.append(
                Wrong("greater_than_equal", f"{self._place}.{name}", message, str(value), {"ge": least})
            )
            return None
        return min(value, LARGEST)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """The boolean in ``name`` as pydantic reads it (``"yes"``, 1 ...); what it refuses is the default."""
        value = self._data.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        try:
            return bool(_BOOL.validate_python(value))
        except ValidationError:
            return default

    def _refuse(self, name: str, error: ValidationError, value: object) -> None:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        self.wrongs.append(Wrong(first["type"], f"{self._place}.{name}", first["msg"], _show(value)))


def too_small(name: str, value: int) -> BadRequest:
    """The engine's words for an output limit below 1."""
    return BadRequest(
        message=f"{name} must be at least 1, got {value}. (parameter={name}, value={value})", param=name
    )


def too_few_sequences(value: int) -> BadRequest:
    """The engine's words for ``n`` below 1."""
    return BadRequest(message=f"n must be at least 1, got {value}.")
