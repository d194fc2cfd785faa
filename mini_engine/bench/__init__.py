"""The engine against transformers, on the same weights and prompts, in tokens a second."""
