"""Calibration: runs one layer at a time over the text, measures its statistics, and fits weights to them."""
