"""What a rank runs in a step: its order of actions, its stages, and the losses of the last one."""
