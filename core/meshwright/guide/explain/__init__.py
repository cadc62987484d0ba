"""A run told in words before it begins: who holds what, what is sent when, and what comes of it.

Every sentence is made of what the plan, the mesh or the run file says; where these do not tell, nothing is said.
"""
