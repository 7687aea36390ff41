"""The command line: words of a person become one call of the API, whose result is printed."""
