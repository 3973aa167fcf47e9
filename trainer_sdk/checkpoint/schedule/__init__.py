"""When a training saves, and how fast a save is written."""
