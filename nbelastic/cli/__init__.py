"""The command `nbelastic`."""
