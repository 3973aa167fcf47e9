"""Checkpoints for `everstep ckpt`: of a job by the API, of a folder or URL by its files."""
