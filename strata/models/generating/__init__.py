"""Ways of generating: filters of samplers, samples of one prompt, beam and contrastive search, prompts on disk."""
