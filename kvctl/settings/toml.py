"""The TOML file, with what parsers do not keep: lines. Standard library only."""

import re
import tomllib
from pathlib import Path
from typing import Any

SECTIONS = ("routes",)
_HEADER = re.compile(r"""\s*\[+\s*["']?([^\]"']+?)["']?\s*\]""")
_UNQUOTED = re.compile(r"""\s*([\w.-]+)\s*=\s*([^"'\[{#\s][^#]*?)\s*(?:#.*)?""")


def read(path: Path, *, must_exist: bool = False) -> tuple[dict[str, Any], str, list[str]]:
    """The document with dotted keys for its sections, its text, and what is wrong with it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the path
        if isinstance(error, FileNotFoundError) and not must_exist:
            return {}, "", []
        denied = "; kvctl's user must be able to read it: chgrp kvctl, chmod 640, say"
        remedy = denied if isinstance(error, PermissionError) else ""
        why = getattr(error, "strerror", None) or error
        return {}, "", [f"{path}: cannot be read: {why}{remedy}"]
    try:
        return _flat(tomllib.loads(text)), text, []
    except (ValueError, RecursionError) as error:  # not all are TOMLDecodeErrors: endless digits, say
        return {}, text, [_syntax_problem(path, text, str(error))]


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    for name in SECTIONS:
        if isinstance(document.get(name), dict):
            document |= {f"{name}.{key}": value for key, value in document.pop(name).items()}
    return document


def line_of(text: str, key: str) -> int:
    """The line on which a key is set, counted from 1 (of a table that has it: its own line)."""
    section = ""
    for line, written in enumerate(text.splitlines(), 1):
        header, (left, equals, _) = _HEADER.match(written), written.partition("=")
        section = f"{header[1]}." if header else section
        name = section + re.sub(r"""["'\s]""", "", left) if equals and not header else section
        if f"{name}.".startswith(f"{key}."):
            return line
    return 1


def _syntax_problem(path: Path, text: str, message: str) -> str:
    lines = text.splitlines() or [""]
    found = re.search(r"at line (\d+)", message)
    line = min(int(found[1]), len(lines)) if found else len(lines)
    unquoted = _UNQUOTED.fullmatch(lines[line - 1])
    remedy = f'; text needs quotes: {unquoted[1]} = "{unquoted[2]}"' if unquoted else ""
    return f"{path}:{line}: is not TOML: {message}{remedy}"
