"""The settings of an engine or a simulation, checked once, when they are made."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from mini_engine.checks import shown, whole_number

SchedulerPolicy = Literal["fcfs", "priority"]
Policy = SchedulerPolicy  # its old name, for one more release
POLICIES: tuple[str, ...] = get_args(SchedulerPolicy)
SpeculativeMethod = Literal["ngram", "draft_model"]
DraftSampleMethod = Literal["greedy", "probabilistic"]
# More than any machine has; each block takes memory, so a typing error could block one for hours.
MAX_NUM_BLOCKS, MAX_BLOCK_SIZE = 2**20, 2**16
MAX_POOL_BYTES = 2**41
MAX_SPECULATIVE_TOKENS = 64  # more are hardly ever accepted


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: where the drafts of the next tokens come from. Names are vLLM's.

    num_speculative_tokens  drafts of a request in a step, at most
    method                  ngram: what followed the last time the text ended like this; or draft_model
    prompt_lookup_max       the longest end of the text that ngram looks up
    prompt_lookup_min       and the shortest; one alone is both, and without both they are 5 and 1
    model                   the draft model: a name or a path, with the tokenizer of the model
    draft_sample_method     greedy: its best tokens; or probabilistic: tokens drawn from its distribution

    With probabilistic drafts more are accepted, and a seed gives another text than without drafts, of the
    same distribution. All others change no text.

    Raises ValueError, naming the field, for a value that cannot work.
    """

    num_speculative_tokens: int
    method: SpeculativeMethod = "ngram"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    model: str | None = None
    draft_sample_method: DraftSampleMethod = "greedy"

    def __post_init__(self) -> None:
        for name, known in (("method", SpeculativeMethod), ("draft_sample_method", DraftSampleMethod)):
            if getattr(self, name) not in get_args(known):
                names = ", ".join(get_args(known))
                raise ValueError(f"{name} must be one of {names}, but is {shown(getattr(self, name))}")
        if (self.method == "draft_model") != (self.model is not None):
            rule = "a name or a path with method draft_model, and None with ngram"
            raise ValueError(f"model must be {rule}, but is {shown(self.model)}")
        least, longest = self.lookup_lengths
        for name, value in (
            ("num_speculative_tokens", self.num_speculative_tokens),
            ("prompt_lookup_min", least),
            ("prompt_lookup_max", longest),
        ):
            if not 1 <= whole_number(name, value) <= MAX_SPECULATIVE_TOKENS:
                raise ValueError(f"{name} must be 1 to {MAX_SPECULATIVE_TOKENS}, but is {shown(value)}")
        if least > longest:
            raise ValueError(f"prompt_lookup_min {least} exceeds prompt_lookup_max {longest}; lower it")

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The shortest and the longest end that ngram looks up."""
        least, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None:
            return (1, 5) if longest is None else (longest, longest)
        return least, least if longest is None else longest

    @classmethod
    def parse(cls, text: str) -> "SpeculativeConfig":
        """Return the config of an option: "ngram:4", or "draft:shakespeare-draft:4". Raises ValueError."""
        method, _, rest = text.partition(":")
        model, _, number = rest.rpartition(":")
        if not number.isdecimal() or method not in ("ngram", "draft") or (method == "draft") != bool(model):
            raise ValueError(f"--speculative must be like ngram:4 or draft:MODEL:4, but is {shown(text)}")
        how = {"method": "draft_model", "model": model} if model else {"method": method}
        return cls.of(how | {"num_speculative_tokens": int(number)})

    @classmethod
    def of(cls, value: Any) -> "SpeculativeConfig":
        """Return the config of a dict with its fields, as vLLM takes it. Raises ValueError."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"speculative_config must be a SpeculativeConfig or a dict: {shown(value)}")
        names = [field.name for field in fields(cls)]
        if unknown := value.keys() - set(names):
            name = min(unknown, key=str)
            raise ValueError(f"speculative_config has no {shown(name)}; it has {', '.join(names)}")
        if "num_speculative_tokens" not in value:
            raise ValueError("speculative_config needs num_speculative_tokens, the drafts in a step")
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The limits of a step, the order of requests, and the size of the KV memory.

    policy                        fcfs: first come, first served. priority: the smallest number first
    max_num_batched_tokens        tokens computed in a step: the budget
    max_num_seqs                  requests that run at once; None: 64, or the budget if that is smaller
    long_prefill_token_threshold  tokens of one prompt in a step, at most; 0 is off
    block_size, num_blocks        the KV pool; num_blocks None: as many as `kv_cache_bytes` pays for
    watermark                     blocks that an admission leaves free; None: one percent
    enable_prefix_caching         whether computed blocks are shared between requests
    max_model_len                 prompt and outputs of a request, at most; None: the model's own limit
    seed                          of the sampling of requests without a seed of their own
    speculative_config            a SpeculativeConfig, or a dict with its fields; None: a token a step

    Raises ValueError, naming the field, for a value that cannot work.
    """

    policy: SchedulerPolicy = "fcfs"
    max_num_batched_tokens: int = 512
    max_num_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 512 * 2**20
    watermark: int | None = None
    enable_prefix_caching: bool = True
    max_model_len: int | None = None
    seed: int = 0
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("policy", "enable_prefix_caching") or value is None and field.default is None:
                continue
            is_speculative = field.name == "speculative_config"
            value = SpeculativeConfig.of(value) if is_speculative else whole_number(field.name, value)
            object.__setattr__(self, field.name, value)
        for name in ("block_size", "num_blocks", "kv_cache_bytes", "max_model_len"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, but is {shown(value)}")
        for name, most in (("num_blocks", MAX_NUM_BLOCKS), ("block_size", MAX_BLOCK_SIZE)):
            if (getattr(self, name) or 0) > most:
                raise ValueError(f"{name} must be at most {most:,}, but is {shown(getattr(self, name))}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(
                f"enable_prefix_caching must be True or False, but is {shown(self.enable_prefix_caching)}"
            )
        check_limits(**self.scheduler_args())

    def with_settings(self, settings: dict[str, Any]) -> "EngineConfig":
        """Return the config with these fields changed. Raises ValueError for a name that is no field."""
        names = [field.name for field in fields(self)]
        if unknown := settings.keys() - set(names):
            name = min(unknown, key=str)
            raise ValueError(f"there is no setting {shown(name)}; there are {', '.join(names)}")
        return replace(self, **settings)

    def fitted(self, longest: int, bytes_per_token: int) -> "EngineConfig":
        """Return the settings with what they leave open taken from the model: its length, the pool's size.

        Raises ValueError for a max_model_len beyond `longest`, the model's own.
        """
        max_model_len = self.max_model_len or longest
        if max_model_len > longest:
            raise ValueError(
                f"max_model_len {max_model_len} exceeds the model's max_position_embeddings {longest}"
            )
        num_blocks = self.num_blocks
        if num_blocks is None:
            affordable = self.kv_cache_bytes // (bytes_per_token * self.block_size)
            useful = self.scheduler_args()["max_num_seqs"] * -(-max_model_len // self.block_size)
            num_blocks = max(1, min(affordable, useful, MAX_NUM_BLOCKS))
        needed = num_blocks * self.block_size * bytes_per_token
        if needed > MAX_POOL_BYTES:
            raise ValueError(
                f"num_blocks {num_blocks} of block_size {self.block_size} take {needed / 2**40:.0f} TiB with "
                "this model; lower one of them"
            )
        return replace(self, max_model_len=max_model_len, num_blocks=num_blocks)

    def scheduler_args(self) -> dict[str, Any]:
        """Return the keywords of a Scheduler."""
        seqs = min(64, self.max_num_batched_tokens) if self.max_num_seqs is None else self.max_num_seqs
        return {
            "policy": self.policy,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": seqs,
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
        }

    def kv_args(self) -> dict[str, Any]:
        """Return the keywords of a BlockManager, beside the size of its pool."""
        return {"enable_prefix_caching": self.enable_prefix_caching, "watermark": self.watermark}


def check_limits(
    policy: str, max_num_batched_tokens: int, max_num_seqs: int, long_prefill_token_threshold: int
) -> None:
    """Raise ValueError for limits under which no schedule works."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, but is {shown(policy)}")
    whole_number("max_num_batched_tokens", max_num_batched_tokens)
    whole_number("max_num_seqs", max_num_seqs)
    whole_number("long_prefill_token_threshold", long_prefill_token_threshold)
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs must be at least 1, but is {max_num_seqs}")
    if max_num_seqs > max_num_batched_tokens:
        # Every running request gets a token every step; a smaller budget could not pay for that.
        raise ValueError(
            f"max_num_seqs {max_num_seqs} exceeds max_num_batched_tokens {max_num_batched_tokens}; "
            "raise the budget or lower the number of sequences"
        )
    if long_prefill_token_threshold < 0:
        raise ValueError(
            f"long_prefill_token_threshold must be 0 (off) or more, but is {long_prefill_token_threshold}"
        )
