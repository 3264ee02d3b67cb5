"""Every setting: its key, default, unit, bounds and meaning, once.

The key is at once the TOML key, the environment variable (KVCTL_ and the key in capitals, dots as
underscores) and the flag (two dashes, underscores as dashes). docs/configuration.md is generated from here.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvctl.core.outcomes import Policy
from kvctl.settings import types as t
from kvctl.settings.checks import disagreements
from kvctl.settings.units import Address
from kvctl.settings.usual import ADMIN_SOCKET, STATE_DIR

ENV_PREFIX = "KVCTL_"
MS, MIN, HOUR, DAY = 0.001, 60, 3600, 86400
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
AT_ODDS = "at_odds"  # the type of the errors between settings
MANY = 10**9  # KV tokens: beyond any pool

_SIDES = ("ge", "le")  # the attributes of pydantic's bounds


class Layer(StrEnum):
    """Where a value may come from; a later one wins over an earlier one."""

    DEFAULT = "default"
    FILE = "file"
    ENV = "env"
    SECRET = "secret"  # noqa: S105 - a word, not one
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the value in force came from; ``where`` names file and line, variable or flag."""

    layer: Layer
    where: str = ""


class Settings(BaseSettings):
    """All settings, valid and in base units: seconds, bytes, KV tokens, shares of one.

    Made of keyword arguments alone; ``load`` adds what files and environment say.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        enable_decoding=False,
        use_attribute_docstrings=True,
    )

    engine_url: t.BaseUrl
    """The engine: base URL of its API, with or without /v1."""
    engine: t.Engine = "auto"
    """Whose metrics the engine speaks; auto: found out."""
    listen: t.Address = Address("127.0.0.1", 8080)
    """Where callers connect."""
    base_path: t.BasePath = ""
    """Prefix of every route of the data port."""
    admin_listen: t.Address = Address("127.0.0.1", 9109)
    """Where /metrics, /healthz and /readyz are served. Nothing changes anything there."""
    admin_socket: t.SocketPath = ADMIN_SOCKET
    """Unix socket of the admin API, mode 0660. A user who may not write there: $XDG_RUNTIME_DIR/kvctl."""
    state_dir: t.WholePath = STATE_DIR
    """Where overrides and audit outlive a restart. A user who may not write there: ~/.local/state/kvctl."""

    margin: t.Ratio = Field(default=0.05, ge=0, le=0.95)
    """Share of the capacity that is kept free."""
    margin_min: t.Ratio = Field(default=0.0, ge=0, le=0.95)
    """Least margin that an override may set."""
    margin_max: t.Ratio = Field(default=0.5, ge=0, le=0.95)
    """Largest margin that an override may set."""
    policy: t.Policy = Policy.FORECAST
    """What is weighed against the budget: the forecast, the worst cases (static), or nothing (none)."""
    max_context: t.MaybeCount = Field(default=None, ge=1, le=MANY)
    """Refuse requests whose prompt and allowed output pass this."""
    capacity_tokens: t.MaybeCount = Field(default=None, ge=1, le=MANY)
    """KV tokens of one engine rank, where the engine does not say."""
    capacity_force: t.Switch = False
    """Believe capacity_tokens even where the engine says otherwise."""
    fallback_budget_tokens: t.Count = Field(default=16384, ge=1, le=MANY)
    """Budget while the capacity is unknown or the telemetry is stale."""
    plan_model: t.MaybePath = None
    """The model's folder (config.json), to plan the pool; none: the folder that tokenizer names."""
    plan_flags: t.PlanFlags = ""
    """Flags of kvctl plan that the engine does not tell, such as --tp 2 --gpu H100."""
    max_logprobs: t.MaybeCount = Field(default=20, ge=0, le=MANY)
    """Log-probabilities a token that a request may ask for; they take memory that no KV budget covers."""
    overload_status: t.OverloadStatus = 429
    """Status of a refusal for want of budget."""
    ttft_target: t.MaybeDuration = Field(default=2.0, ge=10 * MS, le=HOUR)
    """Time to the first token that callers are promised; none: the prefill backlog is not guarded."""
    itl_target: t.MaybeDuration = Field(default=0.1, ge=1 * MS, le=MIN)
    """Time between tokens that callers are promised; none: the decode concurrency is not guarded."""
    max_num_seqs: t.MaybeCount = Field(default=None, ge=1, le=MANY)
    """The engine's --max-num-seqs; none: inferred from what it runs while others wait."""
    retry_after_max: t.Duration = Field(default=60.0, ge=1, le=HOUR)
    """Longest Retry-After that is sent."""

    tick_interval: t.Duration = Field(default=0.2, ge=10 * MS, le=10)
    """How often budget and forecast are recomputed."""
    scrape_interval: t.Duration = Field(default=0.2, ge=10 * MS, le=MIN)
    """How often the engine's metrics are read."""
    scrape_timeout: t.Duration = Field(default=1.0, ge=10 * MS, le=MIN)
    """Deadline of one reading."""
    scrape_max_bytes: t.Size = Field(default=16 * MIB, ge=4 * KIB, le=GIB)
    """Largest metrics page that is read."""
    stale_after: t.Duration = Field(default=10.0, ge=20 * MS, le=HOUR)
    """Age at which the engine's telemetry is no longer believed."""
    stall_timeout: t.Duration = Field(default=30.0, ge=50 * MS, le=HOUR)
    """Time without a token, with requests in flight, after which the engine is wedged."""

    max_body_bytes: t.Size = Field(default=64 * MIB, ge=KIB, le=4 * GIB)
    """Largest body of one request."""
    max_body_bytes_total: t.Size = Field(default=512 * MIB, ge=KIB, le=TIB)
    """Bodies held at once, over all requests."""
    header_timeout: t.Duration = Field(default=10.0, ge=10 * MS, le=HOUR)
    """Time a caller has to send the headers."""
    body_timeout: t.Duration = Field(default=60.0, ge=10 * MS, le=HOUR)
    """Time a caller has to send the body."""
    connect_timeout: t.Duration = Field(default=5.0, ge=10 * MS, le=5 * MIN)
    """Deadline of connecting to the engine."""
    client_write_timeout: t.Duration = Field(default=60.0, ge=10 * MS, le=HOUR)
    """Time a caller may stop reading before the answer is cut."""
    upstream_read_timeout: t.MaybeDuration = Field(default=None, ge=10 * MS, le=DAY)
    """Longest silence of the engine within one answer."""
    drain_timeout: t.Duration = Field(default=600.0, ge=0, le=DAY)
    """Time that running answers have to end when kvctl stops."""

    gpus: t.Gpus = ("all",)
    """The engine's cards; name them where others run: of all, one broken among good ones closes nothing."""
    gpu_interval: t.Duration = Field(default=1.0, ge=10 * MS, le=MIN)
    """How often the cards are read."""
    gpu_timeout: t.Duration = Field(default=2.0, ge=10 * MS, le=MIN)
    """Deadline of one reading of the cards."""
    gpu_guard: t.Size = Field(default=GIB, ge=0, le=TIB)
    """Free memory of a card below which pressure is put on the budget."""

    tokenizer: t.Text = "engine"
    """Who counts tokens: engine, a path of local tokenizer files, or bound (bytes)."""
    tokenize_inline_bytes: t.Size = Field(default=2048, ge=0, le=MIB)
    """Prompts up to this size are counted on the event loop."""
    tokenize_workers: t.Count = Field(default=2, ge=1, le=64)
    """Threads that count longer prompts."""
    tokenize_timeout: t.Duration = Field(default=5.0, ge=10 * MS, le=5 * MIN)
    """Deadline of counting, after which bytes bound the count."""

    override_ttl_max: t.Duration = Field(default=24.0 * HOUR, ge=1, le=30 * DAY)
    """Longest life of an override."""
    log_level: t.LogLevel = "info"
    """Least severity that is logged."""
    log_format: t.LogFormat = "text"
    """Form of the log lines."""
    access_log: t.Switch = False
    """One log line for each request."""

    routes_pass: t.Routes = Field(default=(), alias="routes.pass")
    """POST routes, unknown to kvctl, that are passed to the engine uncounted."""
    routes_admin_pass: t.Routes = Field(default=(), alias="routes.admin_pass")
    """Engine administration routes that are passed all the same."""

    _origins: Mapping[str, Origin] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the library's signature
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What ``load`` found and hands in; nothing from the process's environment behind its back."""
        return (init_settings,)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        shown = self.model_dump(mode="json")
        errors: list[InitErrorDetails] = [
            {
                "type": PydanticCustomError(AT_ODDS, "{text}", {"text": text.format_map(shown)}),
                "loc": (key,),
                "input": text,
            }
            for key, text in disagreements(self)
        ]
        if errors:
            raise ValidationError.from_exception_data("Settings", errors)
        return self

    def origin(self, key: str) -> Origin:
        """Where the value of ``key`` came from."""
        return self._origins.get(key, Origin(Layer.DEFAULT))

    def shown(self, key: str) -> str:
        """The value of ``key`` as an operator would write it."""
        return SPECS[key].show(getattr(self, SPECS[key].attribute))


