"""Calibration: one layer at a time over the text, its statistics, and what is fitted to them."""
