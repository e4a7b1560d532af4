"""The agent of a host: one process that starts and watches workers, and relays their messages."""
