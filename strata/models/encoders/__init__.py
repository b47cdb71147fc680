"""Text encoders: BERT, ModernBERT, DeBERTa and relatives, decoders that give vectors; pooling and what follows."""
