"""What judges: the pytest plugin, the guards, and what is shown of a failure."""
