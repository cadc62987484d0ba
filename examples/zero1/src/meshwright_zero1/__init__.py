"""ZeRO-1 as a meshwright strategy: whole copies of the parameters, optimizer state divided among the ranks."""
