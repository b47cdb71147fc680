"""Model families built on the compiler: loading, tokenising, embedding, generating, reading images."""

from strata.models.base import Model
from strata.models.embed import Encoder
from strata.models.generate import Decoder, State
from strata.models.loading import load
from strata.models.ocr import Line, TextReader
from strata.models.sampling import Sampler
from strata.models.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer
