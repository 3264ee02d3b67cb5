"""kvctl: admission control by KV tokens in flight, in front of a self-hosted LLM engine."""

__version__ = "0.1.0"
