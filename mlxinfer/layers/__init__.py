"""What decoders are made of. Inputs and caches are arguments; nothing here is global."""
