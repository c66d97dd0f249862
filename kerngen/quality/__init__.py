"""What an approximation costs: its distributions against the model's own, token by token."""
