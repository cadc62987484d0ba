"""What the ranks of a large run agree on before they write a checkpoint: the first time, and every time after.

A Llama of 70B with AdamW state is sharded by rows over so many ranks, as fsdp2 does it, on the meta device. One process
is the first rank of that world, by torch's fake process group, and does what the first rank does; what the other ranks
have is worked out. Not simulated: the network, which carries what is counted here, and the copy of the state.

- first save: what all ranks have comes in and is unpickled, is divided, the index is made, the shares are pickled.
- each save after: the first rank lists what it has, finds it the same, cuts its share out and writes down what the
  optimizer has beside tensors. Between ranks goes one integer.

    python benchmarks/agreement.py --json results.json
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from common import origin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

from meshwright.checkpoint.saving import (
    SaveInventory,
    build_inventory,
    build_save_plans,
    cut_rectangle,
    encode_optimizer_settings,
)
from meshwright.checkpoint.training_state import flatten_state
from meshwright.tensors.chunks import ChunkedTensor
from meshwright.tensors.state import DTENSOR_LAYOUT, ShardedState, get_sharded_model_state, get_sharded_optimizer_state

LIMIT_S = 1.0
T = TypeVar("T")


def timed(work: Callable[[], T], seconds: dict[str, float], name: str) -> T:
    start = time.perf_counter()
    result = work()
    seconds[name] = time.perf_counter() - start
    return result


def build(ranks: int) -> Callable[[], ShardedState]:
    """The state of the first rank, again at each call."""
    mesh = init_device_mesh("cpu", (ranks,))
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(sharded))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        moments = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    names = {parameter: name for name, parameter in model.named_parameters()}
    return lambda: ShardedState(
        get_sharded_model_state(model, DTENSOR_LAYOUT), get_sharded_optimizer_state(optimizer, names, DTENSOR_LAYOUT)
    )


def held_elsewhere(first: SaveInventory, rank: int, ranks: int) -> SaveInventory:
    """What another rank has, where the first one has `first`; torch rounds rows up."""
    rectangles = []
    for each, (_, shape, _) in zip(first.rectangles, first.metas, strict=True):
        rows = -(-shape[0] // ranks)
        begin, end = min(shape[0], rank * rows), min(shape[0], (rank + 1) * rows)
        if begin < end:
            offsets, sizes = (begin, *each.offsets[1:]), (end - begin, *each.sizes[1:])
            rectangles.append(each._replace(offsets=offsets, sizes=sizes))
    return first._replace(rectangles=tuple(rectangles))


def measure(ranks: int) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        state_now = build(ranks)
        state = state_now()
        tensors = flatten_state(state)
        held = build_inventory(tensors, state.optimizer)
        if held != held_elsewhere(held, 0, ranks):
            raise SystemExit("what the ranks are taken to have is not what fsdp2 gives them")
        sent = [pickle.dumps(held_elsewhere(held, rank, ranks)) for rank in range(ranks)]
        first: dict[str, float] = {}
        found = timed(lambda: [pickle.loads(each) for each in sent], first, "unpickle")
        shares, index = timed(lambda: build_save_plans(found), first, "divide, and make the index")
        scattered = timed(lambda: sum(len(pickle.dumps(each)) for each in shares), first, "pickle")
        share = shares[0]
        later: dict[str, float] = {}

        def own_share(tensors: dict[str, ChunkedTensor]) -> int:
            return len([cut_rectangle(tensors[each.name], each) for each in share.rectangles])

        state = timed(state_now, later, "list the state")
        tensors = flatten_state(state)
        same = timed(lambda: build_inventory(tensors, state.optimizer) == held, later, "compare")
        cuts = timed(lambda: own_share(tensors), later, "cut")
        settings = timed(lambda: encode_optimizer_settings(state.optimizer, share), later, "settings of the optimizer")
    finally:
        dist.destroy_process_group()
    if not same or not cuts or settings is None:
        raise SystemExit("the second save found another state than the first")
    return {
        "ranks": ranks,
        "rectangles": sum(len(each.rectangles) for each in found),
        "first_save": {
            "gathered_mb": sum(map(len, sent)) / 1e6,
            "scattered_mb": scattered / 1e6,
            "index_mb": len(index) / 1e6,
            "seconds": first,
            "total_seconds": sum(first.values()),
        },
        "later_saves": {"gathered_bytes": 8, "seconds": later, "total_seconds": sum(later.values())},
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="What does agreeing on who writes what cost?")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {**origin(), "model": "Llama 70B with AdamW", "results": [measure(ranks) for ranks in options.ranks]}
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    slow = [each["ranks"] for each in found["results"] if each["later_saves"]["total_seconds"] > LIMIT_S]
    if slow:
        raise SystemExit(f"a save after the first blocks more than {LIMIT_S} s at {slow} ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
