"""Rules of the sources: imports by the contracts in pyproject.toml, names, patches, statements, sizes."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from support.package_map import (
    ROOT,
    SourceModule,
    find_import_edges,
    find_packages,
    lay_out_map,
    read_modules,
    render_page,
)

FOREIGN = ("torch", "transformers")
MODULES = [module for package in find_packages() for module in read_modules(package).values()]
WITHOUT_TORCH = (
    *(
        "meshwright",
        "meshwright.cli.main",
        "meshwright_run.commands",
        "meshwright_run.model_commands",
        "meshwright_run.data.config",
        "meshwright_run.data.train_sampler",
    ),
    *("meshwright.files.class_paths", "meshwright_run.launch.local", "meshwright_run.launch.rank_process"),
    *("meshwright.objectives", "meshwright.single.plugin", "meshwright.strategy.contract", "meshwright.strategy.stack"),
    *("meshwright_run.run_file", "meshwright.mesh.sizes", "meshwright_run.data.conversations"),
    *(f"meshwright_{name}.plugin" for name in ("fsdp2", "ddp", "megatron_fsdp", "pipeline")),
)
KNOWN_PRIVATE = {
    *("_flatten", "_unflatten", "_get_fsdp_state", "_local_tensor", "_lazy_init", "_foreach_mul_", "_tp_plan"),
    *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"),
}
"""Private names of torch and transformers that are never ours, even if a class here uses one."""
LONGEST = {ast.Module: 400, ast.ClassDef: 250, ast.FunctionDef: 60}
"""In lines; more only if the docstring gives the reason, starting with `WHY`."""
WHY = "One thing, since"
PROMISED = ("meshwright", "meshwright.plugin", "meshwright.testing")
Rule = Callable[[SourceModule], Iterator[str]]


# -- syntax trees


def root_name(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST) -> str:
    function = getattr(node, "func", None)
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_private(name: str) -> bool:
    # Methods of named tuples are public, in spite of their names.
    return name.startswith("_") and not name.startswith("__") and name not in ("_asdict", "_replace")


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each name that an import binds, and the dotted name it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((alias.asname or alias.name, f"{base}.{alias.name}") for alias in node.names)


def foreign_names(module: SourceModule) -> set[str]:
    """Names in a module that stand for something of torch or transformers."""
    return {name for name, target in imported(module.tree) if target.split(".")[0] in FOREIGN}


def defined(trees: list[ast.Module]) -> set[str]:
    """Private names that functions, classes and attributes of our own have."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_name(node) in ("self", "cls"):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


OWN = defined([module.tree for module in MODULES])


# -- the rules; each yields what breaks it


