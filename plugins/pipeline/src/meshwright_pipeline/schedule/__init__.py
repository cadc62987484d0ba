"""In which order stages run their forwards and backwards: the rules, the built-in orders, those of files, and
their timeline. No torch, and nothing of models.
"""
