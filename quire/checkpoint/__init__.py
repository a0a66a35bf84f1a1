"""A model's files before any weight is read: where they are, and what they say of the model."""
