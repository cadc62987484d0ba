"""Structure and values of a model: blocks, construction, loading, recomputation, compilation. Knows no mesh axis."""
