"""Routes of pooling models: embeddings, classes, scores, ranks and raw pooled results."""
