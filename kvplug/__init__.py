"""Cache strategies for transformers: pass one to `model.generate(past_key_values=cache)`.

Importing registers the attention function "kvplug" with transformers and touches nothing else.
"""

from kvplug.attention import attach, detach, register
from kvplug.cache import KVCache
from kvplug.memory import MemoryReport
from kvplug.planning import plan
from kvplug.recipes import DenseCache, QuantCache, StreamingLLMCache, WindowCache
from kvplug.spec import from_spec
from kvplug.view import KVTensor, KVView

__version__ = "0.1.0"

__all__ = [
    "DenseCache",
    "KVCache",
    "KVTensor",
    "KVView",
    "MemoryReport",
    "QuantCache",
    "StreamingLLMCache",
    "WindowCache",
    "attach",
    "detach",
    "from_spec",
    "plan",
]

register()
