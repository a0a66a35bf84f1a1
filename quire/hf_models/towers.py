"""Towers: transformers' own encoders of media, with their projectors, out of a checkpoint of a whole model.

In: the raw config.json and the folder. Out: an object that makes vectors of what a processor returned for one item. The
class of the whole model is made with a language model of no layers, filled by transformers' loader, which knows the
names of every class's tensors, and then freed of what is left of the language model. Must not know: our declarations,
steps, requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from quire.base.registry import Registry
from quire.hf_models.equivalents import equivalent_of
from quire.hf_models.foreign import class_of, config_of, default_dtype, quiet
from quire.hf_models.vision_blocks import fuse_blocks
from quire.ops.attention import packed_attention
from quire.ops.op import Kernels
from quire.schema.errors import CheckpointError, NotBuiltError, some

_METHODS = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_LANGUAGE = ("language_model", "text_model", "lm_head")
_CODES = (
    "qweight",
    "qzeros",
    "scales",
    "weight_scale",
    "weight_packed",
    "absmax",
)  # ends of names of quantized weights


# classes of the encoders alone, where that of the whole cannot be made
_OWN = Registry(
    "encoder",
    {
        "Gemma3nForConditionalGeneration": "quire.hf_models.gemma3n:Gemma3nTowers",
        "MolmoForCausalLM": "quire.hf_models.molmo:MolmoTowers",
        "MiniCPMV": "quire.hf_models.minicpm:MiniCPMVTowers",
        "MiniCPMO": "quire.hf_models.minicpm:MiniCPMOTowers",
        "DeepseekVLV2ForCausalLM": "quire.hf_models.deepseek_vl2:DeepseekVL2Towers",
        "DeepseekOCRForCausalLM": "quire.hf_models.deepseek_ocr:DeepseekOcrTowers",
        "UltravoxModel": "quire.hf_models.ultravox:UltravoxTowers",
    },
)
# arrays whose names differ between processors and encoders, or between encoders of different transformers
_ARGUMENTS = dict.fromkeys(("image_patches", "pixel_values_images", "pixel_values_videos"), "pixel_values")


class Tower:
    def __init__(self, name: str, module: nn.Module, dtype: torch.dtype) -> None:
        self.name, self.module, self._dtype = name, module, dtype
        self._methods = {kind: method for kind, name in _METHODS.items() if (method := _method(module, name))}

    def encode(self, modality: str, arrays: Mapping[str, Tensor]) -> Tensor:
        """[n, width]: all vectors of an item, in their order."""
        method = self._methods.get(modality)
        if method is None:
            raise NotBuiltError(f"{self.name} has no encoder for {modality}")
        known = set(inspect.signature(method).parameters)
        named = {name if name in known else _ARGUMENTS.get(name, name): tensor for name, tensor in arrays.items()}
        inputs = {
            name: tensor.to(self._dtype) if tensor.is_floating_point() else tensor
            for name, tensor in named.items()
            if name in known
        }
        return _vectors(method(**inputs))


def _method(module: nn.Module, name: str) -> Any:
    """Of the whole, or of the model within it: whichever names its arguments."""
    inner = module.__dict__.get("_modules", {}).get("model")
    for owner in (inner, module):
        if owner is not None and name in (added := _ADDED.get(type(owner).__name__, {})):
            return partial(added[name], owner)
        if owner is not None and callable(method := owner.__class__.__dict__.get(name)):
            return method.__get__(owner)
    return None


def _qwen2_audio(model: Any, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
    """As the model does within its forward pass: frames of the mask only, half of them after the convolutions."""
    lengths, halves = model.audio_tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    most = (input_features.shape[-1] - 2) // 2 + 1
    seen = torch.arange(most, device=lengths.device)[None] < lengths[:, None]
    mask = create_bidirectional_mask(
        config=model.audio_tower.config,
        inputs_embeds=torch.zeros((*seen.shape, 1), dtype=input_features.dtype, device=lengths.device),
        attention_mask=seen.long(),
    )
    hidden = model.audio_tower(input_features, attention_mask=mask).last_hidden_state
    vectors: Tensor = model.multi_modal_projector(hidden)
    return vectors[torch.arange(vectors.shape[1], device=halves.device)[None] < halves[:, None]]


def _llama4(model: Any, pixel_values: Tensor) -> Tensor:
    """The projector is called in the forward pass."""
    features, strategy = model.get_image_features, "vision_feature_select_strategy"
    if strategy in inspect.signature(features).parameters:  # before transformers 5.22
        features = partial(features, **{strategy: model.config.vision_config.vision_feature_select_strategy})
    hidden = features(pixel_values=pixel_values).last_hidden_state
    vectors: Tensor = model.multi_modal_projector(hidden.reshape(-1, hidden.shape[-1]))
    return vectors


def _onevision_video(model: Any, pixel_values_videos: Tensor) -> Tensor:
    """Before transformers 5.22 the forward pass adds the vector that ends a video, and the pixels have another name."""
    features = model.get_video_features
    if "pixel_values_videos" in inspect.signature(features).parameters:
        return _vectors(features(pixel_values_videos=pixel_values_videos))
    vectors = features(pixel_values=pixel_values_videos).pooler_output
    end = model.image_newline.expand(len(vectors), 1, -1)
    return _vectors(torch.cat((vectors, end), 1))


def _granite_speech(model: Any, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
    """Padding is masked in the forward pass."""
    vectors: Tensor = model.get_audio_features(input_features=input_features).pooler_output
    return vectors[input_features_mask.bool()]


def _ovis2(model: Any, pixel_values: Tensor, grids: Tensor) -> Tensor:
    """Marks have vectors too: start, whole image, end of it, tiles row by row with one between each two, end."""
    output = model.get_image_features(pixel_values=pixel_values)
    vectors, marks = output.pooler_output, output.visual_indicator_features
    start, whole, column, row, end = (marks[index][None] for index in range(5))
    rows, columns = (int(size) for size in grids[0])
    if len(vectors) != (1 if rows * columns == 1 else 1 + rows * columns):
        raise ValueError(f"{len(vectors)} tiles for a grid of {rows}x{columns}")
    parts = [start, vectors[0], whole]
    for index, tile in enumerate(vectors[1:], start=1):
        parts += [tile, column if index % columns else row]
    return torch.cat([*(parts[:-1] if rows * columns > 1 else parts), end])


def _molmo2(model: Any, pixel_values: Tensor, token_ids: Tensor, image_token_pooling: Tensor,
            image_grids: Tensor) -> Tensor:  # fmt: skip
    """Vectors are added to the embedding of their token; marks have theirs."""
    first, table = model.config.text_config.vocab_size, model.marks
    if not bool(((token_ids >= first) & (token_ids < first + table.num_embeddings)).all()):
        raise ValueError(f"an item has tokens other than the {table.num_embeddings} from {first} on")
    (features,) = model.get_image_features(pixel_values, image_token_pooling, image_grids).pooler_output
    is_patch = token_ids == model.config.image_patch_id
    if int(is_patch.sum()) != len(features):
        raise ValueError(f"{int(is_patch.sum())} tokens of patches for {len(features)} vectors")
    vectors: Tensor = table(token_ids - first)
    vectors[is_patch] += features
    return vectors


def _molmo2_video(model: Any, pixel_values_videos: Tensor, token_ids: Tensor, video_token_pooling: Tensor,
                  video_grids: Tensor) -> Tensor:  # fmt: skip
    """Its frames are images of one crop each."""
    frames, rows, columns = (int(size) for size in video_grids[0])
    grids = torch.tensor([[frames * rows, columns, 0, 0]], device=video_grids.device)
    return _molmo2(model, pixel_values_videos, token_ids, video_token_pooling, grids)


def _frames(model: Any, pixel_values: Tensor) -> Tensor:
    """Frames of a video are images."""
    return _vectors(model.get_image_features(pixel_values=pixel_values))


def _phi4_image(model: Any, image_pixel_values: Tensor, image_sizes: Tensor, image_attention_mask: Tensor) -> Tensor:
    """The embedding writes vectors into places of a prompt: here one that consists of them. Per row of patches that are
    not padding one more, as for the whole image, and one between the two."""
    encoder = model.embed_tokens_extend.image_embed
    if len(image_sizes) != 1:
        raise ValueError(f"sizes of {len(image_sizes)} images")
    height, width = (int(size) // encoder.crop_size for size in image_sizes[0])
    side = -(-image_attention_mask.shape[-1] // 2)
    mask = image_attention_mask[0, 1 : 1 + height * width, ::2, ::2].reshape(height, width, side, side)
    rows, columns = int(mask[:, 0, :, 0].sum()), int(mask[0, :, 0].sum())
    return _into_places(
        encoder, rows * (columns + 1) + 1 + side * (side + 1), model.config.vision_config.image_token_id, model,
        image_pixel_values=image_pixel_values, image_sizes=image_sizes, image_attention_mask=image_attention_mask,
    )  # fmt: skip


def _phi4_audio(
    model: Any, audio_input_features: Tensor, audio_embed_sizes: Tensor, is_beside: Tensor | None = None
) -> Tensor:
    """`is_beside` images: another projection."""
    return _into_places(
        model.embed_tokens_extend.audio_embed, int(audio_embed_sizes.sum()), model.config.audio_config.audio_token_id,
        model, audio_input_features=audio_input_features, audio_embed_sizes=audio_embed_sizes,
        audio_projection_mode="speech" if is_beside is None else "vision",
    )  # fmt: skip


def _into_places(encoder: Any, num: int, token: int, model: Any, **inputs: Any) -> Tensor:
    first = next(iter(inputs.values()))
    ids = torch.full((1, num), token, device=first.device)
    empty = torch.zeros((1, num, model.config.hidden_size), dtype=first.dtype, device=first.device)
    vectors: Tensor = encoder(ids, empty, **inputs)
    return vectors[0]


# encoders that a class has, all or in part, within its forward pass only
_ADDED: dict[str, dict[str, Callable[..., Tensor]]] = {
    "Qwen2AudioModel": {"get_audio_features": _qwen2_audio},
    "Llama4ForConditionalGeneration": {"get_image_features": _llama4},
    "LlavaOnevisionModel": {"get_video_features": _onevision_video},
    "GraniteSpeechModel": {"get_audio_features": _granite_speech},
    "Ovis2Model": {"get_image_features": _ovis2},
    "PerceptionLMModel": {"get_video_features": _frames},
    "Molmo2Model": {"get_image_features": _molmo2, "get_video_features": _molmo2_video},
    "InternVLModel": {"get_video_features": _frames},
    "Phi4MultimodalModel": {"get_image_features": _phi4_image, "get_audio_features": _phi4_audio},
}


def _vectors(output: Any) -> Tensor:
    """What the methods of different classes return: a tensor, several, or an output with them."""
    # An output of transformers 5.17 has what was assigned to it later as an attribute only, one of 5.22 as an item.
    parts = {**vars(output), **output} if isinstance(output, Mapping) else {}
    pooled = parts.get("pooler_output")
    if pooled is None:
        pooled = parts.get("last_hidden_state")
    deep = parts.get("deepstack_features")
    if deep and pooled is not None:  # columns of later layers, behind those of the embedding
        return torch.cat([_vectors(part) for part in (pooled, *deep)], -1)
    output = output if pooled is None else pooled
    if isinstance(output, list | tuple):
        return torch.cat([one.reshape(-1, one.shape[-1]) for one in output])
    if not isinstance(output, Tensor):
        raise NotBuiltError(f"an encoder returned a {type(output).__name__}, not vectors")
    return output.reshape(-1, output.shape[-1])


def load_tower(
    raw: Mapping[str, Any],
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    is_dummy: bool = False,
    safetensors: bool = True,
    audio_path: str | None = None,
) -> Tower:
    """`is_dummy`: the weights are random. `audio_path`: the folder of an audio encoder that the checkpoint names."""
    raw, names = equivalent_of(raw)
    own = next((name for name in raw.get("architectures") or () if name in _OWN), None)
    registered = None if own is None else _OWN.get(own)
    config = config_of(raw, path, False, registered)
    kind = registered or class_of(raw, config, path, False)
    if audio_path is not None:
        config.audio_source = audio_path
    _without_layers(config)
    _without_quantization(config)
    if is_dummy:
        with quiet(), torch.device(device), default_dtype(dtype):
            module: nn.Module = kind(config)
    else:
        module = _read(kind, config, path, dtype, safetensors, names)
    _keep_marks(module)
    _drop_language(module)
    module = module.eval().requires_grad_(False).to(device)
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        attend_packed(module)
        fuse_blocks(module, Kernels.here(device))
    return Tower(own or kind.__name__, module, dtype)


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D], as all of them
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Of texts or windows that lie one after another, where the caller says where each ends: one call of torch's flash
    attention for all of them. transformers' own way without a further package is a call for each."""
    if cu_seq_lens_q is None or max_length_q is None:
        kwargs = {name: kwargs[name] for name in ("dropout", "is_causal") if name in kwargs}
        attended: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return attended
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention.on(q.device)(q, k, v, cu_seq_lens_q, max_length_q, scale)[None], None


