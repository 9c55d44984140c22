"""deepspeed.runtime.config_utils: a pydantic base class for the configurations of programs, with deprecated fields.

    class Mine(DeepSpeedConfigModel):
        size: int = 0
        width: str = Field("0", json_schema_extra={"deprecated": True, "new_param": "size", "new_param_fn": int})

This module needs the package pydantic; zeroshard's own configurations do not.
"""

from __future__ import annotations

from typing import Any

from .logs import logger
from .sections import without_auto
from .stand_ins import NotSupported
from .utilities import recursive_getattr

try:
    from pydantic import BaseModel, ConfigDict
except ImportError as error:
    raise NotSupported(
        "deepspeed.runtime.config_utils.DeepSpeedConfigModel is a class of pydantic: pip install pydantic."
    ) from error


class DeepSpeedConfigModel(BaseModel):
    """Base class of configurations. Unknown keys and wrong types raise pydantic's ValidationError; "auto" means the default.

    strict: accept "auto" as an ordinary value. A field is deprecated if its `json_schema_extra` has `deprecated` true: its
    `deprecated_msg` is logged, and the field in `new_param` (or "section.field") is set to new_param_fn(value), unless
    `set_new_param` is false. Raises AssertionError if both fields are given.
    """

    model_config = ConfigDict(
        validate_default=True, validate_assignment=True, use_enum_values=True, populate_by_name=True, extra="forbid",
        arbitrary_types_allowed=True, protected_namespaces=(),
    )  # fmt: skip

    def __init__(self, strict: bool = False, **data: object) -> None:
        super().__init__(**(data if strict else without_auto(data)))
        for name, info in type(self).model_fields.items():
            told: Any = info.json_schema_extra
            if not (isinstance(told, dict) and told.get("deprecated") and name in self.model_fields_set):
                continue
            new, more = told.get("new_param", ""), told.get("deprecated_msg", "")
            logger.warning(f"Config parameter {name} is deprecated{f' use {new} instead' if new else ''}. {more}")
            if new and told.get("set_new_param", True):
                above, _, field = new.rpartition(".")
                target = recursive_getattr(self, above) if above else self
                given = getattr(target, "model_fields_set", ())
                assert field not in given, (
                    f"Cannot provide deprecated parameter '{name}' and replacing parameter '{new}' together"
                )
                setattr(target, field, told.get("new_param_fn", lambda value: value)(getattr(self, name)))
