"""The systems that are compared, each a command that trains the same model for ever and writes the same step files."""
