"""The arguments of the API, which are the options of the commands: each is declared once."""
