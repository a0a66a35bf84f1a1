"""Between text and token ids: tokenizers, chat templates, incremental detokenization. Must not know: engines, HTTP."""
