"""What runs on every host: the agent that starts workers, watches them and reports."""
