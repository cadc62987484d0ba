"""Checks of machines and of ranks: the command `meshwright doctor`."""
