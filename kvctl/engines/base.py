"""What kvctl needs to know of an engine. One module per engine; no IO in any of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import EngineInfo, RankSample


class Api(StrEnum):
    """Whose request and error format a route speaks."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    TGI = "tgi"


class Form(StrEnum):
    """What the body of a metered route looks like: which reader counts it and finds its limits."""

    CHAT = "chat"  # messages; max_completion_tokens, max_tokens
    CHAT_BATCH = "chat_batch"  # a list of conversations
    COMPLETION = "completion"  # prompt: text, ids, lists of either, embeddings
    RESPONSES = "responses"  # input, instructions; max_output_tokens
    MESSAGES = "messages"  # Anthropic: system, messages; max_tokens is required
    VLLM_GENERATE = "vllm_generate"  # token ids, sampling_params
    INVOCATIONS = "invocations"  # any of vLLM's other bodies, told apart by its fields
    TGI_GENERATE = "tgi_generate"  # inputs, parameters
    SGLANG_GENERATE = "sglang_generate"  # text, input_ids; sampling_params
    PLAIN_GENERATE = "plain_generate"  # prompt_tokens, max_new_tokens: lengths alone
    LLAMACPP_COMPLETION = "llamacpp_completion"  # prompt; n_predict
    EMBED = "embed"  # input, or messages: prompts only, nothing is generated
    SCORE = "score"  # pairs of texts: prompts only
    RERANK = "rerank"  # a query with each of its documents: prompts only
    AUDIO = "audio"  # multipart with a sound file: bounded by its size
    OTHER = "other"  # nothing known: all that is written counts as prompt


class Treatment(StrEnum):
    """What the proxy does with a route."""

    GENERATE = "generate"  # claim, gate, lease, relay
    PASS = "pass"  # noqa: S105 - relayed, not metered
    REFUSE = "refuse"  # 404 with the route's hint unless the operator lists the path


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route of an engine. ``path`` is the normalised path; ``name`` the metric label.

    A refused route is opened by listing its path: in ``routes.admin_pass`` where ``admin``, else in
    ``routes.pass`` (and then it runs unmetered, as the operator wished).
    """

    method: str  # "GET", "POST", ... or "*"
    path: str  # exact, or with one trailing "/*"
    name: str
    treatment: Treatment
    api: Api = Api.OPENAI
    form: Form = Form.OTHER  # of a metered route
    admin: bool = False  # engine administration
    hint: str = ""  # what the refusal tells the caller


class PageError(ValueError):
    """A metrics page that cannot be used, with the word for it."""

    def __init__(self, fault: SourceFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Engine(Protocol):
    """An engine's adapter. All methods are pure."""

    @property
    def name(self) -> str:
        """What the setting ``engine`` calls it."""
        ...

    @property
    def metrics_path(self) -> str:
        """Where its Prometheus page is."""
        ...

    @property
    def info_path(self) -> str:
        """Where it describes itself, as a JSON object."""
        ...

    @property
    def more_info_paths(self) -> tuple[str, ...]:
        """Where it tells more of itself; what ``info_path`` says counts first."""
        ...

    @property
    def routes(self) -> tuple[Route, ...]:
        """All its routes; what is not among them is refused."""
        ...

    @property
    def pins_ranks(self) -> bool:
        """Whether the header X-data-parallel-rank sends a request to a rank, named as on its metrics page."""
        ...

    @property
    def clamps_output(self) -> bool:
        """Whether it shortens prompt and asked output to its context instead of refusing."""
        ...

    def parse_metrics(self, page: str, at: float) -> list[RankSample]:
        """One sample per rank, never an empty list.

        ``page`` is the whole Prometheus text, ``at`` the monotonic time to date the samples with.
        Raises PageError (``unparsable``, or ``no_series`` when the page has nothing of this engine).
        """
        ...

    def parse_info(self, answer: Mapping[str, Any]) -> EngineInfo:
        """What one of the info paths answered. Unknown shapes give empty fields, never an exception."""
        ...

    def default_output(self, route: Route) -> int | None:
        """Output tokens when the caller sends no limit; None: what is left of the context."""
        ...
