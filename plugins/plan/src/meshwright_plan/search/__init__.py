"""The fastest layouts that fit."""
