"""The demo: the bundled checkpoint, the text it was trained on, and the command that converts it."""
