"""What the fields of requests mean, by whichever API they came: sampling, grammars, templates."""
