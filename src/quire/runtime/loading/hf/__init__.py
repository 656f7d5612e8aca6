"""Hugging Face directories: config.json and safetensors files, read without running any of their code."""
