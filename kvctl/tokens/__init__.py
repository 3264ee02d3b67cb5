"""Counting prompt tokens: the model's own tokenizer, the engine's, or a bound."""
