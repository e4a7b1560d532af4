"""In the kernel: the cluster, its jobs, and the connection to the driver's process. It imports neither torch nor the core."""
