"""Runs on packed, padded and streamed documents continue in the middle, on the same mesh and on another."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.commands import write_run
from support.runs import STEPS, RunWorkspace

from meshwright_run.data.tokenizer import train_tokenizer

KILLED_AFTER = 5


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rows")
    write_run(directory)
    draw = random.Random(0)
    for name, count in (("a", 60), ("b", 30), ("eval", 10)):
        texts = [
            " ".join(draw.choices(["one", "two", "three", "four", "five", "six"], k=draw.randint(1, 12)))
            for _ in range(count)
        ]
        lines = [json.dumps({"text": f"{name} {text}"}) for text in texts]
        (directory / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    texts = [json.loads(line)["text"] for line in lines]
    train_tokenizer(texts, 280).save_pretrained(directory / "tokenizer")
    return directory


def settings(workplace: Path, kind: str) -> dict[str, Any]:
    """What a run file says of its data and mesh: two sources, shuffled, with shares where one is streamed."""
    sources: list[dict[str, Any]] = [{"files": str(workplace / f"{name}.jsonl")} for name in ("a", "b")]
    if kind == "streamed":
        sources = [{**source, "weight": weight} for source, weight in zip(sources, (1, 2), strict=True)]
        sources[0]["streaming"] = True
    return {
        "data": {
            "sources": sources,
            "eval_sets": {"own": {"files": str(workplace / "eval.jsonl")}},
            "eval_fraction": 0,
            "tokenizer": str(workplace / "tokenizer"),
            "cache_dir": str(workplace / "cache"),
            "seq_len": 48,
            "packing": "none" if kind == "padded" else "documents",
            "too_long": "truncate",
        },
        "batch_size": 4,
        "eval": {"every": 4},
        "model": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "dtype": "float64",
        },
    }


MESHES: dict[str, dict[str, Any]] = {
    "dp": {"strategy": "fsdp2", "micro_batch_size": 1},
    "tp": {"strategy": "fsdp2", "tp_size": 2, "micro_batch_size": 2},
    "cp": {"strategy": "fsdp2", "cp_size": 2, "micro_batch_size": 2},
    "pp": {"strategy": "fsdp2", "pp_size": 2, "micro_batch_size": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mesh"), [("packed", "tp"), ("padded", "pp"), ("streamed", "cp")])
def test_a_run_continues_on_the_same_mesh_and_on_another(kind: str, mesh: str, workplace: Path, tmp_path: Path) -> None:
    """Kill a run, and continue with it: bit for bit on the same mesh, and to rounding on another."""
    given = settings(workplace, kind)
    places = {name: RunWorkspace(workplace, tmp_path / name) for name in ("whole", "killed")}
    for place in places.values():
        place.directory.mkdir()
    places["whole"].run_successfully(ranks=2, **given, **MESHES["dp"])
    expected = places["whole"].read_metrics()
    assert len(expected) == STEPS
    _, _, code = places["killed"].run(ranks=2, kill_after=KILLED_AFTER, **given, **MESHES["dp"])
    assert code == 137
    for name in ("dp", mesh):
        again = RunWorkspace(workplace, tmp_path / name)
        shutil.copytree(places["killed"].directory, again.directory)
        again.run_successfully(ranks=2, **given, **MESHES[name])
        found = again.read_metrics()
        if name == "dp":
            assert found == expected
            continue
        for one, other in zip(found, expected, strict=True):
            assert one["num_tokens"] == other["num_tokens"]
            assert one.keys() == other.keys()
            for key in one.keys() & {"loss", "grad_norm", "held_out_loss"}:
                assert one[key] == pytest.approx(other[key], rel=1e-12), key


@pytest.mark.slow
def test_other_weights_are_another_run(workplace: Path, tmp_path: Path) -> None:
    place = RunWorkspace(workplace, tmp_path)
    given = settings(workplace, "streamed")
    place.run_successfully(**given, steps=2)
    given["data"]["sources"][0]["weight"] = 5
    _, reported, code = place.run(**given, steps=4)
    assert code == 2
    assert "data.sources.0.weight=5" in reported
