"""Things true of any multi-process Python program. Knows nothing of language models."""