_PACKED = "quire_flash"  # transformers tells by "flash" in a name that it may hand over where texts end
AttentionInterface.register(_PACKED, _attend)


def attend_packed(module: nn.Module) -> None:
    for part in module.modules():
        config = part.__dict__.get("config")
        if isinstance(config, PreTrainedConfig) and "cu_seqlens" in inspect.signature(part.forward).parameters:
            config._attn_implementation = _PACKED


def _without_layers(config: PreTrainedConfig) -> None:
    text = next((config.__dict__[part] for part in _TEXT_PARTS if part in config.__dict__), config)
    text.num_hidden_layers = 0
    if "decoder_layers" in vars(text):  # the other half of an encoder-decoder
        text.decoder_layers = 0
    for name, value in list(vars(text).items()):
        if name in ("layer_types", "no_rope_layers", "moe_layers") and isinstance(value, list):
            setattr(text, name, [])


def _without_quantization(config: PreTrainedConfig) -> None:
    """Encoders are not quantized, and for the language model's layers transformers would want packages of its own. fp8
    stays: it needs none, and encoders may have it."""
    about = config.__dict__.get("quantization_config")
    method = about.get("quant_method") if isinstance(about, Mapping) else None
    if about is not None and method != "fp8":
        del config.__dict__["quantization_config"]


