"""kvctl's own Prometheus metrics: the table of all of them, what feeds each, and the page."""

from kvctl.metrics.catalog import CATALOG, Kind, Spec
from kvctl.metrics.exposition import CONTENT_TYPE
from kvctl.metrics.page import Metrics
from kvctl.metrics.views import ConfigView, SourceView

__all__ = ["CATALOG", "CONTENT_TYPE", "ConfigView", "Kind", "Metrics", "SourceView", "Spec"]
