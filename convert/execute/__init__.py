"""Carries out a plan: units of tensors, the layer loop, the check."""
