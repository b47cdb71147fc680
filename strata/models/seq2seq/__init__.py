"""Encoder-decoders: a source is encoded once, a decoder with a KV cache reads it by cross-attention."""
