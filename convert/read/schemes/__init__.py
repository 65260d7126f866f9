"""One file per way in which a safetensors checkpoint may hold a matrix."""
