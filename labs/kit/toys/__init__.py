"""KV memory, a model and a loop for labs and their tests, small enough to read."""
