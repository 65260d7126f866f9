"""Families of models: what their architectures do differently from Llama; see registry.py."""
