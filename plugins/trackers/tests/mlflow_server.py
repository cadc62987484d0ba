"""MLflow's own server application over a store in a file, in a process of its own.

    python mlflow_server.py FOLDER PORT_FILE

It writes its port into PORT_FILE as soon as it answers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mlflow.server import app
from mlflow.server.handlers import initialize_backend_stores
from werkzeug.serving import make_server


def main(folder: Path, port_file: Path) -> None:
    initialize_backend_stores(f"sqlite:///{folder / 'server.db'}", default_artifact_root=str(folder / "artifacts"))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    port_file.with_suffix(".tmp").write_text(str(server.port))
    port_file.with_suffix(".tmp").replace(port_file)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
