"""deepspeed.runtime.config_utils: a pydantic base class for the configurations of programs, with deprecated fields.

    class Mine(DeepSpeedConfigModel):
        size: int = 0
        width: str = Field("0", json_schema_extra={"deprecated": True, "new_param": "size", "new_param_fn": int})

This module needs the package pydantic; zeroshard's own configurations do not.
"""

from __future__ import annotations

from typing import Any

from .logs import logger
from .stand_ins import NotSupported

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

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(
            **{key: value for key, value in data.items() if strict or not (isinstance(value, str) and value == "auto")}
        )
        for name, field in type(self).model_fields.items():
            told = field.json_schema_extra
            if isinstance(told, dict) and told.get("deprecated") and name in self.model_fields_set:
                self._follow(name, told)

    def _follow(self, name: str, told: dict[str, Any]) -> None:
        """Warn that a field is deprecated, and set the field that replaces it."""
        new = told.get("new_param", "")
        logger.warning(
            f"Config parameter {name} is deprecated{f' use {new} instead' if new else ''}. {told.get('deprecated_msg', '')}"
        )
        if not new or not told.get("set_new_param", True):
            return
        *sections, field = new.split(".")
        target: Any = self
        for section in sections:
            target = getattr(target, section)
        given = getattr(target, "model_fields_set", ())
        assert field not in given, f"Cannot provide deprecated parameter '{name}' and replacing parameter '{new}' together"
        setattr(target, field, told.get("new_param_fn", lambda value: value)(getattr(self, name)))
