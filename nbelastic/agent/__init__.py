"""On each host: the agent, which starts workers and watches them."""
