"""The Python front doors: LLM, AsyncLLM and LLMEngine."""
