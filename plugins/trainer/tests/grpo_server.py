"""What stands for `vllm serve` and for vllm's NCCL: a server of trl's protocol, and a package that it imports.

The server speaks what trl.generation.vllm_client asks of vllm: it generates with a model of its own, and takes weights
as trl announces them over HTTP. They come over a socket, where vllm has NCCL, in the order that was announced.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

WORDS = 12

PACKAGE = {
    "vllm-0.27.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.27.0\n",
    "vllm-0.27.0.dist-info/top_level.txt": "vllm\n",
    "vllm/__init__.py": "__version__ = '0.27.0'\nLLM = RequestOutput = SamplingParams = None\n",
    "vllm/sampling_params.py": "StructuredOutputsParams = None\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": "def get_ip():\n    return '127.0.0.1'\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_engine.py": """
import socket
from types import SimpleNamespace


class NCCLTrainerSendWeightsArgs:
    def __init__(self, group, packed):
        self.group = group


class NCCLWeightTransferEngine:
    @staticmethod
    def trainer_init(info):
        with socket.create_server((info["master_address"], info["master_port"])) as listening:
            connection, _ = listening.accept()
        return SimpleNamespace(connection=connection, group=SimpleNamespace())

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        for _, tensor in iterator:
            trainer_args.group.connection.sendall(tensor.detach().contiguous().numpy().tobytes())
""",
}


def write_package(directory: Path) -> None:
    for name, text in PACKAGE.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Engine:
    """The model that the server generates with, and digests of what it was fed with."""

    def __init__(self) -> None:
        import trainer_cases

        self.model, self.updates, self.calls = trainer_cases.model().eval(), [], 0
        self.is_updating, self.resets = False, 0
        self.connection: socket.socket | None = None

    def join(self, info: dict[str, Any]) -> dict[str, Any]:
        for _ in range(200):
            try:
                self.connection = socket.create_connection((info["master_address"], info["master_port"]))
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        return {}

    def take(self, info: dict[str, Any]) -> dict[str, Any]:
        from hashlib import sha256

        places, found = dict(self.model.named_parameters()), {}
        for name, kind, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            place = places[name]
            assert self.is_updating
            assert (place.dtype, list(place.shape)) == (getattr(torch, kind), shape)
            data = bytearray()
            while len(data) < place.nbytes:
                data += self.connection.recv(place.nbytes - len(data))
            found[name] = sha256(data).hexdigest()
            place.data.copy_(torch.frombuffer(data, dtype=place.dtype).view(shape))
        assert found.keys() == places.keys()
        self.updates.append(found)
        return {}

    @torch.no_grad()
    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        choices = []
        for number, prompt in enumerate(asked["prompt"]):
            for index in range(asked["n"]):
                generator = torch.Generator().manual_seed(asked["seed"] + 1000 * self.calls + 10 * number + index)
                ids, tokens, log_probs = list(prompt), [], []
                while len(tokens) < asked["max_tokens"] and (not tokens or tokens[-1] != 1):
                    every = self.model(torch.tensor([ids])).logits[0, -1].div(asked["temperature"]).log_softmax(-1)
                    token = int(torch.multinomial(every[1:WORDS].exp(), 1, generator=generator)) + 1
                    ids.append(token)
                    tokens.append(token)
                    log_probs.append(float(every[token]))
                names = [f"token_id:{token}" for token in tokens]
                tops = [{name: value} for name, value in zip(names, log_probs, strict=True)]
                reported = {"tokens": names, "token_logprobs": log_probs, "top_logprobs": tops}
                choices.append({"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": reported})
        return {"choices": choices}

    def answer(self, path: str, asked: dict[str, Any]) -> Any:
        if path == "/server_info":
            engine = {"weight_transfer_config": {"backend": "nccl"}}
            return {"vllm_config": {**engine, "model_config": {"logprobs_mode": "processed_logprobs"}}}
        if path in ("/start_weight_update", "/finish_weight_update"):
            self.is_updating = path.startswith("/start")
            return {}
        if path == "/reset_prefix_cache":
            self.resets += 1
            return {"success": True}
        known = {
            "/health": dict,
            "/v1/models": lambda: {"data": [{"id": "tiny"}]},
            "/get_world_size": lambda: {"world_size": 1},
            "/init_weight_transfer_engine": lambda: self.join(asked["init_info"]),
            "/update_weights": lambda: self.take(asked["update_info"]),
            "/v1/completions": lambda: self.complete(asked),
            "/updates": lambda: {"updates": self.updates, "resets": self.resets},
        }
        return known[path]()


def serve(port: int) -> None:
    engine = Engine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._do({})

        def do_POST(self) -> None:
            self._do(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

        def _do(self, asked: dict[str, Any]) -> None:
            try:
                status, text = 200, json.dumps(engine.answer(self.path.partition("?")[0], asked))
            except Exception as error:
                status, text = 400, repr(error)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(int(sys.argv[1]))
