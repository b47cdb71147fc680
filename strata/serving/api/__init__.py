"""The protocols that clients speak: OpenAI's chat, completions, responses and embeddings, reranking, Ollama's paths."""
