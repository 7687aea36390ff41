"""Lines on a terminal: progress, tables, text that is safe to print."""
