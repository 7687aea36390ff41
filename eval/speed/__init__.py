"""Decoding, prefill and memory, measured side by side."""
