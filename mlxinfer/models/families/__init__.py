"""Model families. Each file states how architectures differ from Llama; see registry.py."""
