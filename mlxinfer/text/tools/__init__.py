"""Tool calls in the words of each model family, found in text as it comes. Knows no transport."""
