"""What a model's predictions are worth: perplexity, recall, tasks, beside the bytes of its cache."""
