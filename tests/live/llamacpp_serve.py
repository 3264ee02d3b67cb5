"""Serves a model with llama.cpp's own HTTP server: run by the python of the environment that has it.

Usage: ``python llamacpp_serve.py FILE PORT CONTEXT SLOTS``; CONTEXT tokens are shared out to SLOTS slots.
"""

import os
import signal
import sys

import xllamacpp


def main(model: str, port: str, context: str, slots: str) -> None:
    """Serve until SIGTERM."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {"tiny"}
    params.port = int(port)
    params.n_ctx = int(context)
    params.n_parallel = int(slots)
    params.endpoint_metrics = True
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    server = xllamacpp.Server(params)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os._exit(0 if server is not None else 1)  # its destructor waits for requests


if __name__ == "__main__":
    main(*sys.argv[1:])
