"""Why a job died: analyzers of evidence. The service itself is not there yet."""
