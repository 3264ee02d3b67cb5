"""docs/metrics.md, made from the catalog."""

from kvctl.metrics.catalog import SECTIONS, Kind, Spec

_HEAD = """# Metrics

The page is `/metrics` on the admin listener (`KVCTL_ADMIN_LISTEN`, 127.0.0.1:9109 by default). This file is
made from the table in kvctl/metrics/catalog.py by `python -m kvctl.metrics > docs/metrics.md`.

Everything unknown has no series: a missing series means "not known now", a 0 means zero. Words of a label are
present from the start, at 0. Beside these the page has the usual `process_*` metrics of the daemon.
"""


def document() -> str:
    """The whole file."""
    parts = [_HEAD]
    for title, specs in SECTIONS.items():
        parts += [f"## {title}\n", _table(specs), _words(specs)]
    return "\n".join(part for part in parts if part)


def _table(specs: tuple[Spec, ...]) -> str:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for spec in specs:
        labels = ", ".join(spec.labels) or "-"
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help}{_buckets(spec)} |")
    return "\n".join(rows) + "\n"


def _buckets(spec: Spec) -> str:
    if spec.kind is not Kind.HISTOGRAM:
        return ""
    return f" Buckets from {spec.buckets[0]:g} to {spec.buckets[-1]:g}."


def _words(specs: tuple[Spec, ...]) -> str:
    """The closed labels of a section."""
    lines = [
        f"* `{spec.name}`, `{label}`: {', '.join(f'`{word}`' for word in words)}"
        for spec in specs
        for label, words in spec.labels.items()
        if words
    ]
    return "\n".join(lines) + "\n" if lines else ""
