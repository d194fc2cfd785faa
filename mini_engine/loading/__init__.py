"""From a name or a path to a model: the registry, config, weights from Hugging Face folders or GGUF."""
