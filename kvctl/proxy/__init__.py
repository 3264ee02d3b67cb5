"""HTTP in and out: routes, request shapes, errors per API, relay."""