def _read(
    kind: type[PreTrainedModel], config: PreTrainedConfig, folder: str, dtype: torch.dtype, safetensors: bool,
    names: Mapping[str, str],
) -> nn.Module:  # fmt: skip
    try:
        with quiet():
            read: Any = kind.from_pretrained
            model, report = read(
                folder, config=config, dtype=dtype, output_loading_info=True, local_files_only=True,
                use_safetensors=safetensors, weights_only=True, key_mapping=dict(names) or None,
            )  # fmt: skip
    except Exception as wrong:  # noqa: BLE001  # damaged files end in errors of many kinds
        reason = f"{type(wrong).__name__}: {(str(wrong).strip() or 'no message').splitlines()[0]}"
        raise CheckpointError(f"the encoder of {folder} cannot be read as {kind.__name__}: {reason}") from None
    own = [name for name in sorted(report.get("missing_keys") or ()) if not _is_language(name)]
    coded = [name for name in report.get("unexpected_keys") or () if not _is_language(name) and name.endswith(_CODES)]
    if coded:
        raise NotBuiltError(
            f"{folder} has a quantized encoder, which is not built: {some(sorted(coded))}", param="model"
        )
    shapes = [str(one) for one in report.get("mismatched_keys") or ()]
    if own or shapes:
        raise CheckpointError(
            f"{folder} does not fit the encoder of {kind.__name__}: {len(own)} tensors are missing ({some(own)}), "
            f"{len(shapes)} have wrong shapes ({some(shapes)})"
        )
    made: nn.Module = model
    return made


def _is_language(name: str) -> bool:
    return any(part in _LANGUAGE for part in name.split("."))


def _keep_marks(module: nn.Module) -> None:
    """Of the language model's embedding, the rows of tokens that stand in an item: all beyond its vocabulary."""
    for owner in list(module.modules()):
        if type(owner).__name__ == "Molmo2Model":
            model: Any = owner
            first = model.config.text_config.vocab_size
            if model.config.image_patch_id < first:
                raise NotBuiltError(
                    f"image_patch_id = {model.config.image_patch_id} lies within the vocabulary of {first} tokens",
                    param="model",
                )
            rows = model.language_model.embed_tokens.weight.detach()[first:].clone()
            model.marks = nn.Embedding.from_pretrained(rows)


def _drop_language(module: nn.Module) -> None:
    """The language model's embedding, norm and head were made with the whole, and are not needed."""
    for owner in list(module.modules()):
        for name in _LANGUAGE:
            if isinstance(owner._modules.get(name), nn.Module):
                owner._modules[name] = nn.Identity()
        if "embed_tokens_extend" in owner._modules:  # a language model with its encoders among its own parts
            owner._modules["embed_tokens"] = nn.Identity()
