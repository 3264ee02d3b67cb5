"""Which settings a reload puts in force at once. The others wait for a restart, and the reload says so.

Each is taken by a part that can be told of a new value while it runs: the gates, the overrides' desk, the
journal, the log.
"""

LIVE = frozenset(
    {
        # the gates
        "margin",
        "policy",
        "enforce",
        "max_context",
        "capacity_tokens",
        "capacity_force",
        "fallback_budget_tokens",
        "ttft_target",
        "itl_target",
        "max_num_seqs",
        "prefix_sharing",
        "retry_after_max",
        "queue_max_wait",
        "queue_max_requests",
        "queue_max_bytes",
        "large_requests",
        "large_requests_share",
        "large_requests_max_wait",
        "stale_after",
        "stall_timeout",
        "gpu_guard",
        # the desk
        "margin_min",
        "margin_max",
        "override_ttl_max",
        # the journal, the log, the stop
        "decision_log_size",
        "log_level",
        "drain_timeout",
    }
)
