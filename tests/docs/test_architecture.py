"""What DESIGN asks of the sources, held by their syntax trees: imports, private names, patches, model class names."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = "meshwright"
FOREIGN = ("torch", "transformers")
TORCH_FREE = {
    "__init__",
    "__main__",
    "base.errors",
    "base.validation",
    "_compat.chat_templates",
    "cli.data",
    "cli.main",
    "data.encoding.answers",
    "data.encoding.chat",
    "data.encoding.chat_template",
    "data.config",
    "data.encoding.conversations",
    "data.encoding.drafts",
    "data.encoding.examples",
    "data.encoding.fields",
    "data.encoding.formats",
    "data.encoding.lengths",
    "data.reading.stdlib",
    "data.summary",
    "files.class_paths",
    "files.parsing",
    "files.writing",
    "launch.companion",
    "launch.environment",
    "launch.local",
    "launch.rank",
    "mesh.sizes",
    "objectives.__init__",
    "objectives.base",
    "objectives.heads",
    "objectives.policy",
    "objectives.plugin",
    "objectives.preference",
    "objectives.registry",
    "objectives.supervised",
    "single.config",
    "single.plugin",
    "strategy.contract",
    "strategy.hooks",
    "strategy.registry",
    "strategy.spec",
    "strategy.stack",
    "train.run.run_file",
}
BRIDGES = {"meshwright_fabric", "meshwright_trainer", "meshwright_trackers"}
"""Packages that register no strategy."""
PLUGIN_TORCH_FREE = {"__init__", "config", "plugin"}
KNOWN_PRIVATE = {
    "_flatten",
    "_unflatten",
    "_get_fsdp_state",
    "_local_tensor",
    "_lazy_init",
    "_foreach_mul_",
    "_tp_plan",
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
}
"""Private names of torch and transformers that are never ours, even if a class here happens to use one."""
MODEL_CLASS = re.compile(r"\b(?!AutoModelFor)[A-Z]\w*(?:ForCausalLM|LMHeadModel|DecoderLayer)\b")


@dataclass
class Source:
    package: str
    module: str
    """Within the package, with dots."""
    text: str
    own_private: frozenset[str] = field(default_factory=frozenset)
    """Private names that our own classes and modules define."""

    def __str__(self) -> str:
        return f"{self.package}.{self.module}"

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> dict[str, str]:
        """What each imported name stands for; relative imports start with a dot."""
        bound = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound[alias.asname or alias.name.split(".")[0]] = alias.name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    bound[alias.asname or alias.name] = f"{'.' * node.level}{node.module or ''}.{alias.name}"
        return bound

    def is_foreign(self, node: ast.expr) -> bool:
        """Whether an expression is a name from torch or transformers, or an attribute of one."""
        return self.imports.get(root_name(node), "").split(".")[0] in FOREIGN


def root_name(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Each import as (module, names); `import a.b` has no names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            yield from ((str(each.value), []) for each in node.args[:1] if isinstance(each, ast.Constant))


def called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported for real: no function bodies, no `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and getattr(child.test, "id", getattr(child.test, "attr", "")) == "TYPE_CHECKING":
            yield from (each for other in child.orelse for each in (other, *at_import(other)))
            continue
        yield child
        yield from at_import(child)


# -- the rules: each yields what breaks it


def imports_of_plugins(source: Source) -> Iterator[str]:
    for module, _ in imported_modules(source.tree):
        root = module.split(".")[0]
        if root.startswith(f"{CORE}_") and root != source.package:
            yield f"imports {module}"


def imports_of_private_core(source: Source) -> Iterator[str]:
    if source.package == CORE:
        return
    for module, names in imported_modules(source.tree):
        if module.split(".")[0] == CORE and any(map(is_private, [*module.split("."), *names])):
            yield f"imports {module}: {', '.join(names)}"


def torch_at_import(source: Source) -> Iterator[str]:
    if source.module not in (TORCH_FREE if source.package == CORE else PLUGIN_TORCH_FREE):
        return
    for node in at_import(source.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for module, _ in imported_modules(node):
                if module.split(".")[0] in FOREIGN:
                    yield f"line {node.lineno}: imports {module} when it is imported"


def private_foreign_names(source: Source) -> Iterator[str]:
    if "_compat" in source.module.split("."):
        return
    for module, names in imported_modules(source.tree):
        if module.split(".")[0] in FOREIGN and any(map(is_private, [*module.split("."), *names])):
            yield f"imports {module}: {', '.join(names)}"
    for node in ast.walk(source.tree):
        for owner, name in private_accesses(node):
            imported = source.imports.get(root_name(owner))
            if source.is_foreign(owner) or name in KNOWN_PRIVATE:
                yield f"line {node.lineno}: {ast.unparse(owner)}.{name}"
            elif imported is None and name not in source.own_private:
                # Of a value whose type is not known here, and not a name of ours.
                yield f"line {node.lineno}: {ast.unparse(owner)}.{name} is defined nowhere in this project"


def private_accesses(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and called(node) in ("getattr", "setattr", "hasattr") and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
            yield node.args[0], name.value


def patches_of_foreign_code(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = [each for target in node.targets for each in getattr(target, "elts", [target])]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and called(node) in ("setattr", "delattr") and node.args:
            targets = [ast.Attribute(node.args[0], "?")]
        for target in targets:
            if not isinstance(target, ast.Name) and source.is_foreign(target) and not is_setting(source, target):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def is_setting(source: Source, target: ast.expr) -> bool:
    """Whether an assignment changes a setting of torch or transformers, which `_compat` may."""
    settings = ("torch._dynamo.config", "torch._inductor.config", "dynamic_module_utils")
    is_one = isinstance(target, ast.Attribute) and ast.unparse(target.value) in settings
    return is_one and source.module.split(".")[0] == "_compat"


def assert_statements(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def meaning_of_what_was_written(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("model_fields_set", "__pydantic_fields_set__"):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def names_that_hide_what_is_called(source: Source) -> Iterator[str]:
    """A local value under the name of a function of the module, which the same function calls: the value is called."""
    functions = {node.name for node in source.tree.body if isinstance(node, ast.FunctionDef)} | set(source.imports)
    for function in ast.walk(source.tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        stored = {node.id for node in names if isinstance(node.ctx, ast.Store)} & functions
        calls = {
            node.func.id
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and called(node) in stored and isinstance(node.func, ast.Name)
        }
        yield from (f"line {function.lineno}: {name} in {function.name}" for name in sorted(calls))


def model_class_names(source: Source) -> Iterator[str]:
    yield from MODEL_CLASS.findall(source.text)


# -- the sources


def private_names_defined_in(trees: list[ast.Module]) -> frozenset[str]:
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                stored_on_self = isinstance(node, ast.Name) or root_name(node) in ("self", "cls")
                names |= {getattr(node, "attr", None) or getattr(node, "id", "")} if stored_on_self else set()
    return frozenset(filter(is_private, names))


def sources() -> list[Source]:
    packages = [ROOT / "core" / CORE, *sorted(ROOT.glob("plugins/*/src/*"))]
    found = [
        Source(
            package.name, ".".join(path.relative_to(package).with_suffix("").parts), path.read_text(encoding="utf-8")
        )
        for package in packages
        if (package / "__init__.py").is_file()
        for path in sorted(package.rglob("*.py"))
    ]
    own = private_names_defined_in([source.tree for source in found])
    return [Source(source.package, source.module, source.text, own) for source in found]


SOURCES = sources()

RULES: dict[Callable[[Source], Iterator[str]], list[tuple[str, str, str]]] = {
    imports_of_plugins: [
        ("meshwright", "stack", "import meshwright_ddp"),
        ("meshwright", "stack", "def f():\n    from meshwright_fsdp2.config import FSDP2Config"),
        ("meshwright", "stack", "import importlib\nimportlib.import_module('meshwright_ddp')"),
        ("meshwright_ddp", "plugin", "from meshwright_fsdp2 import FSDP2Config"),
    ],
    imports_of_private_core: [
        ("meshwright_ddp", "manager", "from meshwright._compat.torch import flatten_mesh"),
        ("meshwright_ddp", "manager", "from meshwright import _compat"),
        ("meshwright_ddp", "manager", "from meshwright.step.batch import _defect"),
    ],
    torch_at_import: [
        ("meshwright", "strategy.registry", "import torch"),
        ("meshwright", "data.config", "import torch.distributed as dist"),
        ("meshwright", "cli.main", "try:\n    from transformers import AutoConfig\nexcept ImportError:\n    pass"),
        ("meshwright_ddp", "plugin", "class A:\n    from torch import nn"),
        ("meshwright_ddp", "config", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
    ],
    private_foreign_names: [
        ("meshwright", "mesh", "import torch\ntorch._foreach_mul_([], 1)"),
        ("meshwright", "mesh", "import torch\ntorch.distributed._state.x()"),
        ("meshwright", "mesh", "import torch.distributed as dist\ndist._tensor"),
        ("meshwright", "mesh", "from torch.distributed._tensor import DTensor"),
        ("meshwright", "mesh", "from torch.distributed import _functional_collectives"),
        ("meshwright", "mesh", "def f(mesh):\n    return mesh._flatten('dp')"),
        ("meshwright", "mesh", "def f(mesh):\n    return mesh['dp']._unflatten(0)"),
        ("meshwright", "mesh", "def f(model):\n    return model._no_split_modules"),
        ("meshwright", "mesh", "def f(model):\n    return getattr(model, '_no_split_modules')"),
        ("meshwright", "mesh", "class A(Module):\n    def f(self):\n        return self._parameters"),
        ("meshwright", "mesh", "def f(module):\n    return module._buffers"),
    ],
    patches_of_foreign_code: [
        ("meshwright", "mesh", "import torch\ntorch.manual_seed = print"),
        ("meshwright", "mesh", "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True"),
        ("meshwright", "mesh", "from torch import nn\nnn.Linear.forward, x = print, 1"),
        ("meshwright", "mesh", "def f():\n    import transformers as t\n    t.models.llama.x += 1"),
        ("meshwright", "mesh", "from transformers import AutoConfig\nsetattr(AutoConfig, 'x', 1)"),
        ("meshwright", "mesh", "from transformers import CONFIG_MAPPING\nCONFIG_MAPPING['mine'] = 1"),
        ("meshwright", "mesh", "from torch import nn\ndel nn.Linear"),
        ("meshwright", "mesh", "import torch\ntorch._dynamo.config.x = True"),
    ],
    names_that_hide_what_is_called: [
        ("meshwright", "mesh", "def size(x):\n    return x\n\ndef f(x):\n    size = size(x)\n    return size"),
        ("meshwright", "mesh", "from .sizes import size\n\ndef f(x):\n    for size in x:\n        size(x)"),
    ],
    assert_statements: [("meshwright", "mesh", "def f(x):\n    assert x > 0, 'bad'")],
    meaning_of_what_was_written: [("meshwright_ddp", "config", "def f(c):\n    return 'x' in c.model_fields_set")],
    model_class_names: [
        ("meshwright", "layout", "from transformers import LlamaForCausalLM"),
        ("meshwright", "layout", "NAMES = ['GPT2LMHeadModel']"),
        ("meshwright", "layout", "x = {'Qwen2MoeDecoderLayer': 1}"),
    ],
}
ALLOWED: list[tuple[Callable[[Source], Iterator[str]], str, str, str]] = [
    (imports_of_plugins, "meshwright_ddp", "plugin", "from meshwright_ddp.config import DDPConfig"),
    (
        imports_of_private_core,
        "meshwright_ddp",
        "manager",
        "from meshwright.mesh.mesh import Mesh\nfrom ._compat import x",
    ),
    (
        torch_at_import,
        "meshwright",
        "strategy.registry",
        "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch",
    ),
    (torch_at_import, "meshwright", "mesh", "import torch"),
    (private_foreign_names, "meshwright", "_compat", "def f(mesh):\n    return mesh._flatten('dp')"),
    (private_foreign_names, "meshwright", "rank", "import os\nos._exit(1)"),
    (private_foreign_names, "meshwright", "mesh", "import torch\ntorch.__version__"),
    (patches_of_foreign_code, "meshwright", "_compat", "import torch\ntorch._dynamo.config.x = True"),
    (patches_of_foreign_code, "meshwright", "mesh", "import torch\nseed = torch.initial_seed()\nseed.x = 1"),
    (model_class_names, "meshwright", "model", "from transformers import AutoModelForCausalLM"),
]


def test_the_packages_of_this_project_are_found():
    assert {"meshwright", "meshwright_ddp", "meshwright_fsdp2"} <= {source.package for source in SOURCES}
    modules = {source.module for source in SOURCES if source.package == CORE}
    assert modules >= TORCH_FREE, "a module in TORCH_FREE has gone"
    for package in {source.package for source in SOURCES} - {CORE} - BRIDGES:
        assert {source.module for source in SOURCES if source.package == package} >= PLUGIN_TORCH_FREE


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_source_has(rule):
    broken = [f"{source}: {text}" for source in SOURCES for text in rule(source)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "case"),
    [(rule, case) for rule, cases in RULES.items() for case in cases],
    ids=lambda value: value.__name__ if callable(value) else value[2].splitlines()[-1].strip(),
)
def test_the_rule_catches(rule, case):
    assert list(rule(Source(*case)))


@pytest.mark.parametrize(("rule", "package", "module", "text"), ALLOWED)
def test_the_rule_allows(rule, package, module, text):
    assert not list(rule(Source(package, module, text)))


def test_private_names_of_our_own_are_not_taken_for_foreign_ones():
    text = "class A:\n    def __init__(self):\n        self._mine = 1\n\ndef f(a):\n    return a._mine"
    own = private_names_defined_in([ast.parse(text)])
    assert own == {"_mine"}
    assert not list(private_foreign_names(Source(CORE, "mesh", text, own)))
    assert list(private_foreign_names(Source(CORE, "mesh", text)))
