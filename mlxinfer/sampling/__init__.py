"""From logits to tokens for a whole batch at once. Knows token ids, no text and no scheduling."""
