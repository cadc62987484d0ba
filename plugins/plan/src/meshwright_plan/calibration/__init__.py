"""Device files, measured on the machine that they describe."""
