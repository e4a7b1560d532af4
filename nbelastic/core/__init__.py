"""The pure core: the state of a cluster, and what each event changes in it. No clock, randomness, thread, socket or file."""
