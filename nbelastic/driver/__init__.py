"""What runs in the notebook kernel (never torch): the owner thread and what people hold."""
