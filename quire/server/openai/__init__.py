"""OpenAI's dialect: completions, chat, models."""
