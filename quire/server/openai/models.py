"""GET /v1/models: every name that is served, with the model behind it.

Must not know: requests.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from quire.schema.errors import ModelNotFoundError
from quire.server.errors import ERROR_RESPONSES
from quire.server.served import ServedModel, ServedModels

router = APIRouter(tags=["models"])
_ERRORS = {status: ERROR_RESPONSES[status] for status in (401, 404)}


class ModelPermission(BaseModel):
    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[ModelPermission] = []


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard] = []


@router.get("/v1/models", operation_id="list_models", responses={401: _ERRORS[401]})
async def list_models(request: Request) -> ModelList:
    """All served names: of base models and of adapters, whose `parent` is their base model."""
    served: ServedModels = request.app.state.quire.served
    return ModelList(data=[_card(name, model) for name, model in served.entries()])


@router.get("/v1/models/{model:path}", operation_id="retrieve_model", responses=_ERRORS)  # type: ignore[arg-type]
async def retrieve_model(request: Request, model: str) -> ModelCard:
    """One served name."""
    served: ServedModels = request.app.state.quire.served
    if not model:
        raise ModelNotFoundError("The model name is empty.", param="model")
    return _card(model, served.find(model))


def _card(name: str, model: ServedModel) -> ModelCard:
    permission = ModelPermission(id=f"modelperm-{model.created:x}", created=model.created)
    return ModelCard(
        id=name,
        created=model.created,
        root=model.root,
        parent=model.parent,
        max_model_len=model.max_model_len,
        permission=[permission],
    )
