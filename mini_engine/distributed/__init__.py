"""More than one process: tensor parallel, KV blocks from one engine to another. See docs/scaling.md."""
