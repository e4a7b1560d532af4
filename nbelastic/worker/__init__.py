"""Inside the training processes: the elastic loop, process groups, and the training state."""
