"""Writes docs/metrics.md to standard output."""

import sys

from kvctl.metrics.document import document

sys.stdout.write(document())
