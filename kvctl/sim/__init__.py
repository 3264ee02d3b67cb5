"""A simulated engine: paged KV and continuous batching, as a pure scheduler and as an HTTP server."""
