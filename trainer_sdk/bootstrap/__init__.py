"""The code that runs in every rank before the user's script: little, and only stdlib."""
