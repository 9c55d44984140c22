"""deepspeed.runtime.config_utils.DeepSpeedConfigModel, from which programs derive configurations."""

import pytest

pydantic = pytest.importorskip("pydantic")

from zeroshard.deepspeed.runtime.config_utils import DeepSpeedConfigModel  # noqa: E402

from zeroshard.integrations.deepspeed import sections  # noqa: E402


class Section(DeepSpeedConfigModel):
    depth: int = 1


class Mine(DeepSpeedConfigModel):
    size: int = 0
    names: list[str] | None = None
    name: str | None = pydantic.Field(
        None, json_schema_extra={"deprecated": True, "new_param": "names", "new_param_fn": lambda value: [value]}
    )
    levels: int = pydantic.Field(0, json_schema_extra={"deprecated": True, "new_param": "section.depth"})
    other: int = pydantic.Field(0, alias="another")
    section: Section = Section()


def test_values_aliases_and_defaults():
    assert Mine(size=42).size == 42 and Mine(size="auto").size == 0
    assert Mine(other=10).other == Mine(another=10).other == 10


def test_a_deprecated_field_goes_to_the_one_in_its_place():
    assert Mine(name="DS").names == ["DS"] and Mine(levels=3).section.depth == 3
    with pytest.raises(AssertionError, match="'name' and replacing parameter 'names' together"):
        Mine(name="DS", names=["DS"])


@pytest.mark.parametrize("given", [{"size": "DS"}, {"names": "DS"}, {"sise": 0}])
def test_what_does_not_fit_is_refused(given):
    with pytest.raises(pydantic.ValidationError):
        Mine(**given)
    mine = Mine()
    with pytest.raises(pydantic.ValidationError):
        mine.size = "DS"


def test_typed_sections_raise_what_programs_catch(monkeypatch):
    with pytest.raises(pydantic.ValidationError, match="fp16.loss_scale: expected a finite number of at least 0.*got -1"):
        sections.DeepSpeedFP16Config(loss_scale=-1)
    # as where pydantic is not installed
    monkeypatch.setattr(sections, "ValidationError", type("ValidationError", (ValueError,), {}))
    with pytest.raises(sections.ValidationError, match="^fp16.min_loss_scale: expected a number above 0"):
        sections.DeepSpeedFP16Config(enabled=True, min_loss_scale=0)


def test_auto_where_it_is_a_value():
    with pytest.raises(pydantic.ValidationError):
        Mine(strict=True, size="auto")
