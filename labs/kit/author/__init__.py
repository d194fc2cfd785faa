"""The authors' and instructors' tools: checks, the student edition, notebooks and pictures."""
