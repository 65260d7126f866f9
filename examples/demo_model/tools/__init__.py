"""Conversations with tools: their form, the data that teaches it, the ones held out."""
