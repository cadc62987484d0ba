"""In which order stages run their forwards and backwards: what an order is (`order`), the built-in ones (`rules`),
those of files (`from_csv`), and when their actions run (`timeline`). No torch, and nothing of models.
"""
