"""What a model asks of the kernels: its steps, recorded, and generated weights to run them on."""
