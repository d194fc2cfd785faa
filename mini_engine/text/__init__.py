"""Text to token ids and back: the tokenizer, the chat template, and text that grows token by token."""
