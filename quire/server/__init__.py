"""The HTTP interface. A dialect (server/openai) only renders; requests run through llm/online.py."""