@dataclass(frozen=True, slots=True)
class Spec:
    """What people see of one field of the model."""

    attribute: str
    field: FieldInfo

    @property
    def key(self) -> str:
        """Its TOML key."""
        return self.field.alias or self.attribute

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.attribute.upper()

    @property
    def flag(self) -> str:
        """Its flag of ``kvctl serve``."""
        return "--" + self.attribute.replace("_", "-")

    @property
    def form(self) -> t.Form:
        """How its values are written."""
        return next(each for each in self.field.metadata if isinstance(each, t.Form))

    @property
    def bounds(self) -> tuple[Any, ...]:
        """The least and the most allowed, in base units; empty: no bounds."""
        return tuple(
            getattr(each, side) for side in _SIDES for each in self.field.metadata if hasattr(each, side)
        )

    @property
    def _adapter(self) -> TypeAdapter[Any]:
        kept = [each for each in self.field.metadata if not any(hasattr(each, side) for side in _SIDES)]
        annotated: Any = Annotated[self.field.annotation, *kept]
        return TypeAdapter(annotated)

    def read(self, raw: object) -> Any:
        """The value of ``raw``, its bounds not looked at. Raises ValueError with a text for people."""
        try:
            return self._adapter.validate_python(raw)
        except ValidationError as error:
            raise ValueError(self.complaint(error.errors()[0])) from None

    def show(self, value: object) -> str:
        """A value as an operator would write it."""
        return str(self._adapter.dump_python(value, mode="json", warnings=False))

    def complaint(self, error: ErrorDetails) -> str:
        """What is wrong with a value, and what to write instead."""
        context = error.get("ctx", {})
        match error["type"]:
            case "value_error":
                message = str(context["error"])
            case "greater_than_equal":
                message = f"is below the least allowed, {self.show(context['ge'])}"
            case "less_than_equal":
                message = f"is above the most allowed, {self.show(context['le'])}"
            case _:
                message = "does not fit"
        return message if ": " in message else f"{message}; write {self.form.expects}"


SPECS: Mapping[str, Spec] = MappingProxyType(
    {spec.key: spec for spec in itertools.starmap(Spec, Settings.model_fields.items())}
)
