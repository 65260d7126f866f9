"""One file per family: what its architecture does differently from Llama."""
