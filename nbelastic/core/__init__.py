"""The pure core: what is, what happened, what is to be done. No clock, randomness, thread, socket or file in here."""
