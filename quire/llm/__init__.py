"""The Python API: LLM, AsyncLLM and LLMEngine."""
