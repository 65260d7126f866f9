"""The models that a server has: what was said of each, what is loaded, what it takes."""
