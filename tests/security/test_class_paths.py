"""Class paths in files: nothing is constructed, and no function called, but what an option is for.

README.md in this directory has the table of all options that take a class path.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.benchmark  # of whose classes none may be made
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from meshwright.base.errors import ConfigError, ModelError
from meshwright.files import class_paths
from meshwright.files.class_paths import allow_imports, check_import, import_class_from_path, instantiate
from meshwright.model.configuration import config_from_mapping
from meshwright.objectives.base import ObjectiveConfig as Objective
from meshwright.objectives.registry import check_objective, get_objective
from meshwright.optim.build import resolve_optimizer_class
from meshwright.optim.config import OptimizerConfig, OptimizerGroup
from meshwright.parallel.tensor.plan_sources import find_plan
from meshwright_pipeline.runtime.custom_loss import build_loss_objective

DANGEROUS = """
    torch.utils.benchmark.Timer torch.utils.benchmark.utils.timer.Timer torch._inductor.codecache.DLLWrapper
    torch._inductor.codecache.CppCodeCache torch._inductor.compile_worker.subproc_pool.SubprocPool
    torch._C.PyTorchFileReader torch._C.PyTorchFileWriter torch._ops._OpNamespace torch.classes._ClassNamespace
    torch.cuda.CUDAPluggableAllocator torch.distributed.TCPStore torch.distributed.FileStore
    torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler
    torch.distributed.launcher.api.elastic_launch torch.distributed.checkpoint.FileSystemReader
    torch.distributed.rpc.api.AllGatherStates torch.distributed.fsdp._wrap_utils._Policy torch.fx.GraphModule
    torch.jit.CompilationUnit torch.library.Library torch.multiprocessing.Process torch.nn.Linear
    torch.nn.ModuleList torch.nn.Bilinear torch.nn.EmbeddingBag torch.nn.parallel.DistributedDataParallel
    torch.package.PackageImporter torch.utils.cpp_extension.BuildExtension torch.utils.data.DataLoader
    torch.utils.model_dump.__main__.main torch.utils.tensorboard.SummaryWriter transformers.Trainer
    transformers.Pipeline transformers.AutoModelForCausalLM transformers.AutoTokenizer
    transformers.dynamic_module_utils.get_class_from_dynamic_module transformers.integrations.DeepSpeedPlugin
    transformers.models.llama.modeling_llama.LlamaForCausalLM
    transformers.models.llama.convert_llama_weights_to_hf.Llama3Converter
    transformers.models.auto.modeling_auto.AutoModelForCausalLM transformers.models.rag.retrieval_rag.RagRetriever
    transformers.models.deprecated.transfo_xl.tokenization_transfo_xl.TransfoXLTokenizer
    meshwright.mesh.world.World meshwright_replicate.server.ReplicaServer
    meshwright.checkpoint.remote_storage.RemoteStorage meshwright.files.class_paths.allow_imports
    meshwright_testing.cells.Cell subprocess.Popen os.system builtins.exec ctypes.CDLL importlib.import_module
""".strip().split()


MODEL = nn.Linear(2, 2)
REFUSED = r"not imported|no import path| is no |is not a |does not exist|defined in|cannot be imported"
# Each option that takes a class path; a path that is refused when a file is checked is refused there, too.
PLACES: dict[str, Callable[[str], Any]] = {
    "objective": get_objective,
    "objective with options": lambda path: get_objective({"name": path, "setup": "pass", "stmt": "1"}),
    "optimizer.name": lambda path: resolve_optimizer_class(OptimizerConfig(name=path).name, "optimizer.name"),
    "optimizer.groups[].name": lambda path: resolve_optimizer_class(
        OptimizerGroup(name=path, match=["*"]).name or "", "optimizer.groups[0].name"
    ),
    "mp_policy._target_": lambda path: instantiate({"_target_": path}, expected=MixedPrecisionPolicy),
    "offload_policy._target_": lambda path: instantiate({"_target_": path}, expected=CPUOffloadPolicy),
    "tp_plan": lambda path: find_plan(MODEL, None, path),  # type: ignore[arg-type]  # before the layout is looked at
    "loss_fn": build_loss_objective,
}


@pytest.mark.parametrize("place", PLACES)
def test_no_option_makes_an_object_of_what_it_is_not_for(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"an object was made with {arguments} {options}")

    for path in DANGEROUS:
        module, _, leaf = path.rpartition(".")
        target = getattr(sys.modules.get(module), leaf, None)
        with monkeypatch.context() as patch:
            # Of a class that is imported already.
            if isinstance(target, type):
                with contextlib.suppress(AttributeError, TypeError):
                    patch.setattr(target, "__init__", refuse)
            with pytest.raises((ConfigError, ValueError), match=REFUSED):
                PLACES[place](path)


def test_nothing_is_imported_from_modules_that_are_not_on_the_list() -> None:
    # Importing the first runs a command-line program; the second is a script beside a model.
    script = "transformers.models.llama.convert_llama_weights_to_hf.Llama3Converter"
    for name in ("torch.utils.model_dump.__main__.main", script):
        for place in PLACES.values():
            with pytest.raises((ConfigError, ValueError)):
                place(name)
        assert name.rpartition(".")[0] not in sys.modules
        with pytest.raises(ConfigError, match=r"private|not on the allow-list"):
            check_import(name)
    # Also while a file is only checked.
    for path in DANGEROUS:
        if not path.startswith(("torch.nn.", "transformers.models.")):
            with pytest.raises(ConfigError):
                check_objective(path)


def test_an_allowed_module_does_not_lend_what_it_has_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("from subprocess import Popen", "from torch.utils.benchmark import Timer", "from torch.nn import Linear")
    (tmp_path / "own_module.py").write_text("\n".join(own))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(class_paths, "_allowed_modules", set())
    allow_imports("own_module")
    for name, text in {
        "own_module.Popen": "defined in 'subprocess'",
        "own_module.Timer": "defined in 'torch.utils.benchmark",
        "own_module.Linear": "is no Objective",
    }.items():
        with pytest.raises(ConfigError, match=text):
            import_class_from_path(name, base=Objective)
    sys.modules.pop("own_module")


def test_classes_that_configurations_need_are_imported_and_made_for_their_own_option() -> None:
    layer = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
    for path in ("torch.distributed.tensor.parallel.ColwiseParallel", layer):
        assert isinstance(import_class_from_path(path), type)
    assert build_loss_objective("torch.nn.CrossEntropyLoss") is not None
    assert resolve_optimizer_class("torch.optim.AdamW", "optimizer.name") is torch.optim.AdamW
    policy = {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "param_dtype": "bfloat16"}
    assert instantiate(policy, expected=MixedPrecisionPolicy).param_dtype is torch.bfloat16


def test_kernels_of_the_hub_are_refused_in_a_run_file() -> None:
    for field in ("attn_implementation", "experts_implementation"):
        with pytest.raises(ModelError, match=f"model asks for code of the Hugging Face hub: {field}="):
            config_from_mapping({"model_type": "llama", field: "owner/kernels"})
