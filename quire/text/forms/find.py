"""Which tokenizer format a folder or file has. The first match in the order below wins.

tokenizer.json · tekken.json (auto only) · tokenizer.model, *.tiktoken · vocab.json + merges.txt · vocab.txt · *.gguf
"""

from __future__ import annotations

import os

from quire.schema.errors import CheckpointError, InputError
from quire.text.forms.sidecar import Sidecar, read_sidecar
from quire.text.tokenizer import Tokenizer

LOOKED_FOR = "tokenizer.json, tekken.json, tokenizer.model, *.tiktoken, vocab.json with merges.txt, vocab.txt, *.gguf"


def load_auto(path: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Any format; Mistral's if there is no tokenizer.json."""
    return _load(path, trust_remote_code, mistral=True)


def load_hf(path: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Any format except Mistral's."""
    return _load(path, trust_remote_code, mistral=False)


def _load(path: str, trust_remote_code: bool, *, mistral: bool) -> Tokenizer:
    if os.path.isfile(path):
        return _load_file(path)
    names = sorted(os.listdir(path))
    if "tokenizer.json" in names:
        from quire.text.forms.fast import load_json  # lazy

        return load_json(os.path.join(path, "tokenizer.json"))
    from quire.text.forms.mistral import is_mistral  # lazy

    if mistral and any(map(is_mistral, names)):
        from quire.text.forms.mistral import load_mistral  # lazy

        return load_mistral(path)
    sidecar = read_sidecar(path)
    if trust_remote_code and "AutoTokenizer" in (sidecar.config.get("auto_map") or {}):
        from quire.text.forms.foreign import load_remote  # lazy

        return load_remote(path)
    loaded = _load_parts(path, names, sidecar)
    if loaded is None:
        raise _nothing(path, names, sidecar)
    return loaded


def _load_parts(path: str, names: list[str], sidecar: Sidecar) -> Tokenizer | None:
    for name in names:
        if name.endswith((".tiktoken", ".model")):
            return _load_file(os.path.join(path, name))
    if "vocab.json" in names and "merges.txt" in names:
        from quire.text.forms.plain import load_vocab_merges  # lazy

        return load_vocab_merges(path, sidecar)
    if "vocab.txt" in names:
        from quire.text.forms.plain import load_word_pieces  # lazy

        return load_word_pieces(path, sidecar)
    files = [name for name in names if name.endswith(".gguf")]
    if len(files) == 1 or (files and "-00001-of-" in files[0]):
        return _load_file(os.path.join(path, files[0]))
    return None


def _load_file(path: str) -> Tokenizer:
    name = os.path.basename(path)
    if name.endswith(".gguf"):
        from quire.text.forms.gguf import load_gguf  # lazy

        return load_gguf(path)
    from quire.text.forms.mistral import is_mistral  # lazy

    if is_mistral(name):
        from quire.text.forms.mistral import load_mistral  # lazy

        return load_mistral(path)
    if name.endswith(".json"):
        from quire.text.forms.fast import load_json  # lazy

        return load_json(path)
    if name.endswith((".tiktoken", ".model")):
        from quire.text.forms.ranks import is_ranks  # lazy

        ranks = is_ranks(path)
        if ranks:
            from quire.text.forms.ranks import load_ranks  # lazy

            return load_ranks(path)
        from quire.text.forms.sentencepiece import load_sentencepiece  # lazy

        return load_sentencepiece(path)
    raise InputError(
        f"{path!r} is not a tokenizer file; a folder needs one of {LOOKED_FOR}", param="tokenizer", value=path
    )


def _nothing(path: str, names: list[str], sidecar: Sidecar) -> Exception:
    if "AutoTokenizer" in (sidecar.config.get("auto_map") or {}):
        return InputError(
            f"the tokenizer in {path!r} is made by code that comes with the model; "
            "trust_remote_code=True runs it (only do so for a model you trust)",
            param="trust_remote_code",
        )
    seen = ", ".join(names[:12]) or "nothing"
    return CheckpointError(f"no tokenizer in {path!r}: looked for {LOOKED_FOR}; the folder holds {seen}")
