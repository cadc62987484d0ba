"""Names from configurations are imported from the allow-list only, and never run anything else."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from meshwright.base.errors import ConfigError
from meshwright.files import class_paths as imports
from meshwright.files.class_paths import (
    ALLOWED_IMPORTS_VARIABLE,
    allow_imports,
    allowed_imports,
    import_class_from_path,
    import_classes_from_paths,
    instantiate,
)


@pytest.fixture
def side_effect(tmp_path, monkeypatch):
    """A package that leaves a file when it is imported."""
    package = tmp_path / "my_plans"
    package.mkdir()
    trace = tmp_path / "imported"
    (package / "__init__.py").write_text(
        f"open({str(trace)!r}, 'w').close()\n"
        "from os import system\n"
        "from subprocess import Popen\n"
        "class Style:\n    class Inner: pass\n"
        "def plan(): return {}\n"
        "PLAN = {'a': 1}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "_allowed_modules", set(imports._allowed_modules))
    yield trace
    sys.modules.pop("my_plans", None)


def refusal(name: str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        import_class_from_path(name, **options)
    return str(caught.value)


def test_classes_of_allowed_modules_are_imported():
    assert import_class_from_path("torch.optim.AdamW") is torch.optim.AdamW
    assert import_classes_from_paths(["torch.nn.Linear", "torch.distributed.fsdp.CPUOffloadPolicy"]) == [
        torch.nn.Linear,
        CPUOffloadPolicy,
    ]


def test_a_foreign_module_is_refused_before_it_is_imported(side_effect):
    text = refusal("my_plans.Style")
    assert "allow_imports('my_plans')" in text
    assert f"{ALLOWED_IMPORTS_VARIABLE}=my_plans" in text
    with pytest.raises(ConfigError):
        import_classes_from_paths(["torch.nn.Linear", "my_plans.Style"])
    assert not side_effect.exists()


def test_the_user_extends_the_list_by_code(side_effect):
    allow_imports("my_plans")
    assert import_class_from_path("my_plans.Style").__name__ == "Style"
    assert import_class_from_path("my_plans.Style.Inner").__name__ == "Inner"
    assert import_class_from_path("my_plans.plan", kind="function")() == {}
    assert import_class_from_path("my_plans.PLAN", kind=("function", "dict")) == {"a": 1}
    assert "not a class" in refusal("my_plans.PLAN")
    assert side_effect.exists()


def test_the_user_extends_the_list_by_the_environment(side_effect, monkeypatch):
    monkeypatch.setenv(ALLOWED_IMPORTS_VARIABLE, "other, my_plans")
    assert {"other", "my_plans"} <= set(allowed_imports())
    assert import_class_from_path("my_plans.Style").__name__ == "Style"
    monkeypatch.setenv(ALLOWED_IMPORTS_VARIABLE, "not a module")
    assert ALLOWED_IMPORTS_VARIABLE in refusal("my_plans.Style")


def test_what_an_allowed_module_has_imported_from_elsewhere_is_refused(side_effect):
    allow_imports("my_plans")
    assert "defined in 'subprocess'" in refusal("my_plans.Popen")
    assert "not a function" in refusal("my_plans.system", kind="function")
    assert "Did you mean 'Linear'" in refusal("torch.nn.Linaer")


@pytest.mark.parametrize(
    "name",
    [
        "torchevil.Class",
        "os.system",
        "builtins.eval",
        "torch.os.system",
        "torch.os.popen",
        "torch.load",
        "torch.hub.load",
        "torch.utils.cpp_extension.load_inline",
        "torch.utils.cpp_extension.BuildExtension",
        "torch.package.PackageImporter",
        "torch.multiprocessing.Process",
        "transformers.dynamic_module_utils.get_class_from_dynamic_module",
        "meshwright.files.class_paths.allow_imports",
        "torch.optim",
        "torch.no_such_module.Thing",
        "torch..nn",
        "torch.nn.Linear()",
        "",
    ],
)
@pytest.mark.parametrize("kind", ["class", ("class", "function", "dict")])
def test_refused(name, kind):
    assert repr(name) in refusal(name, kind=kind)


# -- instantiate


def test_a_policy_is_made_with_dtypes_from_their_names():
    made = instantiate(
        {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
            "param_dtype": "bfloat16",
            "reduce_dtype": "torch.float32",
            "cast_forward_inputs": False,
        },
        expected=MixedPrecisionPolicy,
    )
    assert made == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False)
    assert instantiate({"pin_memory": False}, expected=CPUOffloadPolicy) == CPUOffloadPolicy(pin_memory=False)


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}, "is no MixedPrecisionPolicy"),
        ({"_target_": "subprocess.Popen", "args": "true"}, "not on the allow-list"),
        ({"_target_": 3}, "no import path"),
        ({"param_dtpye": "bfloat16"}, "Did you mean 'param_dtype'"),
        ({"param_dtype": "bfloat17"}, "no dtype"),
        ({"param_dtype": "nn"}, "no dtype"),
    ],
)
def test_instantiate_refuses(mapping, text):
    with pytest.raises(ConfigError, match=text):
        instantiate(mapping, expected=MixedPrecisionPolicy)


@pytest.mark.parametrize(
    ("name", "kind", "reported"),
    [
        ("torch.nn.functional.cross_entropy", "class", "is not a class, but a function. Name a class."),
        ("torch.nn.Linear", "function", "is not a function, but a class. Name a function."),
        ("torch.nn.modules", "class", "is not a class, but a module"),
    ],
    ids=str,
)
def test_what_a_name_stands_for_is_said_and_what_is_wanted(name, kind, reported):
    assert refusal(name, kind=kind).startswith(f"{name!r} {reported}")
