"""The settings' types: how pydantic reads, checks and writes each kind of value."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SecretStr, StringConstraints

from kvctl.core.outcomes import LargeRequests as LargeRequestsWord
from kvctl.core.outcomes import MetricsView as MetricsViewWord
from kvctl.core.outcomes import Policy as PolicyWord
from kvctl.settings import units
from kvctl.settings.engines import EngineEntry, read_entries, show_entries
from kvctl.settings.tenants import TenantEntry, read_tenants, show_tenants

_ONE_WORD = re.compile(r"[!-~]+").fullmatch
_CARD = r"(?i)^(all|auto|none|\d+|(GPU|MIG)-[0-9a-z/-]+|([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(\.[0-7])?)$"


@dataclass(frozen=True, slots=True)
class Form:
    """``name`` is the placeholder of the flag; ``expects`` completes "write ..."."""

    name: str
    expects: str


def _shown_by(show: Callable[[Any], str]) -> PlainSerializer:
    """What JSON mode writes: text that reads back as the same value."""
    return PlainSerializer(lambda value: "none" if value is None else show(value), when_used="json")


def _or_none(given: object) -> object:
    return None if _lower(given) == "none" else given


def _lower(given: object) -> object:
    return given.lower() if isinstance(given, str) else given


def _as_share(given: object) -> object:
    """A switch is a share too: of all, or of none."""
    word = str(given).lower() if isinstance(given, bool | str) else ""
    return {"true": 1.0, "false": 0.0}.get(word, given)


def _number(given: object) -> object:
    return int(given) if isinstance(given, str) and given.isdecimal() else given


def _listed(given: object) -> object:
    """What the environment separates by commas; a number is a list of one."""
    text = str(given) if isinstance(given, str | int) else None
    return given if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _cards(given: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(given)) < len(given) or (len(given) > 1 and {"all", "auto", "none"}.intersection(given)):
        raise ValueError("names a card twice")
    return given


def _header_safe(given: SecretStr | None) -> SecretStr | None:
    """It goes into a header of its own; no word of it is told."""
    if given is not None and not (given.get_secret_value().isascii() and _ONE_WORD(given.get_secret_value())):
        raise ValueError("has characters that no header takes")
    return given


def _plan_flags(given: str) -> str:
    """The planner judges them: the daemon would only find out when the engine is there."""
    from kvctl.plan.flag_text import parse_flags  # noqa: PLC0415 - most settings have none

    if given:
        parse_flags(given)
    return given


_SECONDS = (_shown_by(units.show_duration), Form("duration", "a time such as 200ms, 30s or 10min"))
_COUNT = (_shown_by(str), Form("number", "a whole number"))
_LIST = (BeforeValidator(_listed), _shown_by(",".join))
_WORD = BeforeValidator(_lower)

Duration = Annotated[float, BeforeValidator(units.duration), *_SECONDS]
MaybeDuration = Annotated[Duration | None, BeforeValidator(_or_none), *_SECONDS]
Size = Annotated[
    int, BeforeValidator(units.size), _shown_by(units.show_size), Form("size", "a size such as 64KiB or 1GiB")
]
Ratio = Annotated[
    float,
    BeforeValidator(units.ratio),
    _shown_by(lambda share: f"{share * 100:g}%"),
    Form("ratio", "a share such as 8% or 0.08"),
]
Enforced = Annotated[
    float,
    BeforeValidator(units.ratio),
    BeforeValidator(_as_share),
    _shown_by(lambda share: f"{share * 100:g}%"),
    Form("ratio", "true, false, or a share such as 10%"),
]
Count = Annotated[int, *_COUNT]
MaybeCount = Annotated[int | None, BeforeValidator(_or_none), *_COUNT]
Switch = Annotated[bool, _shown_by(lambda on: str(on).lower()), Form("switch", "true or false")]
Text = Annotated[
    str, StringConstraints(strip_whitespace=True, pattern=r"^\P{Cc}+$"), Form("text", "text, in one line")
]
HIDDEN = "********"
Secret = Annotated[
    SecretStr | None,
    BeforeValidator(_or_none),
    AfterValidator(_header_safe),
    _shown_by(lambda _: HIDDEN),
    Form("secret", "printable ASCII without spaces"),
]
WholePath = Annotated[Path, AfterValidator(units.whole_path), Form("path", "an absolute path")]
MaybePath = Annotated[
    Path | None,
    BeforeValidator(_or_none),
    AfterValidator(lambda path: None if path is None else units.whole_path(path)),
    _shown_by(str),
    Form("path", "an absolute path"),
]
PlanFlags = Annotated[
    str,
    StringConstraints(strip_whitespace=True),
    AfterValidator(_plan_flags),
    Form("flags", "flags of kvctl plan, such as --tp 2 --gpu H100, or nothing"),
]
SocketPath = Annotated[
    Path, AfterValidator(units.socket_path), Form("path", "an absolute path of at most 107 bytes")
]
Address = Annotated[
    units.Address,
    BeforeValidator(units.address),
    _shown_by(str),
    Form("address", "host:port, [::1]:port or :port"),
]
MaybeAddress = Annotated[
    Address | None,
    BeforeValidator(_or_none),
    _shown_by(str),
    Form("address", "host:port, [::1]:port, :port, or none"),
]
BaseUrl = Annotated[
    str,
    BeforeValidator(units.base_url),
    Form("url", "a base URL such as http://127.0.0.1:8000, or unix:/PATH"),
]
BasePath = Annotated[
    str,
    Field(pattern=r"^(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*$"),
    Form("prefix", "a prefix such as /llm, or nothing"),
]
Routes = Annotated[
    tuple[Annotated[str, Field(pattern=r"^/\S+$")], ...],
    *_LIST,
    Form("routes", "a list such as /v1/rerank,/v1/score"),
]
Gpus = Annotated[
    tuple[Annotated[str, Field(pattern=_CARD, coerce_numbers_to_str=True)], ...],
    Field(min_length=1),
    AfterValidator(_cards),
    *_LIST,
    Form("cards", "all, auto, none, or a list of indexes, UUIDs or PCI ids"),
]
Engine = Annotated[
    Literal["auto", "vllm", "tgi", "sglang", "llamacpp", "sim"],
    _WORD,
    Form("engine", "auto, vllm, tgi, sglang, llamacpp or sim"),
]
Policy = Annotated[PolicyWord, _WORD, Form("policy", "forecast, static or none")]
OverloadStatus = Annotated[
    Literal[429, 503, 529], BeforeValidator(_number), Form("status", "429, 503 or 529")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], _WORD, Form("level", "debug, info, warning or error")
]
LogFormat = Annotated[Literal["text", "json"], _WORD, Form("format", "text or json")]
MetricsView = Annotated[MetricsViewWord, _WORD, Form("word", "engine or gate")]
NvmlIsolation = Annotated[Literal["process", "thread"], _WORD, Form("word", "process or thread")]
RankPinning = Annotated[Literal["auto", "off"], _WORD, Form("switch", "auto or off")]
Isolation = Annotated[Literal["thread", "process"], _WORD, Form("word", "thread or process")]
PrefixSharing = Annotated[Literal["auto", "off"], _WORD, Form("switch", "auto or off")]
LargeRequests = Annotated[LargeRequestsWord, _WORD, Form("word", "refuse or reserve")]
TenantHeader = Annotated[
    str,
    Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9-]*)?$"),
    Form("header", "the name of a header, or nothing"),
]
ServerName = Annotated[
    str,
    Field(pattern=r"^([A-Za-z0-9_.:-]{1,253})?$"),
    Form("name", "a host name, or nothing"),
]
Tenants = Annotated[
    tuple[TenantEntry, ...],
    BeforeValidator(read_tenants),
    _shown_by(show_tenants),
    Form("tables", "[[tenants]] tables, each with a name"),
]
Engines = Annotated[
    tuple[EngineEntry, ...],
    BeforeValidator(read_entries),
    _shown_by(show_entries),
    Form("tables", "[[engines]] tables, each with name and url"),
]
