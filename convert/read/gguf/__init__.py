"""llama.cpp's GGUF files: header, block formats, names, config and tokenizer."""
