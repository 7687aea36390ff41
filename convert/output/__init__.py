"""The life of an output: its lock, work directory, companions, provenance, card and publication."""
