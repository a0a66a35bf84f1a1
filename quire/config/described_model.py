"""What the configuration of a model says of it, with what programs ask a ModelConfig about that under the documented
names; Quire itself reads `facts`.

In: results of the resolution. Out: plain values. Must not know: options.
"""

from dataclasses import field
from typing import TYPE_CHECKING, Any

from quire.checkpoint.facts import ModelFacts, text_part
from quire.config.option import Group, group

if TYPE_CHECKING:
    from quire.config.running import ParallelConfig


@group
class DescribedModel(Group):
    """Results only: what options are there besides, ModelConfig declares."""

    hf_config: dict[str, Any] = field(default_factory=dict)  # raw configuration after hf_overrides
    facts: ModelFacts = field(default_factory=ModelFacts)
    default_sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def architectures(self) -> list[str]:
        return list(self.facts.architectures)

    @property
    def hf_text_config(self) -> dict[str, Any]:
        """The language model's part of the raw configuration; all of it in a model without media."""
        return dict(text_part(self.hf_config))

    @property
    def is_multimodal_model(self) -> bool:
        return bool(self.facts.modalities)

    @property
    def is_moe(self) -> bool:
        return self.facts.num_experts > 0

    @property
    def use_mla(self) -> bool:
        return self.facts.uses_mla

    def get_vocab_size(self) -> int:
        return self.facts.vocab_size

    def get_hidden_size(self) -> int:
        return self.facts.hidden_size

    def get_head_size(self) -> int:
        return self.facts.head_size

    def get_num_experts(self) -> int:
        return self.facts.num_experts

    def get_sliding_window(self) -> int | None:
        return self.facts.sliding_window or None

    def get_total_num_hidden_layers(self) -> int:
        return self.facts.num_layers

    def get_total_num_kv_heads(self) -> int:
        return self.facts.num_kv_heads

    def get_num_attention_heads(self, parallel_config: "ParallelConfig") -> int:
        """Of one rank."""
        return self.facts.num_heads // parallel_config.tensor_parallel_size

    def get_num_kv_heads(self, parallel_config: "ParallelConfig") -> int:
        """Of one rank: with more ranks than heads, several have the same one; MLA has one latent head."""
        whole = self.facts.num_kv_heads
        return 1 if self.use_mla else max(1, whole // parallel_config.tensor_parallel_size)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Default sampling of this model: what its files, or override_generation_config, change."""
        return dict(self.default_sampling)
