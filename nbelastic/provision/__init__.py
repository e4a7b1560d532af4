"""Where hosts come from, and how agents get there."""
