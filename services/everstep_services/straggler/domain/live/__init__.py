"""The live verdict on a job, by what its nodes measure in windows of steps."""
