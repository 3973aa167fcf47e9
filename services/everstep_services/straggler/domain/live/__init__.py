"""The live verdict on a job, from what its nodes measure in windows of steps."""
