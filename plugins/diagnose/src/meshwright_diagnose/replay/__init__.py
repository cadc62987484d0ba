"""Replay steps of a run: compare them with the recorded metrics, between ranks, and with another run."""
