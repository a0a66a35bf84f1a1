"""Encoder-decoder models: an encoder reads a text, or audio; a decoder generates another text and attends to both.

In: Texts for `encode`, arrays for `encode_item`; for `forward` a Batch whose plans include a group of kind CROSS, with
the encoder outputs of new rows in Batch.encoded. Out: hidden states and logits, as from any decoder. Encoder and
decoder are those of models/encoder.py and models/decoder.py; this joins their token table and weight tables. Must not
know: models by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.layers.attention import Attention
from quire.layers.batch import Batch, LayerCache
from quire.layers.embed import Head
from quire.layers.packed import Texts
from quire.layers.relative import LayerScores, RelativeKind
from quire.layers.table import Send, WeightTable, slots_of
from quire.models.arch import Arch
from quire.models.decoder import Decoder
from quire.models.encoder import Encoder, EncoderArch
from quire.models.limits import check_arch, reading
from quire.models.view import View
from quire.models.zoo import SEQ2SEQ
from quire.ops.op import Kernels
from quire.quant.coded import CodedMatrix
from quire.quant.plain import plain_storage
from quire.quant.scheme import Slot, Storage
from quire.schema.errors import ConfigError
from quire.schema.kv import KVSpec


@dataclass(frozen=True)
class Seq2SeqArch:
    """`names` maps to `encoder.` and `model.` (the decoder); the tables of the two archs are not read."""

    encoder: EncoderArch
    decoder: Arch
    start: int  # the first token of a decoder
    relative: RelativeKind | None = None  # scores by distance in the decoder's self-attention
    names: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    media_token: int | None = None  # of the encoder's text: its places take vectors of media
    key_bias: bool = True  # False: of queries, keys and values, keys have no bias

    @property
    def vocab(self) -> int:
        return self.decoder.vocab


class SharedTable(WeightTable):
    """A head that shares the token table becomes separate if the checkpoint turns out to have one. Where keys have no
    bias, theirs is zero."""

    model: Seq2Seq

    def load(self, name: str, source: Tensor | CodedMatrix, send: Send | None = None) -> bool:
        canonical = self.canonical(name)
        if canonical == "lm_head.weight" and self.model.decoder.head.tied:
            self.model.untie()
            self._slots |= {slot.name: slot for slot in self.model.decoder.head.slots() if slot.name not in self._slots}
        if not self.model.arch.key_bias and canonical.endswith(".q_proj.bias") and isinstance(source, Tensor):
            super().load(canonical.replace(".q_proj.", ".k_proj."), torch.zeros_like(source), send)
        return super().load(name, source, send)


class Seq2Seq(nn.Module):
    captures = True

    def __init__(self, arch: Seq2SeqArch, storage: Storage, *, max_model_len: int) -> None:
        super().__init__()
        self.arch, self.storage = arch, storage
        self.decoder = Decoder(arch.decoder, storage, max_model_len=max_model_len)
        self.encoder = Encoder(arch.encoder, storage, max_model_len=max_model_len)
        self.encoder.embed = self.decoder.embed
        self.relative = (
            LayerScores(
                "model.relative",
                arch.decoder.heads,
                arch.relative,
                storage,
                layers=len(arch.decoder.layers),
                both_ways=False,
            )
            if arch.relative
            else None
        )

    def encode(self, texts: Texts) -> Tensor:
        """[S, width], text after text: the value of Batch.encoded in the first step of these rows."""
        return self.encoder(texts)

    @property
    def width(self) -> int:
        """Of what `encode_item` gives."""
        return self.arch.encoder.core.width

    def encode_item(self, modality: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """[S, width]: the same for the input of one request, as it is sent to a worker."""
        reads = "audio" if self.arch.encoder.bins else "text"
        if modality != reads:
            raise ValueError(f"the model's encoder reads {reads}, not {modality}")
        if reads == "audio":
            return self.encoder.listen(arrays["input_features"])
        token_ids, vectors = arrays["token_ids"], arrays.get("vectors")
        texts = Texts(token_ids, (len(token_ids),))
        if vectors is None:
            return self.encoder(texts)
        return self.encoder.read_with(texts, torch.eq(token_ids, self.arch.media_token or 0), vectors)

    def encode_nothing(self, num_tokens: int) -> None:
        """An input of so many tokens, or of as many as the encoder reads at most; for trials."""
        core, device = self.arch.encoder.core, self.storage.device
        if self.arch.encoder.bins:
            frames = 2 * min(num_tokens, core.positions)
            self.encoder.listen(torch.zeros((self.arch.encoder.bins, frames), device=device))
        else:
            count = min(num_tokens, core.max_positions)
            self.encoder(Texts(torch.zeros(count, dtype=torch.int64, device=device), (count,)))

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(batch)

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        return self.decoder.logits(hidden, slots)

    def narrow_logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        return self.decoder.narrow_logits(hidden, slots)

    def kv_specs(self, block_size: int, kv_dtype: str) -> list[KVSpec]:
        return self.decoder.kv_specs(block_size, kv_dtype)

    def bind_kv(self, caches: Mapping[str, LayerCache], groups: Mapping[str, int]) -> None:
        self.decoder.bind_kv(caches, groups)

    def untie(self) -> None:
        """A separate head; its bias, if there is one, stays."""
        arch, old = self.arch.decoder, self.decoder.head
        head = Head("lm_head", arch.vocab, arch.embed_width or arch.width, self.storage, bias=old.bias is not None)
        if head.bias is not None and old.bias is not None:
            head.bias = old.bias
        self.decoder.head = head

    def table(self) -> WeightTable:
        table = SharedTable(self._slots(), names=self.arch.names, ignore=self.arch.ignore, arrange=_flat_bias)
        table.model = self
        return table

    def _slots(self) -> Iterator[Slot]:
        yield from slots_of(self.decoder)
        if self.relative is not None:
            yield from slots_of(self.relative)
        shared = {slot.name for slot in slots_of(self.encoder.embed)}
        for slot in slots_of(self.encoder):
            if slot.name not in shared:
                fills = tuple(map(_encoder_name, slot.fills))
                yield slot._replace(name=_encoder_name(slot.name), fills=fills)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill parameters from (checkpoint name, tensor) pairs, all or some; returns the names that were used."""
        taken = self.table().load_all(weights)
        self.finish_weights()
        return taken

    @torch.no_grad()
    def finish_weights(self) -> None:
        self.encoder.finish_weights()
        self.decoder.finish_weights()
        if self.relative is not None:
            for layer, scores in zip(self.decoder.layers, self.relative.scores(), strict=True):
                assert isinstance(layer.attn, Attention)
                layer.attn.use_scores(scores)
                layer.attn.fusable = False


