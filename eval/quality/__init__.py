"""What a model's predictions are worth: perplexity and what it finds again, beside the bytes of its cache."""
