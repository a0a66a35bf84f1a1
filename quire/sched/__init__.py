"""Who runs next, and where its KV lies. Integers only: no torch, no text, no time of day."""
