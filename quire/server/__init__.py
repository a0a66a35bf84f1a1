"""The HTTP front doors. A dialect (server/openai) only renders; requests run through llm/online.py."""
