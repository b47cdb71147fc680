"""sentence-transformers' interface: SentenceTransformer and CrossEncoder over folders of models, without torch."""

from strata.arguments import public_names
from strata.sentence_transformers.cross_encoder import CrossEncoder
from strata.sentence_transformers.encoder import SentenceTransformer
from strata.sentence_transformers.precision import quantize_embeddings
from strata.sentence_transformers.similarity import SIMILARITIES, cos_sim, dot_score, euclidean_sim, manhattan_sim

__all__ = [
    "SIMILARITIES", "CrossEncoder", "SentenceTransformer", "cos_sim", "dot_score", "euclidean_sim", "manhattan_sim",
    "quantize_embeddings",
]  # fmt: skip

public_names(globals(), of_values=True)
