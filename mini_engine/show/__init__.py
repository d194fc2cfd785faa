"""Views of a run: figures, the player, tables, the demo, and the export for Perfetto."""
