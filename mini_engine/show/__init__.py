"""What people look at: figures, the player, tables, the demo, and the export for Perfetto."""
