"""Reads and writes checkpoint files, and keeps the work directory that an interrupted run leaves."""
