"""One file per form a tokenizer comes in. Reached by registry string from text/tokenizer.py."""
