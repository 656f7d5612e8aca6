"""GGUF files: parsed strictly, dequantized to float32, given Hugging Face's names and layout."""
