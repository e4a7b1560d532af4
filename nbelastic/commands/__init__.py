"""The terminal's client: `nbelastic COMMAND`, or `python -m nbelastic COMMAND`."""
