"""ipyparallel: its controller, and the client of `%px`."""
