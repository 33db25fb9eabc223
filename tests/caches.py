"""Every cache that exists, as a table: how it is made, and the `Keep` of each layer that says what it must answer.

A new cache is one line here, and the whole contract is held against it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from transformers import GenerationMixin

import kvplug
from kvplug.codecs import Codec, Merged, PerChannel, PerToken, Rotated
from kvplug.fingerprint import fingerprint
from kvplug.low_rank_plan import LowRankPlan
from kvplug.policies import SinkWindow, Window
from tests.codec_twins import ROUND_TRIPS
from tests.joint_oracles import JointKeep, MergedTwin, ProjectedTwin, orthonormal
from tests.oracles import Keep
from tests.scored_oracles import ScoredKeep


@dataclass(frozen=True)
class Asked:
    """What a codec itself gives back for `[kv_heads, tokens, head_dim]`: tests/codecs hold it to its description, which
    in other arithmetic would now and then round a scale the other way."""

    codec: Codec

    def __call__(self, x):
        return self.codec.decode(self.codec.encode(x[None]), x.dtype)[0]


def round_trip(codec, side):
    if codec in ROUND_TRIPS:
        return ROUND_TRIPS[codec]
    if isinstance(codec, str):
        bits, _, group = codec.removeprefix("int").partition(" by ")
        codec = Rotated(int(bits), int(group) if group and side == "keys" else None, unbiased=side == "keys")
    return Asked(codec)


def keep(codec="dense", *, keys=None, values=None, **budget):
    """`codec`, or one for each side: a Codec, or a dtype by name, whose keys are in groups if it ends in " by 8"."""
    return Keep(keys=round_trip(keys or codec, "keys"), values=round_trip(values or codec, "values"), **budget)


@dataclass(frozen=True)
class Kind:
    """One cache: `make(model)` builds it for a two-layer model, `keeps` says what each of the two layers stores."""

    name: str
    make: Callable
    keeps: tuple[Keep, Keep]

    @property
    def evicts(self):
        return any(k.evicts for k in self.keeps)

    @property
    def positional(self):
        """Which tokens are stored follows from their positions alone."""
        return all(k.positional for k in self.keeps)

    @property
    def records(self):
        """The past can be recorded: always where nothing is dropped, else if no policy goes by what queries ask for."""
        return not self.evicts or (RECORDS and not any(k.reads_queries for k in self.keeps))

    @property
    def remembers(self):
        """What cropped tokens said of others stays said."""
        return any(k.remembers for k in self.keeps)

    @property
    def exact(self):
        """No codec: what is stored is what came in."""
        return all(k.keys is ROUND_TRIPS["dense"] and k.values is ROUND_TRIPS["dense"] for k in self.keeps)

    def budgets(self, prompt=1):
        """Most tokens that a head of each layer stores after a first forward of `prompt` tokens, None for all."""
        return [k.room(prompt) for k in self.keeps]

    def holds(self, tokens, prompt):
        """Whether nothing of `tokens` tokens is dropped after a first forward of `prompt`."""
        return all(room is None or room >= tokens for room in self.budgets(prompt))

    def kept(self, seen, prompt):
        """Tokens that a head stores of `seen`, a mean over the layers, after a first forward of `prompt`."""
        return sum(k.count(seen, prompt) for k in self.keeps) / len(self.keeps)

    def plain_tokens(self, seen):
        """Tokens that stay in full precision beside the codes, of all layers and of one row without padding."""
        grouped = [k for k in self.keeps if k.group]
        return sum(seen - (k.settled(seen) - k.sinks) for k in grouped)

    @property
    def empty_bytes(self):
        """Bytes of a cache without tokens."""
        return sum(k.basis_bytes for k in self.keeps)

    def __str__(self):
        return self.name


def both(name, make, one):
    return Kind(name, make, (one, one))


def scored(method, codec="dense", **settings):
    """The `ScoredKeep` of a method, of 8 tokens with 2 sinks unless `settings` say otherwise."""
    trip = {"keys": round_trip(codec, "keys"), "values": round_trip(codec, "values")}
    return ScoredKeep(**{"budget": 8, "sinks": 2, "method": method} | trip | settings)


def joint(keys, values, **counts):
    """The keeps of two layers that are stored together, whose keys and values are encoded so."""
    return tuple(JointKeep(keys=keys, values=values, member=member, **counts) for member in (0, 1))


# Two layers of two heads of 16 channels, side by side.
BASES = {"keys": [orthonormal(4, 64, 16, seed=1)], "values": [orthonormal(4, 64, 16, seed=2)]}


def low_rank_plan(model):
    return LowRankPlan([[0, 1]], 1.0, BASES, fingerprint(model))


# Small enough for what a test feeds: 4 queries vote, over 3 neighbours; 16 queries to come are thought of.
VOTES, AHEAD = {"observe": 4, "kernel": 3}, {"future": 16}


KINDS = [
    both("dense", lambda m: kvplug.DenseCache(m), keep()),
    both("fp8", lambda m: kvplug.QuantCache(m, dtype="fp8"), keep("fp8")),
    both("int8", lambda m: kvplug.QuantCache(m, dtype="int8"), keep("int8")),
    both(
        "int4",
        lambda m: kvplug.QuantCache(m, "int4", group_size=8, residual=6, sinks=2),
        keep("int4 by 8", residual=6, sinks=2, group=8),
    ),
    both(
        "int3_groups_of_4",
        lambda m: kvplug.QuantCache(m, keys="int3", values="int3", group_size=4, residual=0, sinks=0),
        keep("int3 by 4", group=4),
    ),
    both(
        "int2_values_groups_of_4_and_8",
        lambda m: kvplug.KVCache(m, codec=(Rotated(4, 8), Rotated(2, 4)), residual=1, sinks=1),
        keep(keys=Rotated(4, 8), values=Rotated(2, 4), residual=1, sinks=1, group=8),
    ),
    both(
        "channel_keys_token_values",
        lambda m: kvplug.QuantCache(m, scheme="channel", group_size=5, residual=3, sinks=0),
        keep(keys=PerChannel(4, 5), values=PerToken(4), residual=3, group=5),
    ),
    both(
        "int8_residual",
        lambda m: kvplug.from_spec("int8:residual=3,sinks=2", m),
        keep("int8", residual=3, sinks=2, group=16),
    ),
    both(
        "int8_keys_int4_values",
        lambda m: kvplug.from_spec("quant:keys=int8,values=int4,residual=0,sinks=2", m),
        keep(keys="int8", values="int4", residual=0, sinks=2, group=16),
    ),
    Kind(
        "dtypes_by_layer",
        lambda m: kvplug.QuantCache(m, "int4", group_size=8, residual=4, sinks=0, layer_dtypes={0: "int3"}),
        (keep("int3 by 8", residual=4, group=8), keep("int4 by 8", residual=4, group=8)),
    ),
    both("paged", lambda m: kvplug.PagedCache(m, page_size=4), keep()),
    both("paged_int8", lambda m: kvplug.from_spec("paged:page_size=3+int8", m), keep("int8")),
    both("window", lambda m: kvplug.WindowCache(m, 8), keep(window=8)),
    both("window_int4", lambda m: kvplug.WindowCache(m, 8, codec="int4"), keep("int4", window=8)),
    both("streaming", lambda m: kvplug.StreamingLLMCache(m, 2, 6), keep(sinks=2, window=6, compact=True)),
    both("no_sinks", lambda m: kvplug.StreamingLLMCache(m, 0, 8), keep(sinks=0, window=8, compact=True)),
    both(
        "streaming_original",
        lambda m: kvplug.StreamingLLMCache(m, 2, 6, positions="original"),
        keep(sinks=2, window=6),
    ),
    both(
        "streaming_int8",
        lambda m: kvplug.StreamingLLMCache(m, 2, 6, codec="int8"),
        keep("int8", sinks=2, window=6, compact=True),
    ),
    both(
        "streaming_original_fp8",
        lambda m: kvplug.from_spec("streaming:sinks=2,window=6,positions=original+fp8", m),
        keep("fp8", sinks=2, window=6),
    ),
    Kind("windows_by_layer", lambda m: kvplug.WindowCache(m, [6, 10]), (keep(window=6), keep(window=10))),
    Kind(
        "policies_by_layer",
        lambda m: kvplug.KVCache(m, policy=[Window(10), SinkWindow(2, 4, positions="original")]),
        (keep(window=10), keep(sinks=2, window=4)),
    ),
    Kind(
        "budgets_by_layer",
        lambda m: kvplug.StreamingLLMCache(m, sinks=[3, 1], window=[3, 9]),
        (keep(sinks=3, window=3, compact=True), keep(sinks=1, window=9, compact=True)),
    ),
    Kind(
        "budgets_by_layer_int4",
        lambda m: kvplug.KVCache(m, codec="int4", policy=[SinkWindow(1, 5), Window(9)]),
        (keep("int4", sinks=1, window=5, compact=True), keep("int4", window=9)),
    ),
    both("h2o", lambda m: kvplug.H2OCache(m, 8, sinks=2), scored("h2o")),
    both("snapkv", lambda m: kvplug.SnapKVCache(m, 8, sinks=2, **VOTES), scored("snapkv", **VOTES)),
    both("tova", lambda m: kvplug.TOVACache(m, 8, sinks=2), scored("tova")),
    both("keydiff", lambda m: kvplug.KeyDiffCache(m, 8, sinks=2), scored("keydiff")),
    both("knorm", lambda m: kvplug.KnormCache(m, 8, sinks=2), scored("knorm")),
    both(
        "expected_attention",
        lambda m: kvplug.ExpectedAttentionCache(m, 8, sinks=2, **AHEAD),
        scored("expected", **AHEAD),
    ),
    both(
        "h2o_adaptive",
        lambda m: kvplug.H2OCache(m, 8, 2, sinks=2, heads="adaptive"),
        scored("h2o", recent=2, adaptive=True),
    ),
    both(
        "snapkv_adaptive_int8",
        lambda m: kvplug.SnapKVCache(m, 8, sinks=2, heads="adaptive", codec="int8", **VOTES),
        scored("snapkv", "int8", adaptive=True, **VOTES),
    ),
    both("h2o_int4", lambda m: kvplug.H2OCache(m, 8, sinks=2, codec="int4"), scored("h2o", "int4")),
    both(
        "paged_h2o_int4",
        lambda m: kvplug.from_spec("h2o:budget=8,sinks=2+int4+paged:page_size=3", m),
        scored("h2o", "int4"),
    ),
    Kind(
        "paged_budgets_by_layer",
        lambda m: kvplug.PagedCache(m, 4, policy=[Window(10), SinkWindow(2, 4)]),
        (keep(window=10), keep(sinks=2, window=4, compact=True)),
    ),
    both("keydiff_share", lambda m: kvplug.KeyDiffCache(m, 0.5, sinks=2), scored("keydiff", budget=0.5)),
    Kind(
        "tova_budgets_by_layer",
        lambda m: kvplug.TOVACache(m, 8, sinks=2, layers=[3, 5]),
        (scored("tova", budget=6), scored("tova", budget=10)),
    ),
    Kind(
        "minicache",
        lambda m: kvplug.MiniCache(m, 0, distinct=1, group_size=8, residual=6, sinks=2),
        joint(MergedTwin(8, 1), MergedTwin(8, 1), residual=6, sinks=2, group=8, numbers=4 * (8 + 2)),
    ),
    Kind(
        "minicache_int8",
        lambda m: kvplug.from_spec("minicache:start=0,distinct=2,group_size=4+int8:residual=3,sinks=1", m),
        joint(*[Asked(Merged(PerToken(8), 4, 2))] * 2, residual=3, sinks=1, group=4, numbers=4 * 8),
    ),
    Kind(
        "lowrank",
        lambda m: kvplug.LowRankCache(m, low_rank_plan(m), 0.5, keys=0.75, residual=3, sinks=1),
        joint(
            ProjectedTwin(BASES["keys"][0][:, :48]), ProjectedTwin(BASES["values"][0][:, :32]),
            residual=3, sinks=1, group=16, basis_bytes=(48 + 32) * 32 * 4, numbers=(48 + 32) // 2,
        ),
    ),
]  # fmt: skip
EXACT = [kind for kind in KINDS if kind.exact]
EVICTING = [kind for kind in KINDS if kind.evicts]
KEEPING = [kind for kind in KINDS if not kind.evicts]
GROUPED = [kind for kind in KINDS if any(keep.group for keep in kind.keeps)]

# An evicting cache records the past only where assisted decoding first asks whether it can be cropped: elsewhere
# transformers would go on and speculate on it. The sentence is that of the error it raises there.
RECORDS = "is_croppable" in inspect.getsource(GenerationMixin._assisted_decoding)
NO_RECORDING = "recording needs a newer transformers"
RECORDING = [kind for kind in KINDS if kind.records]
# The sentence of the error that the others raise.
READS_QUERIES = "goes by what queries ask for"

# The same strategies with more room than any test feeds: nothing is dropped, so what comes out is the full cache's.
ROOMY = [
    both("dense", lambda m: kvplug.DenseCache(m), keep()),
    both("plain_kvcache", lambda m: kvplug.KVCache(m), keep()),
    both("roomy_window", lambda m: kvplug.WindowCache(m, 64), keep()),
    both("roomy_streaming", lambda m: kvplug.StreamingLLMCache(m, 4, 60), keep()),
    both("roomy_original", lambda m: kvplug.StreamingLLMCache(m, 4, 60, positions="original"), keep()),
]


def named(kinds):
    """Arguments of `pytest.mark.parametrize` for a list of kinds."""
    return {"argvalues": kinds, "ids": [kind.name for kind in kinds]}
