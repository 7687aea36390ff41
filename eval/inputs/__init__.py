"""Models and texts that a person names, and the formats that they are read from."""
