"""A local web page that shows runs from their directories, during and after training. Imports no torch."""
