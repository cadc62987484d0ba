"""What the fork server imports once, so that each worker starts with it."""

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers.modeling_utils

import meshwright.manager.data_parallel

__all__ = ["meshwright", "torch", "transformers"]
