"""Nothing that a file holds is run, under any command, even if the one at the terminal answers "y" to all questions.

One process imports the program once and forks for each command, on a terminal of its own whose user types "y" without
end. Every place of a file that could make something run holds code that leaves a mark.
What the user names is another thing: `allow_imports`, and MESHWRIGHT_ALLOWED_IMPORTS, are no files.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from security.small_run import small_run
from support.checkpoints import rewrite_manifest
from support.commands import MODEL

TIME_LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """A command, or a call of the function that the first argument names, on files that hold code; and what it prints.

    The exit code of -1 may be any that a command has.
    """

    arguments: tuple[str, ...]
    code: int
    reported: str = ""


# -- the process that forks


def _one(name: str, *arguments: str) -> None:
    """Run a command in this process, as if it had been started with it, or a call of Python that opens a path."""
    import torch

    import meshwright as mw
    from meshwright.cli import main as cli

    sys.argv = ["meshwright", name, *arguments]
    try:
        if name == "from_pretrained":
            mw.from_pretrained(arguments[0], "single", device="cpu", allow_pickle="allow_pickle" in arguments)
        elif name == "load_checkpoint":
            manager = mw.from_config(MODEL | {"vocab_size": 300}, "single", device="cpu", dtype=torch.float32)
            mw.load_checkpoint(manager, arguments[0])
        else:
            cli.main()
    except mw.MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from None


def _on_terminal(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of a command whose terminal answers "y" to whatever is asked."""
    child, terminal = pty.fork()
    if child == 0:
        try:
            _one(*arguments)
        except SystemExit as left:
            os._exit(left.code if isinstance(left.code, int) else int(left.code is not None))
        except BaseException:
            traceback.print_exc()
            os._exit(99)
        os._exit(0)
    output, end = b"", time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                chunk = os.read(terminal, 1 << 16)
            except OSError:
                break
            if not chunk:
                break
            output += chunk
            if b"?" in chunk or b"[y/N]" in chunk:
                os.write(terminal, b"y\n")
    else:
        os.kill(child, signal.SIGKILL)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.decode(errors="replace")


def _drive(cases: str, results: str) -> None:
    """Run all commands, each in a fork of this process, in a directory whose modules can be imported."""
    os.environ.pop("MESHWRIGHT_ALLOWED_IMPORTS", None)
    sys.path.insert(0, os.getcwd())
    # What most commands import; each fork would do it again.
    for module in (
        "meshwright_run.run_rank",
        "meshwright_run.inspect_checkpoints",
        "meshwright_pipeline.show_command",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.tokenization_auto",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
    ):
        importlib.import_module(module)
    with open(cases, encoding="utf-8") as file:
        commands = json.load(file)
    found = {name: _on_terminal(arguments) for name, arguments in commands.items()}
    Path(results).write_text(json.dumps(found), encoding="utf-8")


# -- what the files hold


