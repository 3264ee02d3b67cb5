"""Files and folders that the benches' command lines name."""

from argparse import ArgumentTypeError
from pathlib import Path


def file(text: str) -> Path:
    """A file that is there. Raises ArgumentTypeError."""
    if not (found := Path(text)).is_file():
        raise ArgumentTypeError(f"there is no file {text}")
    return found


def tokenizer(text: str) -> Path:
    """A folder with a tokenizer.json in it. Raises ArgumentTypeError."""
    if not (found := Path(text)).joinpath("tokenizer.json").is_file():
        raise ArgumentTypeError(f"there is no tokenizer.json in {text}")
    return found
