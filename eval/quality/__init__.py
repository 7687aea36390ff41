"""What a model's predictions are worth: perplexity and recall, beside the bytes of its cache."""
