"""When a training saves, and at which rate a save is written."""
