"""Tools for the time before a training: what compression would save, and what a model tolerates."""
