"""What runs inside the training processes."""