def deep_imports_of_core_in_plugins(module: SourceModule) -> Iterator[str]:
    """Plugins import `meshwright`, `meshwright.plugin` and `meshwright.testing`, and nothing deeper of core."""
    if module.name.split(".")[0] == "meshwright":
        return
    for node in ast.walk(module.tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            if name.split(".")[0] == "meshwright" and name not in PROMISED:
                yield f"line {node.lineno}: imports {name}"


def private_foreign_names(module: SourceModule) -> Iterator[str]:
    """Private names of torch and transformers outside of `_compat`."""
    if "_compat" in module.name.split("."):
        return
    for _, target in imported(module.tree):
        if target.split(".")[0] in FOREIGN and any(map(is_private, target.split("."))):
            yield f"imports {target}"
    names, foreign = dict(imported(module.tree)), foreign_names(module)
    for node in ast.walk(module.tree):
        owner, name = node, ""
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif called(node) in ("getattr", "setattr", "hasattr") and isinstance(node, ast.Call) and len(node.args) > 1:
            owner, name = node.args[0], str(getattr(node.args[1], "value", ""))
        if is_private(name):
            root = root_name(owner)
            # Of an imported name of ours, any; of an unknown value, a name that this project defines.
            if root in foreign or name in KNOWN_PRIVATE or (root not in names and name not in OWN):
                yield f"line {getattr(node, 'lineno', 0)}: {ast.unparse(owner)}.{name}"


def patches_of_foreign_code(module: SourceModule) -> Iterator[str]:
    foreign = foreign_names(module)
    settings = ("torch._dynamo.config", "torch._inductor.config", "dynamic_module_utils")
    for node in ast.walk(module.tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [each for target in node.targets for each in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and called(node) in ("setattr", "delattr") and node.args:
            targets = [ast.Attribute(node.args[0], "?")]
        for target in targets:
            is_setting = isinstance(target, ast.Attribute) and ast.unparse(target.value) in settings
            allowed = is_setting and module.name.split(".")[1:2] == ["_compat"]
            if not isinstance(target, ast.Name) and root_name(target) in foreign and not allowed:
                yield f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


def assertions_and_fields_set(module: SourceModule) -> Iterator[str]:
    """`assert` is left out under -O; what a config was given explicitly must not change its meaning."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assert) or getattr(node, "attr", "") in ("model_fields_set", "__pydantic_fields_set__"):
            yield f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)}"


def model_class_names(module: SourceModule) -> Iterator[str]:
    yield from re.findall(r"\b(?!AutoModelFor)[A-Z]\w*(?:ForCausalLM|LMHeadModel|DecoderLayer)\b", module.text)


def what_is_too_long(module: SourceModule) -> Iterator[str]:
    for node in ast.walk(module.tree):
        for kind, most in LONGEST.items():
            if isinstance(node, kind):
                lines = module.lines if isinstance(node, ast.Module) else (node.end_lineno or 0) - node.lineno + 1
                if lines > most and WHY not in (ast.get_docstring(node) or ""):
                    yield f"{getattr(node, 'name', '')}: {lines} lines, at most {most}"


BREAKS: dict[Rule, str] = {
    deep_imports_of_core_in_plugins: "from meshwright.step.handshake import agree",
    private_foreign_names: "def f(model):\n    return getattr(model, '_no_split_modules')",
    patches_of_foreign_code: "from torch import nn\nnn.Linear.forward, x = print, 1",
    assertions_and_fields_set: "def f(x):\n    assert x > 0, 'bad'",
    model_class_names: "NAMES = ['GPT2LMHeadModel']",
    what_is_too_long: "def f():\n" + "    x = 1\n" * 61,
}
"""Each rule, with a text that breaks it."""


@pytest.mark.parametrize("rule", BREAKS, ids=lambda rule: rule.__name__)
def test_no_source_has(rule: Rule, tmp_path) -> None:
    broken = [f"{module.name}: {text}" for module in MODULES for text in rule(module)]
    assert not broken, "\n".join(broken)
    (tmp_path / "manager.py").write_text(BREAKS[rule], encoding="utf-8")
    assert list(rule(SourceModule("meshwright_ddp.manager", tmp_path / "manager.py"))), "the rule finds nothing"


def test_imports_follow_the_contracts() -> None:
    # In a process of its own: import-linter disables the loggers that are there.
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_strategies_are_listed_and_configs_validated_without_torch() -> None:
    code = f"import sys, {', '.join(WITHOUT_TORCH)}; meshwright.list_strategies(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_for_authors_of_plugins_bring_no_torch_and_little_of_core() -> None:
    code = """
import sys
from pathlib import Path
import meshwright.plugin
names = [name for name in dir(meshwright.plugin) if not name.startswith("_")]
assert len(names) > 300 and "torch" not in sys.modules
meshwright.plugin.DataParallelManager
loaded = [module for name, module in sys.modules.items() if name.split(".")[0] == "meshwright"]
print(sum(len(Path(module.__file__).read_text().splitlines()) for module in loaded))
for name in names:
    getattr(meshwright.plugin, name)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) <= 9_000


def test_the_table_of_packages_is_that_of_the_sources() -> None:
    written = (ROOT / "docs" / "contribute" / "architecture.md").read_text(encoding="utf-8")
    assert render_page(written, read_modules(ROOT / "core" / "meshwright")) == written, (
        "run python tests/support/package_map.py"
    )


def test_no_arrow_of_the_map_passes_through_a_box_or_goes_up() -> None:
    pairs = find_import_edges(read_modules(ROOT / "core" / "meshwright"))
    layout = lay_out_map(pairs)
    assert layout.arrows.keys() == pairs
    for (package, imported), corners in layout.arrows.items():
        (_, start), (_, _), (_, _), (_, end) = corners
        assert layout.boxes[package][1] < start < layout.boxes[package][3]
        assert layout.boxes[imported][1] < end < layout.boxes[imported][3]
        assert start < end, f"{package} is drawn below {imported}"
        for (x, y), (other_x, other_y) in itertools.pairwise(corners):
            for left, top, right, bottom in layout.boxes.values():
                outside = max(x, other_x) <= left or min(x, other_x) >= right
                assert outside or max(y, other_y) <= top or min(y, other_y) >= bottom
