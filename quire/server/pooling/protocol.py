"""Wire types of the pooling routes: field names and defaults of the documented API. null means: not given.

Must not know: engines.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from quire.server.openai.chat_protocol import Message
from quire.server.openai.protocol import INT64, ListOf, Tokens, Usage

Input = str | ListOf[str] | Tokens | ListOf[Tokens]


class PoolingBody(BaseModel):
    """Fields of every pooling request."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    """One of the served names; absent, the server's model."""
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of each input; -1 is what the model can take."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end is cut off; right."""
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    """Normalise embeddings; softmax or sigmoid for classes. Absent, as the model says."""
    priority: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    user: str | None = None
    """Taken and not used."""


class EncodingFields(BaseModel):
    """How vectors are written."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """float: numbers (the default). base64: of their bytes. bytes: the bytes as the body, described in the header
    `metadata`. bytes_only: without that header."""
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Of base64 and bytes; float32."""
    endianness: Literal["native", "little", "big"] | None = None
    """Of base64 and bytes; little."""


class InputFields(BaseModel):
    """What is pooled: an input, or a conversation through the model's chat template."""

    input: Input | None = Field(None, examples=["The food was delicious"])
    messages: ListOf[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(PoolingBody, EncodingFields, InputFields):
    dimensions: int | None = None
    """Shorter embeddings, of models that are trained for it (matryoshka)."""
    normalize: bool | None = None
    """Older name of use_activation."""


class PoolingRequest(PoolingBody, EncodingFields, InputFields):
    task: str | None = None
    """One of the model's tasks; absent, its first."""
    dimensions: int | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: Tokens | None = None


class ClassificationRequest(PoolingBody, InputFields):
    softmax: bool | None = None
    activation: bool | None = None


class ScoreRequest(PoolingBody):
    text_1: str | ListOf[str] = Field(
        validation_alias=AliasChoices("text_1", "data_1", "queries", "query"), examples=["What is a panda?"]
    )
    text_2: str | ListOf[str] = Field(
        validation_alias=AliasChoices("text_2", "data_2", "documents", "items"), examples=[["A bear.", "A city."]]
    )
    chat_template: str | None = None


class RerankRequest(PoolingBody):
    query: str = Field(examples=["What is a panda?"])
    documents: ListOf[str | dict[str, Any]] = Field(examples=[["A bear.", "A city."]])
    top_n: int | None = None
    """Return so many, the best first; 0 or absent is all."""
    return_documents: bool | None = None
    """False leaves the texts out."""
    chat_template: str | None = None


class CohereEmbedRequest(BaseModel):
    """Cohere's form, for texts."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    model: str | None = None
    texts: ListOf[str] = Field(examples=[["hello"]])
    input_type: str | None = None
    """Taken and not used: prompts are part of the texts."""
    embedding_types: ListOf[str] | None = None
    """float (the default), base64."""
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    priority: Annotated[int, Field(ge=-INT64 - 1, le=INT64)] | None = None
    request_id: str | None = None


class EmbeddingItem(BaseModel):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: Usage


class PoolingItem(BaseModel):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[list[float]] | list[float] | str


class PoolingResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingItem]
    usage: Usage


class ClassificationItem(BaseModel):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassificationItem]
    usage: Usage


class ScoreItem(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: Usage


class RerankDocument(BaseModel):
    text: str


class RerankItem(BaseModel):
    index: int
    document: RerankDocument | None = None
    relevance_score: float


class RerankUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(BaseModel):
    id: str
    model: str
    usage: RerankUsage
    results: list[RerankItem]


class CohereEmbedResponse(BaseModel):
    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
