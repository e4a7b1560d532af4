"""Unmodified scripts, and torchruns of terminals."""
