"""A model's files before any weight is read: their location, and the model's configuration."""
