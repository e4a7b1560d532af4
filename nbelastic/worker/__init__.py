"""In each training process: its session with the driver, process groups, the hang detector."""
