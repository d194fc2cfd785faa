"""More than one process: replicas, tensor parallel, the hand-over of KV blocks. See docs/scaling.md."""
