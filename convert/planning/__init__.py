"""Turns arguments and configs into a Plan: data that says what a command will do."""
