"""Lightning Fabric over any meshwright strategy: `Fabric(strategy=MeshStrategy("fsdp2", tp_size=2))`."""

from .strategy import MeshStrategy

__all__ = ["MeshStrategy"]
