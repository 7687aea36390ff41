"""Checkpoint files: names and bytes in and out, and the work directory that an interrupted run leaves."""
