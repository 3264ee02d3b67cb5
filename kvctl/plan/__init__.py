"""The capacity planner: how many KV tokens a model has on a card, before the card is rented.

    >>> model = describe(read_config(Path("config.json")), "llama-3-8b")
    >>> plan = make_plan(model, Flags(tp=1), Given(card=card_of("24GiB"), weights_gib=16, overhead_gib=2))
    >>> plan.pool.kv_tokens
    49152

Pure: the standard library only, no clock, no network; the only IO is ``read_config`` and ``index_bytes``,
which read a model's folder. Every ``PlanError`` is one line that names what is wrong and what to give
instead. ``as_document`` is the JSON of ``-o json``; ``crosscheck`` compares a plan with what an engine
reports.
"""

from kvctl.plan.architecture import describe
from kvctl.plan.cards import GIB, Card, card_of
from kvctl.plan.crosscheck import Crosscheck, Verdict, crosscheck, planned_capacity
from kvctl.plan.document import as_document
from kvctl.plan.errors import PlanError, UnknownArchitectureError
from kvctl.plan.explain import Formula, formulas
from kvctl.plan.facts import parse_config, read_config
from kvctl.plan.memory import Given, Memory, Span
from kvctl.plan.planner import Plan, Point, make_plan
from kvctl.plan.recommend import Recommendation, as_toml, recommend
from kvctl.plan.setup import Flags, Setup
from kvctl.plan.shapes import Model
from kvctl.plan.vllm import Pool
from kvctl.plan.weighing import index_bytes

__all__ = [
    "GIB", "Card", "Crosscheck", "Flags", "Formula", "Given", "Memory", "Model", "Plan", "PlanError",
    "Point", "Pool",
    "Recommendation", "Setup", "Span", "UnknownArchitectureError", "Verdict", "as_document", "as_toml",
    "card_of",
    "crosscheck", "describe", "formulas", "index_bytes", "make_plan", "parse_config", "planned_capacity",
    "read_config", "recommend",
]  # fmt: skip
