"""Hugging Face directories: config.json and safetensors files, read without running anything in them."""
