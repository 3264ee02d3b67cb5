"""What may reach a terminal: names, ids and reasons are chosen by strangers.

A character that does not print (escape sequences, line ends, marks that change the writing direction) is
escaped, so that no name moves the cursor, paints the screen, hides what follows or makes a line of its own.
"""

import json
from typing import Any


def harmless(text: str) -> str:
    """``text`` as one printable line; other characters are escaped as Python does."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shown(document: Any) -> Any:
    """A JSON document with every text and key made ``harmless``."""
    if isinstance(document, str):
        return harmless(document)
    if isinstance(document, dict):
        return {harmless(key): shown(value) for key, value in document.items()}
    if isinstance(document, list):
        return [shown(value) for value in document]
    return document


def as_json(document: object, *, indent: int | None = None) -> str:
    """JSON that a program reads unchanged and that cannot control a terminal."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    if text.isprintable():
        return text
    # outside of strings the only unprintable characters in JSON are its own line ends
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)
