"""What may reach a terminal: names, ids and reasons are chosen by strangers.

A character that does not print (escape sequences, line ends, marks that turn the writing direction) is
written out, so that no name moves the cursor, paints the screen, hides what follows or makes a line of its
own.
"""

import json
from typing import Any


def harmless(text: str) -> str:
    """One line of characters that print; what does not is written as Python would."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shown(document: Any) -> Any:
    """A JSON document with every text and key ``harmless``."""
    if isinstance(document, str):
        return harmless(document)
    if isinstance(document, dict):
        return {harmless(key): shown(value) for key, value in document.items()}
    if isinstance(document, list):
        return [shown(value) for value in document]
    return document


def as_json(document: object, *, indent: int | None = None) -> str:
    """JSON that says the same to a program, and nothing to a terminal."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    if text.isprintable():
        return text
    # outside of strings JSON has no characters that do not print but its own line ends
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)
