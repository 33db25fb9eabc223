"""Cache strategies for transformers: pass one to `model.generate(past_key_values=cache)`.

Importing registers the attention function "kvplug" with transformers and touches nothing else.
"""

from kvplug.absorb import absorb, unabsorb
from kvplug.attention import attach, detach, register
from kvplug.cache import KVCache
from kvplug.calibrate import calibrate_low_rank, calibrate_sharing
from kvplug.compress import compress
from kvplug.low_rank_plan import LowRankPlan
from kvplug.memory import MemoryReport
from kvplug.planning import plan
from kvplug.pool import PagedCache, PagePool
from kvplug.prefill import prefill
from kvplug.recipes import (
    DenseCache,
    ExpectedAttentionCache,
    H2OCache,
    KeyDiffCache,
    KnormCache,
    LowRankCache,
    MiniCache,
    QuantCache,
    SharedCache,
    SnapKVCache,
    StreamingLLMCache,
    TOVACache,
    WindowCache,
)
from kvplug.saving import load
from kvplug.sharing_plan import SharingPlan
from kvplug.spec import from_spec
from kvplug.stores import OutOfPages
from kvplug.view import KVTensor, KVView

__version__ = "0.1.0"

__all__ = [
    "DenseCache",
    "ExpectedAttentionCache",
    "H2OCache",
    "KVCache",
    "KVTensor",
    "KVView",
    "KeyDiffCache",
    "KnormCache",
    "LowRankCache",
    "LowRankPlan",
    "MemoryReport",
    "MiniCache",
    "OutOfPages",
    "PagePool",
    "PagedCache",
    "QuantCache",
    "SharedCache",
    "SharingPlan",
    "SnapKVCache",
    "StreamingLLMCache",
    "TOVACache",
    "WindowCache",
    "absorb",
    "attach",
    "calibrate_low_rank",
    "calibrate_sharing",
    "compress",
    "detach",
    "from_spec",
    "load",
    "plan",
    "prefill",
    "unabsorb",
]

register()
