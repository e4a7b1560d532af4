"""The terminal command `nbelastic`."""
