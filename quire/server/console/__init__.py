"""The page at /: a chat and a view of the engine, and the page at /docs. Files of ours, served as they are."""
