"""One graph, one file: a torch.nn.Module without a branch on a size, and its declared inputs and outputs."""

from .cross_decoder import CrossDecoder
from .drafter import Drafter
from .self_decoder import SelfDecoder

__all__ = ["CrossDecoder", "Drafter", "SelfDecoder"]
