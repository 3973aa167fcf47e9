"""What each kind of evidence is, and how it is got from outside the ranks."""
