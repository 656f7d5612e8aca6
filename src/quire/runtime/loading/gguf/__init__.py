"""GGUF files: strict parsing, dequantization to float32, translation to Hugging Face's names and layout."""
