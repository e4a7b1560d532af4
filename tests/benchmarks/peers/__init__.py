"""The systems that are compared: each is a command that trains the same model and writes step files until SIGTERM."""
