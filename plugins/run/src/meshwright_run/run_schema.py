"""JSON schema of the run file. Imports no torch."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, PydanticInvalidForJsonSchema

from meshwright.plugin import Registry, get_registry, list_objectives

from .run_file import RunConfig


def run_schema(registry: Registry | None = None) -> dict[str, Any]:
    """Return the JSON schema of the run file, with the options of each installed strategy."""
    registry = registry or get_registry()
    schema = RunConfig.model_json_schema()
    default = RunConfig.model_fields["strategy"].default
    branches = []
    for name, spec in registry.strategies.items():
        # Each strategy keeps its own definitions, so that equal class names of two plugins do not collide.
        schema["$defs"][name] = _config_schema(spec.config_cls, f"#/$defs/{name}/$defs/{{model}}")
        reference = {"$ref": f"#/$defs/{name}"}
        if spec.is_wrapper:
            schema["properties"]["wrapper_config"].setdefault("properties", {})[name] = reference
        branches.append(
            {
                "if": {
                    "properties": {"strategy": {"enum": [name, *spec.aliases]}},
                    "required": [] if name == default else ["strategy"],
                },
                "then": {"properties": {"strategy_config": reference}},
            }
        )
    schema["properties"]["objective"]["anyOf"] = _objective_schemas(schema["$defs"])
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "meshwright run file"
    schema["allOf"] = branches
    return schema


def _objective_schemas(definitions: dict[str, Any]) -> list[dict[str, Any]]:
    shipped = list_objectives()
    mappings: list[dict[str, Any]] = []
    for name, objective_cls in shipped.items():
        key = f"objective_{name}"
        definitions[key] = _config_schema(objective_cls, f"#/$defs/{key}/$defs/{{model}}")
        definitions[key]["properties"]["name"] = {"const": name}
        definitions[key]["required"] = ["name", *definitions[key].get("required", [])]
        mappings.append({"$ref": f"#/$defs/{key}"})
    return [{"enum": [*shipped, None]}, *mappings]


def _config_schema(config_cls: type[BaseModel], ref_template: str) -> dict[str, Any]:
    try:
        return config_cls.model_json_schema(ref_template=ref_template)
    except PydanticInvalidForJsonSchema:
        # JSON cannot describe it; the rest of the schema is still useful.
        return {"type": "object"}
