"""The messages between processes, and what every process knows of a cluster: settings, folders, limits, deadlines."""
