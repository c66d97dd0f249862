"""GGUF, llama.cpp's file of a model: its container, keys, tokenizer and blocks, as the runtime wants them."""
