"""The figures of the labs' READMEs, drawn from runs of the solutions. A file a lab."""
