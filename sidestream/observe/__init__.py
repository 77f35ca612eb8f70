"""What an operator sees: progress, logs."""
