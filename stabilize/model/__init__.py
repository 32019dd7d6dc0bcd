"""What is built: an encoder-decoder whose every norm, sum and logit is placed by a stabiliser. Knows none by name."""

from stabilize.model.cache import Cache
from stabilize.model.layer import Context, Layer
from stabilize.model.transformer import EncoderDecoder, Memory, Sizes, Stack

__all__ = ["Cache", "Context", "EncoderDecoder", "Layer", "Memory", "Sizes", "Stack"]
