"""Ways of generating: filters of samplers, many samples of one prompt, beam search, prompt caches on disk."""
