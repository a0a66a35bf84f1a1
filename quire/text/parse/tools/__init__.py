"""One file per family of models: how it writes its calls, word for word, and which mechanism reads that."""
