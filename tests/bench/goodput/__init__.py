"""Goodput of the daemon's gate and of every other, through the real proxy, on a real or simulated engine.

workload   who comes when, with what prompt, and how long the answer will be
callers    open-loop callers that retry as openai-python does
gates      policies that the daemon does not have, in its gate's place
stage      the engine and the daemon
bench      one run, and which runs are made
report     medians and targets
"""
