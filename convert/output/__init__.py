"""The life of an output: its lock, work directory, companions, record, card and publication."""
