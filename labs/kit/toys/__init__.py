"""What a lab and its tests import: KV memory, a model and a loop small enough to look through."""
