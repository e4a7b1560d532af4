"""The driver, a process of its own, and what people hold of it in a kernel. Neither imports torch."""
