"""The decisions: pure, table-driven, standard library only.

Nothing here reads a clock, does IO or draws a random number: ``now`` is an argument (seconds of a monotonic
clock), and every event comes from outside.
"""
