"""What agents collect about failures, in forms that services and commands read."""
