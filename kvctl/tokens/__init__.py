"""Counting: the served model's own tokenizer and chat template, else the engine's /tokenize, else a byte bound."""
