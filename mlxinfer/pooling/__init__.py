"""Models that give vectors and scores instead of text: embedding models and rerankers."""
