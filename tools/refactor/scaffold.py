import sys
from pathlib import Path
ROOT = Path(sys.argv[1])
T, H, P = '"torch>=2.11,<2.16"', '"transformers>=5.17,<5.24"', '"pydantic>=2.9"'
D = {
 "objectives": ("Objectives for meshwright: supervised fine-tuning, DPO and other preference losses, GRPO.", [T, H, P], "", "Preference and policy objectives, each chosen by name."),
 "run": ("Runs of meshwright from a YAML file: data, launch, resume, output, and the commands that go with them.", ['"meshwright-objectives==0.1.0"', T, H, P, '"typer>=0.15"', '"rich>=14.1"', '"PyYAML>=6"', '"matplotlib>=3.8"', '"numpy>=1.26"', '"tokenizers>=0.21"', '"filelock>=3.20.3"'],
   '[project.optional-dependencies]\ndata = ["datasets>=5.2", "fsspec>=2026.3", "pyarrow>=21", "torchdata>=0.11", "zstandard>=0.22"]\n\n', "Run files, data pipelines, launchers, resuming, and the commands `train`, `init`, `data`, `export`, `checkpoint` and `schema`."),
 "plan": ("Plans of meshwright runs: memory, time and communication before anything is allocated, and a search for the best layout.", ['"meshwright-run==0.1.0"', T, H, P, '"typer>=0.15"', '"rich>=14.1"', '"PyYAML>=6"', '"matplotlib>=3.8"', '"numpy>=1.26"'], "", "The commands `plan` and `explain`."),
 "watch": ("A page that shows meshwright runs while they train.", ['"meshwright-run==0.1.0"', P, '"typer>=0.15"', '"starlette>=0.40"', '"uvicorn>=0.30"'], "", "The command `watch`."),
 "diagnose": ("Diagnosis of meshwright runs: replay and compare steps, profiles, and a check of a machine or a run.", ['"meshwright-run==0.1.0"', T, H, P, '"typer>=0.15"', '"rich>=14.1"', '"numpy>=1.26"'], "", "The commands `replay`, `diff`, `profile` and `doctor`."),
 "cluster": ("Job files for clusters: Slurm, Kubernetes, Ray and SkyPilot.", ['"meshwright-run==0.1.0"', P, '"typer>=0.15"', '"PyYAML>=6"'], "", "The command `launch`."),
 "replicate": ("Copies of training state in the memory of other nodes, from which a run resumes without a checkpoint.", [T, P, '"numpy>=1.26"'], "", "The key `checkpoint.replicate` of a run file."),
}
for name, (text, deps, extras, what) in D.items():
    d = ROOT / "plugins" / name; pkg = f"meshwright_{name}"; src = d / "src" / pkg
    src.mkdir(parents=True, exist_ok=True)
    deps = ['"meshwright==0.1.0"', *deps]
    lines = "".join(f"    {x},\n" for x in deps)
    (d / "pyproject.toml").write_text(f'''[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "meshwright-{name}"
version = "0.1.0"
description = "{text}"
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.11"
dependencies = [
{lines}]

{extras}[project.entry-points.meshwright]
{name} = "{pkg}.plugin"

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
{pkg} = ["py.typed"]
''')
    (d / "README.md").write_text(f"# meshwright-{name}\n\n{text}\n\n{what}\n\nInstall it from a clone of meshwright:\n\n    pip install -c constraints.txt -e . -e plugins/{name}\n")
    (src / "py.typed").write_text("")
    if not (src / "__init__.py").exists(): (src / "__init__.py").write_text(f'"""{text}"""\n')
    lic = d / "LICENSE"
    if not lic.exists(): lic.write_bytes((ROOT / "LICENSE").read_bytes())
