"""What processes say to one another, and what of a cluster all of them know. No process, no thread."""
