"""How the bundled demo model was made: its corpus, its tokenizer, its training, its bundling."""
