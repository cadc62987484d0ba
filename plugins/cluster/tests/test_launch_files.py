"""Files of `meshwright launch`: what they say, by the schemas of those that read them, and what is refused before."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.commands import invoke_in_process

from meshwright.base.errors import ConfigError, MeshwrightError
from meshwright_cluster import TARGETS, Target
from meshwright_cluster.job import ClusterJob, build_job
from meshwright_cluster.job_files import build_submit_command, render_job_files
from meshwright_run.run_file import RunConfig

DATA = Path(__file__).parent
VALUES: dict[str, Any] = {"strategy": "fsdp2", "steps": 100, "batch_size": 64, "checkpoint": {"every": 10}}
VALUES |= {
    "model": {"model_type": "llama", "hidden_size": 16},
    "data": {"seq_len": 16, "vocab_size": 300},
    "output_dir": "/shared/runs/a run",
}
LAUNCH: dict[str, Any] = {"nodes": 2, "gpus_per_node": 8, "cpus_per_rank": 4, "memory_per_node": "512G"}
LAUNCH |= {
    "time_limit": "12h",
    "env": {"NCCL_DEBUG": "it's a $HOME"},
    "setup": ["module load cuda"],
    "slurm": {"partition": "gpu", "account": "a b", "options": ["--exclusive"]},
    "kubernetes": {"image": "registry/image:1", "volume_claim": "shared", "mount_path": "/shared", "queue": "batch"}
    | {"namespace": "team", "node_selector": {"pool": "gpu"}, "service_account": "trainer"},
    "skypilot": {"accelerators": "H100", "infra": "aws/us-east-1", "mounts": {"/shared": "s3://bucket"}},
}


def _job(to: Target, **changes: Any) -> ClusterJob:
    """With changes of nested values by "key__of__value"."""
    values = copy.deepcopy({**VALUES, "launch": LAUNCH})
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
        if value is ...:
            place.pop(last)
    return build_job(values, RunConfig.model_validate(values), to, Path("/shared/jobs/one job"))


def _texts(to: Target, **changes: Any) -> dict[str, str]:
    return render_job_files(_job(to, **changes), to)


def _write_command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


# -- Slurm


def test_a_batch_script_is_shell_in_which_nothing_is_replaced_that_was_given(tmp_path: Path) -> None:
    script = _texts("slurm", launch__setup=['touch "$OUT/set-up"'])["job.sbatch"]
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    for reported in ("--ntasks-per-node=8", "--signal=TERM@120", "--open-mode=append", "--requeue", "--exclusive"):
        assert f"#SBATCH {reported}" in lines
    # The second is a rank that has not yet started to respect signals.
    commands = {
        "srun": 'printf "%s\\n" "$1" "$2" "$NCCL_DEBUG" "$OMP_NUM_THREADS" > "$OUT/reported"\nshift 2\nexec "$@"\n',
        "python": 'kill -TERM $$\nprintf "%s\\n" "$@" > "$OUT/args"\nexit "$CODE"\n',
        "scontrol": 'echo "$@" >> "$OUT/queued"\n',
    }
    for name, text in commands.items():
        _write_command(tmp_path / name, text)
    for code in (0, 1, 143):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), "SLURM_JOB_ID": "7"}
        environment["CODE"] = str(code)
        done = subprocess.run(["bash", "-c", script], env=environment, check=False)
        assert (done.returncode, (tmp_path / "queued").exists()) == (code, code == 143)
    assert (tmp_path / "set-up").exists()
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
    arguments = (tmp_path / "args").read_text().splitlines()
    assert arguments == ["-m", "meshwright", "train", "/shared/jobs/one job/run.yaml"]
    reported = (tmp_path / "reported").read_text().splitlines()
    assert reported == ["--kill-on-bad-exit=1", "--cpus-per-task=4", "it's a $HOME", "4"]


# -- Kubernetes


def _defects(manifest: dict[str, Any]) -> list[str]:
    schemas = json.loads((DATA / "kubernetes-schemas.json").read_text())
    root = {"$ref": f"#/$defs/{schemas['kinds'][manifest['kind']]}", "$defs": schemas["$defs"]}
    return [error.message for error in jsonschema.Draft202012Validator(root).iter_errors(manifest)]


KINDS = ("JobSet", "TrainJob", "PyTorchJob")


def _manifests(kind: str, **changes: Any) -> list[dict[str, Any]]:
    text = _texts("kubernetes", launch__kubernetes__kind=kind, **changes)["job.yaml"]
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_manifests_are_as_their_schemas_have_them(kind: str, nodes: int) -> None:
    settings, job = _manifests(kind, launch__nodes=nodes)
    assert _defects(settings) == _defects(job) == []
    assert _defects({**job, "spec": {**job["spec"], "unknown": []}})
    run = RunConfig.model_validate(yaml.safe_load(settings["data"]["run.yaml"]))
    assert (run.output_dir, run.launch) == ("/shared/runs/a run", None)


def _pod(job: dict[str, Any]) -> dict[str, Any]:
    spec = job["spec"]
    if job["kind"] == "JobSet":
        return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    if job["kind"] == "TrainJob":
        patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        return patch["template"]["spec"]["template"]["spec"]
    return spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_storage_and_more_time_than_torchrun_gives_the_ranks(kind: str) -> None:
    settings, job = _manifests(kind, launch__grace_s=200)
    pod = _pod(job)
    container = pod["containers"][0]
    trainer = job["spec"].get("trainer") or container
    command = trainer["command"]
    assert command[:3] == ["bash", "-c", 'module load cuda\nexec "$$@"']
    assert "--shutdown-timeout=200" in command
    assert pod["terminationGracePeriodSeconds"] > 200
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    assert mounts["/shared"]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert mounts["/etc/meshwright"]["configMap"] == {"name": settings["metadata"]["name"]}
    assert command[-1] == "/etc/meshwright/run.yaml"
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "batch"}
    assert {each["name"]: each.get("value") for each in trainer["env"]}["NCCL_DEBUG"] == "it's a $$HOME"
    resources = trainer.get("resources") or trainer["resourcesPerNode"]
    assert resources["limits"] == {"memory": "512Gi", "nvidia.com/gpu": "8"}


def test_each_kind_says_how_many_machines_and_ranks_there_are_and_who_is_first() -> None:
    job_set = _manifests("JobSet", launch__name="one")[1]["spec"]
    job = job_set["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    command = job["template"]["spec"]["containers"][0]["command"]
    assert {"--nnodes=2", "--nproc-per-node=8", "--node-rank=$(NODE_RANK)"} <= set(command)
    assert "--master-addr=one-ranks-0-0.one" in command
    assert job_set["network"]["subdomain"] == "one"
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job_set["failurePolicy"]["maxRestarts"] == 10
    trainer = _manifests("TrainJob")[1]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert not [word for word in trainer["command"] if word.startswith("--n")]
    replicas = _manifests("PyTorchJob")[1]["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}


# -- SkyPilot and Ray


def test_a_task_of_skypilot_is_as_its_schema_has_it() -> None:
    schemas = json.loads((DATA / "skypilot-schemas.json").read_text())
    task = yaml.safe_load(_texts("skypilot")["job.yaml"])
    for schema, value in ((schemas["task"], task), (schemas["resources"], task["resources"])):
        validator = jsonschema.Draft202012Validator(schema)
        assert not list(validator.iter_errors(value))
        assert list(validator.iter_errors({**value, "gpus": 2}))
    assert (task["resources"]["accelerators"], task["resources"]["use_spot"]) == ("H100:8", True)
    assert task["file_mounts"]["/shared"] == {"source": "s3://bucket", "mode": "MOUNT"}
    assert {"--nnodes=2", "--nproc-per-node=8"} <= set(task["run"].split())


def test_the_driver_of_ray_asks_for_a_worker_for_each_rank() -> None:
    files = _texts("ray")
    tree = ast.parse(files["job.py"])
    calls = {node.func.id: node for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
    given = {each.arg: ast.literal_eval(each.value) for each in calls["ScalingConfig"].keywords}
    assert given == {"num_workers": 16, "use_gpu": True, "resources_per_worker": {"CPU": 4}}
    (failures,) = calls["FailureConfig"].keywords
    assert ast.literal_eval(failures.value) == 10
    assert "launch" not in yaml.safe_load(files["run.yaml"])


# -- each option


OPTIONS: list[tuple[Target, str, Any, str]] = [
    ("slurm", "name", "other", "--job-name=other\n"),
    ("slurm", "nodes", 4, "--nodes=4\n"),
    ("slurm", "gpus_per_node", 4, "--gpus-per-node=4\n"),
    ("slurm", "cpus_per_rank", 3, "--cpus-per-task=3\n"),
    ("slurm", "memory_per_node", "3T", "--mem=3T\n"),
    ("slurm", "time_limit", "2d", "--time=2880\n"),
    ("slurm", "grace_s", 77, "--signal=TERM@77\n"),
    ("slurm", "slurm.account", "me", "--account=me\n"),
    ("slurm", "slurm.qos", "high", "--qos=high\n"),
    ("slurm", "slurm.constraint", "a|b", "--constraint='a|b'\n"),
    ("slurm", "slurm.options", ["--mail-type=END"], "#SBATCH --mail-type=END\n"),
    ("kubernetes", "max_restarts", 3, "maxRestarts: 3\n"),
    ("kubernetes", "kubernetes.namespace", "other", "namespace: other\n"),
    ("kubernetes", "kubernetes.image", "other:2", "image: other:2\n"),
    ("kubernetes", "kubernetes.volume_claim", "other", "claimName: other\n"),
    ("kubernetes", "kubernetes.mount_path", "/shared/runs", "mountPath: /shared/runs\n"),
    ("kubernetes", "kubernetes.queue", "other", "queue-name: other\n"),
    ("kubernetes", "kubernetes.gpu_resource", "amd.com/gpu", "amd.com/gpu: '8'\n"),
    ("kubernetes", "kubernetes.node_selector", {"zone": "b"}, "zone: b\n"),
    ("kubernetes", "kubernetes.service_account", "other", "serviceAccountName: other\n"),
    ("skypilot", "skypilot.accelerators", "A100", "accelerators: A100:8\n"),
    ("skypilot", "skypilot.infra", "gcp", "infra: gcp\n"),
    ("skypilot", "skypilot.image", "docker:a", "image_id: docker:a\n"),
    ("skypilot", "skypilot.use_spot", False, "use_spot: false\n"),
    ("skypilot", "skypilot.mounts", {"/shared/runs": "gs://b"}, "source: gs://b\n"),
    ("skypilot", "skypilot.workdir", "code", "workdir: code\n"),
]


def test_a_job_respects_each_option() -> None:
    plain = {to: "".join(_texts(to).values()) for to in TARGETS}
    for to, key, value, reported in OPTIONS:
        changes = {f"launch__{key.replace('.', '__')}": value}
        assert reported in "".join(_texts(to, **changes).values()), key
        assert reported not in plain[to], key


def test_a_job_respects_ranks_per_node_runtime_and_address() -> None:
    on_cpu = {"device": "cpu", "launch__gpus_per_node": 0}
    assert "--ntasks-per-node=4\n" in _texts("slurm", launch__ranks_per_node=4, **on_cpu)["job.sbatch"]
    values = _job("slurm", launch__nodes=1, launch__ranks_per_node=1, **on_cpu).values
    assert RunConfig.model_validate(values).count_local_ranks(frozenset({"dp_shard"}), 0) == 1
    train_job = _manifests("TrainJob", launch__kubernetes__runtime="other")[1]
    assert train_job["spec"]["runtimeRef"] == {"name": "other"}
    command = build_submit_command(_job("ray", launch__ray={"address": "http://head:8265"}), "ray")
    assert command[:5] == ["ray", "job", "submit", "--address", "http://head:8265"]


# -- what is refused


REFUSED: dict[str, tuple[Target, dict[str, Any], str]] = {
    "ranks that sizes do not fill": ("slurm", {"tp_size": 3}, "does not divide the world size 16"),
    "a batch that ranks do not divide": ("slurm", {"batch_size": 10}, "batch_size=10"),
    "an axis that nobody shards": ("slurm", {"strategy": "ddp", "ep_size": 2}, "ep"),
    "an unknown strategy": ("ray", {"strategy": "fsdp3"}, "not installed"),
    "no number of ranks": ("slurm", {"launch.gpus_per_node": ...}, "number of ranks per node is not set"),
    "GPUs for the CPU": ("slurm", {"device": "cpu"}, "device=cpu"),
    "ranks that share GPUs": ("slurm", {"launch.ranks_per_node": 4}, "each rank has one GPU"),
    "no checkpoints": ("slurm", {"checkpoint": {}}, "would begin at step 0"),
    "a run that starts over": ("slurm", {"resume": "never"}, "resume=never would discard"),
    "a signal that is not heard": ("slurm", {"checkpoint.on_signal": {"signals": ["SIGUSR1"]}}, "with SIGTERM"),
    "a code that says nothing": ("slurm", {"checkpoint.on_signal": {"exit_code": 0}}, "whether to requeue"),
    "only signals, where there are none": ("skypilot", {"checkpoint": {"on_signal": {}}}, "takes machines away"),
    "a code of ranks that are killed": ("slurm", {"checkpoint.on_signal": {"exit_code": 137}}, "or been killed"),
    "a job that is over as it begins": ("slurm", {"launch.time_limit": "3m"}, "leaves no time to train"),
    "a relative directory": ("slurm", {"output_dir": "runs/a"}, "is relative"),
    "a directory of one machine": ("ray", {"output_dir": "/tmp/a"}, "is local to a machine"),
    "a directory in the container": ("kubernetes", {"output_dir": "/runs/a"}, "is not below /shared"),
    "a directory on the machine": ("skypilot", {"output_dir": "/runs/a"}, "is not below /shared"),
    "no image": ("kubernetes", {"launch.kubernetes.image": ...}, "needs launch.kubernetes.image"),
    "no claim": ("kubernetes", {"launch.kubernetes.volume_claim": ...}, "needs launch.kubernetes.volume_claim"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_cluster_could_not_run_is_refused(case: str) -> None:
    to, changes, reported = REFUSED[case]
    _job(to)
    with pytest.raises(MeshwrightError, match=reported) as caught:
        _job(to, **{key.replace(".", "__"): value for key, value in changes.items()})
    assert caught.value.exit_code == 2


def test_a_job_has_a_name_that_each_cluster_takes() -> None:
    for directory, name in (("7B llama", "run-7b-llama"), ("Llama_7", "llama-7"), ("--", "run")):
        assert _job("kubernetes", output_dir=f"/shared/{directory}").name == name


def test_one_machine_may_use_its_own_disk() -> None:
    assert _job("slurm", launch__nodes=1, output_dir="runs/a").world_size == 8
    for to in ("kubernetes", "skypilot", "ray"):
        with pytest.raises(ConfigError, match="is relative"):
            _job(to, launch__nodes=1, output_dir="runs/a")


WRONG: list[tuple[str, Any]] = [
    *(("slurm.partitions", "gpu"), ("slurm.partition", "gpu\n#SBATCH --uid=0"), ("slurm.options", ["rm"])),
    *(("setup", ["a\nb"]), ("time_limit", "12"), ("name", "Not a name"), ("name", "7b"), ("env", {"A B": "c"})),
    *(("memory_per_node", "many"), ("kubernetes.kind", "Job")),
]


def test_unknown_fields_and_what_would_be_another_line_are_refused() -> None:
    for key, value in WRONG:
        with pytest.raises(ValueError, match=key.rpartition(".")[2]):
            _job("slurm", **{f"launch__{key.replace('.', '__')}": value})


# -- the command


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**VALUES, "launch": LAUNCH}))
    return path


@pytest.mark.parametrize("to", TARGETS)
def test_files_are_printed_or_written(to: Target, run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "job"
    arguments = ["launch", run_file, "--to", to, "--out", out, "--nodes", "4", "--set", "tp_size=2"]
    code, printed = invoke_in_process(*arguments, "--dry-run")
    assert (code, out.exists()) == (0, False), printed
    assert "4 x 8 ranks: fsdp2 on dp_shard=16 x tp=2" in invoke_in_process(*arguments)[1]
    for path in out.iterdir():
        text = path.read_text()
        assert f"# {path}\n{text}\n" in printed
        assert path.name != "run.yaml" or yaml.safe_load(text)["tp_size"] == 2


def test_a_command_that_is_not_there_is_named_and_what_submits_is_run_and_its_code_returned(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "job"
    for to in TARGETS:
        code, reported = invoke_in_process("launch", run_file, "--to", to, "--out", out, "--submit")
        assert (code, out.exists()) == (2, False)
        assert f"{build_submit_command(_job(to), to)[0]} is not installed here" in reported
    _write_command(tmp_path / "kubectl", 'echo "$@" > "$0.said"\nexit 3\n')
    assert invoke_in_process("launch", run_file, "--to", "kubernetes", "--out", out, "--submit")[0] == 3
    assert (tmp_path / "kubectl.said").read_text() == f"apply -f {out / 'job.yaml'}\n"


def test_files_are_made_without_torch(run_file: Path) -> None:
    code = (
        "import sys; from meshwright.cli.main import app\n"
        f"try: app(['launch', {str(run_file)!r}, '--to', 'slurm', '--dry-run'])\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- the page


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "clusters.md"
HOME = "/home/me/project"  # Where the page's commands are given


def page(text: str, directory: Path) -> str:
    """The page as it should be: each command with what it prints, up to the copy of the run file."""
    (run_file,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (directory / "run.yaml").write_text(run_file)

    def block(found: re.Match[str]) -> str:
        command, _, part = found[1].partition(" | ")
        line = [sys.executable, "-m", *shlex.split(command)]
        printed = subprocess.run(line, cwd=directory, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
        printed = printed.replace(str(directory.resolve()), HOME).split(f"\n# {HOME}")[0].rstrip("\n")
        if part:
            done = subprocess.run(shlex.split(part), input=printed, stdout=subprocess.PIPE, text=True, check=True)
            printed = done.stdout.rstrip("\n")
        return f"```console\n$ {found[1]}\n{printed}\n```"

    return re.sub(r"```console\n\$ ([^\n]*)\n.*?```", block, text, flags=re.DOTALL)


@pytest.mark.slow
def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```console") == len(TARGETS)
    assert page(text, tmp_path) == text, "run python plugins/cluster/tests/test_launch_files.py"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), Path(place)), encoding="utf-8")
