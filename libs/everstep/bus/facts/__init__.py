"""Facts on their way: spooled on our disk, sent to the stream, read from it, decoded."""
