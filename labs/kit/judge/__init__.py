"""The judge: the pytest plugin, the guards, and the report of a failure."""
