"""What `everstep demo` shows: a training that is killed twice, and goes on."""
