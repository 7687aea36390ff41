"""Healing: distils the source into a converted checkpoint, end to end, until little of the loss is left."""
