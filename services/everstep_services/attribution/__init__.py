"""Why a job died: collects what analyzers claim about each incident, and gives a verdict."""