class _Payload:
    """Leaves the mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def _code(directory: Path, mark: Path) -> None:
    """Modules of code that leave the mark when they are imported, under the names that files refer to."""
    text = (
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import LlamaConfig as EvilConfig, LlamaForCausalLM as EvilModel\n"
        "from transformers import PreTrainedTokenizerFast as EvilTokenizer\n"
        "def plan(*_): return {}\n"
        "def generate(*_, **__): pass\n"
    )
    (directory / "custom_generate").mkdir(parents=True, exist_ok=True)
    for name in ("evil.py", "custom_generate/generate.py"):
        (directory / name).write_text(text, encoding="utf-8")


def _change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


AUTO_MAP = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.EvilModel",
    "AutoTokenizer": ["evil.EvilTokenizer", None],
}


class _Files:
    """All files, made once: a run that is in order, and copies of its parts with code in them."""

    def __init__(self, root: Path, mark: Path) -> None:
        self.root, self.mark = root, mark
        _code(root, mark)
        words = [f"{3 * n % 17} is {'even' if n % 2 else 'odd'}" for n in range(400)]
        (root / "code.txt").write_text(", ".join(words), encoding="utf-8")
        code = "{{ ''.__class__.__mro__[1].__subclasses__() }} $(touch " + str(mark) + ") ${jndi:x}"
        (root / "code.jsonl").write_text(json.dumps({"text": f"{code} " * 40}) + "\n", encoding="utf-8")
        self.run = self.run_file("run.yaml")
        # For a tokenizer that is given.
        self.run_as_is = self.run_file("as-is.yaml", data={"cache_dir": str(root / "cache"), "seq_len": 16})

    def run_file(self, name: str, **values: Any) -> Path:
        sample = {"prompt": "4 is ", "max_new_tokens": 2}
        content = {**small_run(self.root), "model": MODEL, "sample": sample, **values}
        content["data"]["corpus"] = [str(self.root / "code.*")]
        path = self.root / name
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def copy(self, source: str, name: str) -> Path:
        path = self.root / name
        shutil.copytree(self.root / source, path)
        return path

    def model(self, name: str) -> Path:
        """The model that the run has written, with modules of code beside it."""
        path = self.copy("out/model", name)
        _code(path, self.mark)
        (path / "chat_template.jinja").write_text("{{ cycler.__init__.__globals__.os.system('touch x') }}")
        return path

    def train(self, name: str, *assignments: str, run: Path | None = None) -> tuple[str, ...]:
        """A run into a directory of its own."""
        settings = (f"output_dir={self.root / name}", *assignments)
        return ("train", str(run or self.run), *(part for each in settings for part in ("--set", each)))


def _models(files: _Files) -> Iterator[tuple[str, Case]]:
    own_type, known, kernels, pickled = (files.model(name) for name in ("own-type", "known", "kernels", "pickled"))
    _change(own_type / "config.json", model_type="evil", auto_map=AUTO_MAP)
    # transformers has these classes, and takes its own.
    _change(known / "config.json", auto_map=AUTO_MAP, custom_generate=str(known))
    _change(known / "generation_config.json", custom_generate=str(known), auto_map=AUTO_MAP)
    _change(known / "tokenizer_config.json", auto_map=AUTO_MAP)
    _change(kernels / "config.json", attn_implementation="evil/kernels")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload(files.mark)))
    for path, code, reported in (
        (own_type, 2, "code of its own"),
        (known, 0, ""),
        (kernels, 2, "asks for code of the"),
        (pickled, 2, "not opened unless you ask"),
    ):
        train = files.train(f"of-{path.name}", f"model={{path: {path}}}", run=files.run_as_is)
        yield f"{path.name}: train", Case(train, code, reported or "written")
        yield f"{path.name}: call", Case(("from_pretrained", str(path)), code, reported)
    asked_for = ("from_pretrained", str(pickled), "allow_pickle")
    yield "pickled weights, asked for: call", Case(asked_for, 2, "holds no plain weights")
    for number, outside in enumerate(("..", str(files.root))):
        index = files.model(f"index-{number}")
        (index / "model.safetensors").rename(index / "other.safetensors")
        weights = {"weight_map": {"lm_head.weight": f"{outside}/out/model/model.safetensors"}}
        (index / "model.safetensors.index.json").write_text(json.dumps(weights))
        yield f"weights elsewhere, {number}: call", Case(("from_pretrained", str(index)), 2, "not in this directory")


def _tokenizers(files: _Files) -> Iterator[tuple[str, Case]]:
    tokenizer = files.model("tokenizer")
    _change(tokenizer / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="EvilTokenizer")
    (tokenizer / "config.json").unlink()
    chosen = f"data.tokenizer={tokenizer}"
    yield "tokenizer of its own: train", Case(files.train("o5", chosen, run=files.run_as_is), 2, "code of its own")
    pipeline = ("--set", "strategy=ddp", "--set", "pp_size=2", "--set", "nproc=2")
    shown = ("pipeline", "show", str(files.run_as_is), "--set", chosen, *pipeline)
    yield "tokenizer of its own: pipeline show", Case(shown, 2, "code of its own")
    saved = files.model("model-with-tokenizer")
    _change(saved / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="EvilTokenizer")
    _change(saved / "config.json", auto_map=AUTO_MAP)
    # transformers may read it by another class of its own; it asks, or runs it, in no case.
    with_such = files.train("o6", f"model={{path: {saved}}}", run=files.run_as_is)
    yield "model with such a tokenizer: train", Case(with_such, -1)


def _settings(files: _Files) -> Iterator[tuple[str, Case]]:
    tagged = files.root / "tagged.yaml"
    tagged.write_text(files.run.read_text() + f"seed: !!python/object/apply:os.system ['touch {files.mark}']\n")
    yield "a tag of YAML: train", Case(("train", str(tagged)), 2, "error: ")
    options = {"tp_plan": "evil.plan"}
    plan = files.run_file("plan.yaml", strategy="fsdp2", strategy_config=options, tp_size=2, nproc=2)
    yield "a plan of its own: train", Case(files.train("o7", run=plan), 2, "error: .*evil")
    policy = {"mp_policy": {"_target_": "evil.EvilConfig"}}
    policy_file = files.run_file("policy.yaml", strategy="fsdp2", strategy_config=policy)
    yield "a class of its own: train", Case(files.train("o8", run=policy_file), 2, "error: .*evil")
    mark = f"import os\ros.system('touch {files.mark}')"
    timer = {"name": "torch.utils.benchmark.Timer", "setup": f"pass\r{mark}\rdef g(_it, _timer):\r    pass"}
    run = files.run_file("timer.yaml", objective=timer)
    yield "a constructor of torch: train", Case(files.train("o12", run=run), 2, "error: .*Timer.*is no objective")
    crafted = files.copy("out", "timer-run")
    written = crafted / "run.yaml"
    written.write_text(yaml.safe_dump(yaml.safe_load(written.read_text()) | {"objective": timer}))
    for path in crafted.rglob("checkpoint.json"):
        extra = json.loads(path.read_text())["extra"]
        rewrite_manifest(path.parent, extra={**extra, "run": {**extra["run"], "objective": timer}})
    for command in (("replay", str(crafted)), ("diff", str(files.root / "out"), str(crafted))):
        yield f"a constructor of torch: {command[0]}", Case(command, -1)
    table = files.root / "plan.csv"
    table.write_text(f"=cmd|'touch {files.mark}'!A1,__import__('os').system('touch {files.mark}')\n0F0\n")
    wrapper = {"pipeline": {"pp_schedule_csv": str(table), "pp_schedule": None}}
    place = str(files.root / "o11")
    run = files.run_file("csv.yaml", strategy="ddp", pp_size=2, nproc=2, wrapper_config=wrapper, output_dir=place)
    for name in ("train", "pipeline show"):
        yield f"a table of actions: {name}", Case((*name.split(), str(run)), 2, "pp_schedule_csv")
    # In a directory of such modules.
    yield "strategies", Case(("strategies",), 0)


def _data(files: _Files) -> Iterator[tuple[str, Case]]:
    cache = files.copy("cache", "cache-with-pickles")
    (meta,) = cache.rglob("meta.json")
    tokens = np.empty(1, object)
    tokens[0] = _Payload(files.mark)
    np.save(meta.parent / "train.npy", tokens, allow_pickle=True)
    sizes = json.loads(meta.read_text())["sizes"]
    _change(meta, sizes={**sizes, "train.npy": (meta.parent / "train.npy").stat().st_size})
    # It is no entry of the cache, and is made again.
    yield "a pickle in the cache: train", Case(files.train("o9", f"data.cache_dir={cache}"), 0, "written")
    pickled = files.root / "pickled.jsonl"
    pickled.write_bytes(pickle.dumps(_Payload(files.mark)))
    yield "a pickle for a corpus: train", Case(files.train("o10", f"data.corpus={pickled}"), 2, "error: ")
    continues = files.copy("out", "goes-on")
    (continues / "summary.json").unlink()
    shutil.rmtree(continues / "checkpoints" / "step-00000002")
    with (continues / "metrics.jsonl").open("ab") as file:
        file.write(pickle.dumps(_Payload(files.mark), protocol=0) + b"\n")
    yield "a pickle among the metrics: train", Case(files.train("goes-on"), -1)


def _checkpoints(files: _Files) -> Iterator[tuple[str, Case]]:
    index = files.copy("out/checkpoints/step-00000002", "crafted-index")
    (index / "index.json").write_bytes(pickle.dumps(_Payload(files.mark)))
    rewrite_manifest(index)
    for arguments, code in (
        (("checkpoint", "show", str(index)), 1),
        (("export", str(index), str(files.root / "exported-index")), 2),
        (("load_checkpoint", str(index)), 2),
    ):
        yield f"crafted-index: {arguments[0]}", Case(arguments, code, "is no index")
    # A run of another model is refused before it looks at the index.
    yield "crafted-index: train", Case(files.train("resumed-index", f"resume={index}"), -1)
    config = files.copy("out/checkpoints/step-00000002", "crafted-config")
    _code(config / "huggingface", files.mark)
    _change(config / "huggingface/config.json", model_type="evil", auto_map=AUTO_MAP)
    _change(config / "huggingface/tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="EvilTokenizer")
    rewrite_manifest(config)
    arguments = ("export", str(config), str(files.root / "exported-config"))
    yield "crafted-config: export", Case(arguments, 2, "code of its own")


@pytest.mark.slow
def test_no_file_runs_anything_under_any_command_though_y_is_answered(tmp_path: Path) -> None:
    root = tmp_path
    files = _Files(root, root / "ran")

    def run(cases: dict[str, Case]) -> dict[str, tuple[int, str]]:
        (root / "cases.json").write_text(json.dumps({name: case.arguments for name, case in cases.items()}))
        arguments = [sys.executable, __file__, str(root / "cases.json"), str(root / "results.json")]
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        subprocess.run(arguments, cwd=root, check=True, env={**os.environ, **own}, timeout=1200)
        found: dict[str, tuple[int, str]] = json.loads((root / "results.json").read_text())
        return found

    # What is in order trains, with the corpus that holds code.
    (code, output), *_ = run({"a run that is in order": Case(("train", str(files.run)), 0)}).values()
    assert code == 0, output
    cases = {
        name: case for make in (_models, _tokenizers, _settings, _data, _checkpoints) for name, case in make(files)
    }
    found = run(cases)
    assert not files.mark.exists()
    assert len(cases) >= 29
    wrong = {}
    for name, case in cases.items():
        code, text = found[name][0], " ".join(found[name][1].split())
        expected = (0, 1, 2) if case.code == -1 else (case.code,)
        is_right = code in expected and re.search(case.reported, text) and "Traceback" not in text
        if not is_right or "run the custom code" in text:
            wrong[name] = (code, text[-600:])
    assert not wrong, json.dumps(wrong, indent=1)


if __name__ == "__main__":
    _drive(*sys.argv[1:])