def _encoder_name(name: str) -> str:
    return "encoder." + name.removeprefix("model.")


def _flat_bias(name: str, tensor: Tensor) -> Tensor:
    """Some store the head's bias as one row."""
    return tensor.view(-1) if name == "lm_head.bias" else tensor


def build_seq2seq(
    hf_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    storage: Storage | None = None,
) -> Seq2Seq:
    """As models/build.build_model, for an encoder-decoder model."""
    arch = read_seq2seq(hf_config)
    storage = storage or plain_storage(dtype, Kernels.here(device))
    return Seq2Seq(arch, storage, max_model_len=max_model_len or arch.decoder.max_positions)


def read_seq2seq(hf_config: Mapping[str, Any]) -> Seq2SeqArch:
    """The declaration of the first declared name in config["architectures"], applied to the config."""
    name = next((name for name in hf_config.get("architectures") or [] if name in SEQ2SEQ), None)
    if name is None:
        raise ConfigError(
            f"no encoder-decoder is declared under {hf_config.get('architectures')}; "
            f"declared: {', '.join(SEQ2SEQ.names())}",
            param="architectures",
        )
    with reading(hf_config, name):
        arch: Seq2SeqArch = SEQ2SEQ.get(name)(View(hf_config, {}, name))
        check_arch(arch.encoder.core)
        check_arch(arch.decoder)
    return arch
