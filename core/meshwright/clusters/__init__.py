"""Files with which a cluster runs a run file: for Slurm, Kubernetes, Ray and SkyPilot, checked, and submitted."""
