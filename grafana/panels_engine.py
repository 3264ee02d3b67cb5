"""kvctl-engine: the engine and its cards, as kvctl sees them."""

from grafana.queries import gauge, rate
from grafana.rules import Panel, Query, Row

ENGINE: tuple[Row, ...] = (
    Row(
        title="Engine",
        panels=(
            Panel(
                title="State",
                about="The state that the gate believes the engine is in.",
                unit="short",
                kind="state-timeline",
                width=12,
                queries=(
                    Query(
                        expr="max by (instance, engine, state) (kvctl_engine_state{}) == 1",
                        legend="{{state}}",
                    ),
                ),
            ),
            Panel(
                title="KV usage",
                about="Share of each rank's pool in use, as the engine measures it.",
                unit="percentunit",
                width=12,
                queries=(
                    gauge(
                        "kvctl_engine_kv_usage_ratio",
                        "rank {{rank}}",
                        by="instance, engine, rank",
                        function="max",
                    ),
                ),
            ),
            Panel(
                title="Running and waiting",
                about="Requests in the engine. Anything that waits there was admitted too early.",
                unit="short",
                width=12,
                queries=(
                    gauge("kvctl_engine_running", "running"),
                    gauge("kvctl_engine_waiting", "waiting"),
                ),
            ),
            Panel(
                title="Preemptions",
                about="Requests that the engine threw out and recomputed.",
                unit="short",
                width=12,
                queries=(
                    Query(
                        expr=rate("kvctl_engine_preemptions_total", "instance, engine", function="increase"),
                        legend="{{engine}}",
                    ),
                ),
            ),
        ),
    ),
    Row(
        title="Telemetry",
        panels=(
            Panel(
                title="Age of the last reading",
                about="How long ago a source was last read well.",
                unit="s",
                width=8,
                queries=(
                    Query(
                        expr="time() - max by (instance, source) (kvctl_telemetry_timestamp_seconds{})",
                        legend="{{source}}",
                    ),
                ),
            ),
            Panel(
                title="Time of a reading",
                about="How long the last reading of a source took.",
                unit="s",
                width=8,
                queries=(
                    gauge(
                        "kvctl_telemetry_read_duration_seconds",
                        "{{source}}",
                        by="instance, source",
                        function="max",
                    ),
                ),
            ),
            Panel(
                title="Restarts",
                about="Restarts of the engine seen in its telemetry.",
                unit="short",
                width=8,
                queries=(
                    Query(
                        expr=rate("kvctl_engine_restarts_total", "instance, engine", function="increase"),
                        legend="{{engine}}",
                    ),
                ),
            ),
            Panel(
                title="Capacity by who says it",
                about="Who says how large the pool is: the engine, the operator, the plan or the fallback.",
                unit="short",
                kind="state-timeline",
                width=12,
                height=5,
                queries=(
                    Query(
                        expr="max by (instance, engine, source) (kvctl_capacity_source{}) == 1",
                        legend="{{source}}",
                    ),
                ),
            ),
            Panel(
                title="Context",
                about="The engine's context length.",
                unit="short",
                kind="stat",
                width=6,
                height=5,
                queries=(gauge("kvctl_context_tokens", "{{engine}}", function="max"),),
            ),
            Panel(
                title="Capacity of each rank",
                about="Usable KV tokens of the rank.",
                unit="short",
                kind="stat",
                width=6,
                height=5,
                queries=(
                    gauge("kvctl_engine_capacity_tokens", "rank {{rank}}", by="instance, engine, rank"),
                ),
            ),
        ),
    ),
    Row(
        title="Cards",
        panels=(
            Panel(
                title="Free memory",
                about="Memory of each card that nobody holds.",
                unit="bytes",
                width=8,
                empty="no card",
                queries=(gauge("kvctl_gpu_memory_free_bytes", "{{gpu}}", by="gpu", function="min"),),
            ),
            Panel(
                title="Temperature",
                about="Temperature of each chip.",
                unit="celsius",
                width=8,
                empty="no card tells",
                queries=(gauge("kvctl_gpu_temperature_celsius", "{{gpu}}", by="gpu", function="max"),),
            ),
            Panel(
                title="Throttled",
                about="Why clocks are held down: it explains a falling token rate.",
                unit="short",
                width=8,
                empty="not throttled",
                queries=(
                    Query(
                        expr="max by (gpu, reason) (kvctl_gpu_throttled{}) > 0", legend="{{gpu}} {{reason}}"
                    ),
                ),
            ),
            Panel(
                title="Uncorrected memory errors",
                about="New uncorrected errors of each card: one is a reason to drain it.",
                unit="short",
                width=12,
                empty="no card tells",
                queries=(
                    Query(
                        expr=rate("kvctl_gpu_ecc_uncorrected_errors_total", "gpu", function="increase"),
                        legend="{{gpu}}",
                    ),
                ),
            ),
            Panel(
                title="Memory in use",
                about="Memory of each card in use, with the driver's reserve where it is not told apart.",
                unit="bytes",
                width=12,
                empty="no card",
                queries=(gauge("kvctl_gpu_memory_used_bytes", "{{gpu}}", by="gpu", function="max"),),
            ),
            Panel(
                title="What the driver tells",
                about="Xid and memory errors that the driver told by itself; fatal ones are KvctlGpuFault.",
                unit="short",
                width=8,
                stacked=True,
                empty="nothing told",
                queries=(
                    Query(
                        expr=rate("kvctl_gpu_events_total", "gpu, kind", function="increase") + " > 0",
                        legend="{{gpu}} {{kind}}",
                    ),
                ),
            ),
            Panel(
                title="Lost cards",
                about="1 if a card fell off the bus.",
                unit="short",
                width=8,
                empty="no card",
                queries=(gauge("kvctl_gpu_lost", "{{gpu}}", by="gpu", function="max"),),
            ),
            Panel(
                title="Why cards could not be read",
                about="Times that reading the cards began to fail.",
                unit="short",
                width=8,
                empty="never",
                queries=(
                    Query(
                        expr=rate("kvctl_gpu_read_faults_total", "fault", function="increase") + " > 0",
                        legend="{{fault}}",
                    ),
                ),
            ),
        ),
    ),
)
