"""Images, video and audio of requests: fetched, decoded, processed and placed in the prompt.

Owns the way from what a caller sends (`multi_modal_data`, parts of chat messages) to MediaItems (schema/media.py) and
the token ids of the expanded prompt. Pillow, numpy, soundfile and PyAV are imported when an item needs them. Must not
know: engines, HTTP, chat templates, tensors of torch, what an encoder does with the arrays.
"""
