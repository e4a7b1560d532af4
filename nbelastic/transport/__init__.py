"""Messages between processes: ZeroMQ, keys, delivery."""
