"""One file per tokenizer format. Loaded by registry string from text/tokenizer.py."""
