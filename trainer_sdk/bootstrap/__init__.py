"""What runs in every rank before the user's script; stdlib only, and little of that."""
