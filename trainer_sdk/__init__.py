"""What runs inside the training process."""
