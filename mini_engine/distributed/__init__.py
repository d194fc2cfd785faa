"""More than one process: replicas on Ray, tensor parallel, KV blocks on their way. See docs/scaling.md."""
