"""Between words and token ids: tokenizers, chat templates, incremental text. Knows no engine and no HTTP dialect."""
