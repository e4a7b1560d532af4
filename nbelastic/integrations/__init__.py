"""Training frameworks in elastic jobs. Each module needs its framework, and only your import of it imports that."""
