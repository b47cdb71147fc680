"""Neural network ops: norms, attention, rotary embeddings, recurrent layers, losses, experts, token sampling."""
